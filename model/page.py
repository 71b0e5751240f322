"""The page that shows a pool: its files, and what a browser may do with them.

Decides: which files there are (a name that is not listed is not there, whatever the disk says),
their types, and the headers that go with every answer to the page. The page may load scripts,
styles and images of its server and nothing else, is shown in no frame, and posts no form.

Does not know: the server (`view.py` for a recorded trace, `model.serve` for a running engine).
"""

from pathlib import Path
from typing import Final

from model.errors import InvalidArgumentError

_FOLDER: Final = Path(__file__).parent / "serve" / "page"
_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript; charset=utf-8",
    "frames.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "server.js": "text/javascript; charset=utf-8",
}
FILES: Final = frozenset(_TYPES)
"""The names that `page_file` knows."""

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_file(name: str) -> tuple[str, bytes]:
    """Return the type and the content of a file of the page. O(its size).

    Raises:
        InvalidArgumentError: the page has no such file.
    """
    if name not in _TYPES:
        raise InvalidArgumentError(f"page: wanted one of {sorted(_TYPES)}, got {name!r}")
    return _TYPES[name], (_FOLDER / name).read_bytes()
