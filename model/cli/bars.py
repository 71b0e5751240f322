"""Progress bars, by tqdm.

Decides: that a bar is drawn on stderr if that is a terminal and nowhere else, so that nothing of it
ever lands in a file, a pipe or a JSON document; and that it is wiped when the work ends.

Apart from `progress.py`, because tqdm takes half as long to load as all of `--help`.

Does not know: what the work is.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm


class Advance(Protocol):
    """Counts pieces that are done."""

    def __call__(self, pieces: int = 1, /) -> None:
        """Count further pieces. O(1)."""
        ...


@contextmanager
def bar(what: str, total: int, *, is_wanted: bool = True) -> Iterator[Advance]:
    """Draw a bar for `total` equal pieces of work while the body runs.

    Args:
        what: the name of the work.
        total: the number of pieces.
        is_wanted: False: draw nothing, because something else is shown meanwhile.

    Yields:
        A function that counts the pieces that are done.
    """
    is_drawn = is_wanted and sys.stderr is not None  # None: it is closed
    disable = None if is_drawn else True  # tqdm's words for: where it is a terminal
    with tqdm(desc=what, total=total, unit="", leave=False, disable=disable) as drawn:

        def advance(pieces: int = 1, /) -> None:
            drawn.update(pieces)

        yield advance
