"""How far long work has come: a bar on a terminal, a line on stderr for work without pieces.

Decides: that a bar is drawn on stderr if that is a terminal and nowhere else, so that nothing of it
ever lands in a file, a pipe or a JSON document; and how often. That a line about work comes only
when the work has taken a while: what is done at once is not worth one.

Invariants: what is drawn is wiped when the work ends, however it ends.

Does not know: what the work is.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TextIO

_INTERVAL_S = 0.1
_PATIENCE_S = 3.0
_BAR_WIDTH = 24


def say(line: str) -> None:
    """Write a line to stderr, if there is one. O(line)."""
    if sys.stderr is not None:  # print takes None for stdout
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def telling(work: str, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Say on stderr what is going on, if the body takes longer than a user waits in silence.

    Args:
        work: what is done, as in "loading the weights".
        patience_s: how long nothing is said.
    """

    def tell() -> None:
        with contextlib.suppress(OSError, ValueError):  # a stderr that is full or closed
            say(f"{work} ...")

    timer = threading.Timer(patience_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress:
    """A bar for `total` equal pieces of work; a context manager.

    Args:
        label: what is done.
        total: how many pieces there are, at least 1.
        out: where to draw; None: stderr.
        is_wanted: False: nowhere, because something else is shown meanwhile.
    """

    def __init__(
        self, label: str, total: int, out: TextIO | None = None, *, is_wanted: bool = True
    ) -> None:
        stream = sys.stderr if out is None else out
        has_terminal = is_wanted and stream is not None and stream.isatty()
        self._out = stream if has_terminal else None
        self._label = label
        self._total = total
        self._done = 0
        self._begin_s = time.perf_counter()
        self._drawn_s = -_INTERVAL_S

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._out is not None:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def advance(self, pieces: int = 1) -> None:
        """Count pieces that are done; draws at most ten times a second. O(1)."""
        self._done += pieces
        self._draw()

    def _draw(self) -> None:
        now = time.perf_counter()
        if self._out is None or now - self._drawn_s < _INTERVAL_S:
            return
        self._drawn_s = now
        filled = _BAR_WIDTH * min(self._done, self._total) // self._total
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        line = f"{self._label} [{bar}] {self._done}/{self._total} {now - self._begin_s:.0f} s"
        width = shutil.get_terminal_size().columns - 1
        self._out.write(f"\r{line[:width]}\x1b[K")
        self._out.flush()
