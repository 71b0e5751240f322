"""Progress of work without pieces that takes a while: a line on stderr.

Decides: that such a line comes only when the work has taken a while, and again while it goes on:
what is done at once is not worth one.

Does not know: what the work is; how far work in pieces is (`bars.py`).
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

from model.errors import visible

_PATIENCE_S = 2.0
_AGAIN_S = 20.0


def say(line: str) -> None:
    """Write a line to stderr, if there is one, in one go: others write there too. O(line).

    All that the commands write there comes by here, so no control character reaches a terminal.
    """
    if sys.stderr is not None:
        sys.stderr.write(visible(f"{line}\n"))  # print writes the end of a line apart
        sys.stderr.flush()


@contextlib.contextmanager
def telling(work: str) -> Iterator[None]:
    """Say on stderr what is going on, if the body takes longer than a user waits in silence.

    Args:
        work: the name of the work, as in "loading the weights".
    """
    took_s, is_over = 0.0, False
    timers: list[threading.Timer] = []

    def wait(wait_s: float) -> None:
        timers[:] = [threading.Timer(wait_s, tell, [wait_s])]
        timers[0].daemon = True
        timers[0].start()

    def tell(waited_s: float) -> None:
        nonlocal took_s
        if is_over:  # it fired while it was cancelled
            return
        took_s += waited_s
        with contextlib.suppress(OSError, ValueError):  # a stderr that is full or closed
            say(f"{work} ..." if waited_s == _PATIENCE_S else f"{work} ... {took_s:.0f} s so far")
        if not is_over:
            wait(_AGAIN_S)

    wait(_PATIENCE_S)
    try:
        yield
    finally:
        is_over = True
        timers[0].cancel()
