"""A recorded trace in a browser: `python -m model.view trace.json`.

Decides: that a file is looked at before anything is served, so that a wrong one is a line on
stderr; that the page and the trace are served to this machine alone, to requests that name it by
its own name (a page elsewhere that has its own name point here gets nothing).

Does not know: what is in a frame; the page checks that (`serve/page/frames.js`).
"""

import http.server
import json
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from model.cli.exits import leaves
from model.cli.settings import Flags
from model.control.settings import check_settings, setting
from model.errors import UsageError, visible
from model.page import FILES, HEADERS, page_file

_JSON = "application/json; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The settings of the page that shows a trace."""

    port: int = setting(
        0, help="port to listen on; 0: any free port", least=0, most=2**16 - 1, is_common=True
    )
    browser: bool = setting(True, help="open the page in a browser", is_common=True)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True)
class Trace:
    """A file that holds a trace with a pool in it."""

    name: str
    content: bytes


def read_trace(path: str) -> Trace:
    """Read a trace file, and look whether it is one. O(its size).

    Raises:
        UsageError: it cannot be read, or `--trace` has not written it.
    """
    try:
        content = Path(path).read_bytes()
        document = json.loads(content)
    except OSError as error:
        raise UsageError(f"cannot read {path!r}: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: not a trace: nested too deeply") from error
    except ValueError as error:  # not JSON, not UTF-8, or a NUL in the name
        raise UsageError(f"{path}: not a trace: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UsageError(f"{path}: not a trace: wanted an object with traceEvents")
    record = document.get("kvcore")
    if not isinstance(record, dict) or not isinstance(record.get("frames"), list):
        raise UsageError(
            f"{path}: the trace holds no KV cache blocks; write a new one with `model.run --trace`"
        )
    return Trace(Path(path).name, content)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers for the page's files and one trace. GET and HEAD alone."""

    server_version, sys_version = "kvcore", ""
    timeout = 30

    def __init__(self, trace: Trace, *connection: object) -> None:
        self._trace = trace
        super().__init__(*connection)  # type: ignore[arg-type]  # as the server gives them

    def do_GET(self) -> None:
        """Answer a request."""
        kind, content, status = self._answer(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815  # the base class calls it so

    def log_message(self, *_: object) -> None:
        """Say nothing: a request is no news."""

    def _answer(self, path: str) -> tuple[str, bytes, HTTPStatus]:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in {f"127.0.0.1:{port}", f"localhost:{port}"}:
            return "text/plain", b"wrong host\n", HTTPStatus.MISDIRECTED_REQUEST
        if path == "/page/source":
            about = {"kind": "trace", "name": self._trace.name}
            return _JSON, json.dumps(about).encode(), HTTPStatus.OK
        if path == "/view/trace":
            return _JSON, self._trace.content, HTTPStatus.OK
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        if name in FILES:
            return *page_file(name), HTTPStatus.OK
        return "text/plain", b"not found\n", HTTPStatus.NOT_FOUND


def make_server(trace: Trace, port: int) -> http.server.ThreadingHTTPServer:
    """Return a server of a trace on this machine; port 0 takes a free one.

    Raises:
        UsageError: the port is taken.
    """
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, trace))
    except OSError as error:
        raise UsageError(f"--port: cannot listen on {port}: {error.strerror}") from error


def main(arguments: Sequence[str]) -> None:
    """Serve the trace that the command line names first, until a signal.

    Raises:
        UsageError: a flag or the file is wrong.
    """
    flags = Flags("python -m model.view FILE", "Show a trace written by --trace in a browser.")
    flags.add("how", ViewOptions)
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    options = flags.parse(arguments[path is not None :]).of(ViewOptions)
    if path is None:
        raise UsageError("the first argument must be a file written by --trace")
    with make_server(read_trace(path), options.port) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        print(visible(f"{path}: {address} (Ctrl-C ends)"), flush=True)
        if options.browser:
            webbrowser.open(address)
        server.serve_forever()


if __name__ == "__main__":
    with leaves():
        main(sys.argv[1:])
