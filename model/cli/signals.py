"""Signals that ask a process to end: SIGINT, SIGTERM and SIGHUP, for every command.

Decides: at first a signal ends the process at once (`end_by`). While a `StopRequest` handles them,
the first one only asks for an end and the next one has its previous effect. A signal that was
ignored when the process started, as for a shell's background job or nohup, stays ignored.

Invariants: handlers are installed by the main thread alone, the only one that may.

Does not know: exit codes (`exits.py`), what is run.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}

Handler = Callable[[int, FrameType | None], object]


def word(number: int) -> str:
    """Return the word for what a signal did, such as "interrupted". O(1)."""
    return _WORDS[signal.Signals(number).name]


def end_by(handler: Handler) -> None:
    """Install a handler for every such signal. O(1)."""
    for number in _handled():
        signal.signal(number, handler)


class StopRequest:
    """The handler of signals that ask for an end; true once one has come.

    Args:
        notify: called by the first signal, in the main thread.

    Attributes:
        number: the first signal; None: none has come.
    """

    def __init__(self, notify: Callable[[], object] = lambda: None) -> None:
        self.number: int | None = None
        self._notify = notify
        self._event = threading.Event()
        is_main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.getsignal(number) for number in _handled() if is_main}

    def __bool__(self) -> bool:
        return self.number is not None

    def handle(self) -> None:
        """Install the handlers, also again after a library has installed other ones. O(1)."""
        for number in self._before:
            signal.signal(number, self._ask)

    def restore(self) -> None:
        """Install the previous handlers. O(1)."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a signal, at most `timeout_s`; return whether one has come."""
        return self._event.wait(timeout_s)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        earlier = self._before[signal.Signals(number)]
        if self.number is None:
            self.number = number
            self._event.set()
            self._notify()
        elif callable(earlier):
            earlier(number, frame)
        else:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stopping(notify: Callable[[], object] = lambda: None) -> Iterator[StopRequest]:
    """Let the body stop by itself: the first signal asks for it, the next has its former effect.

    Args:
        notify: called by the first signal, in the main thread.

    Yields:
        The request to stop, to be checked between two pieces of work.
    """
    asked = StopRequest(notify)
    asked.handle()
    try:
        yield asked
    finally:
        asked.restore()


def _handled() -> list[signal.Signals]:
    """Return the signals that ask for an end, if this system has them and does not ignore them."""
    known = [signal.Signals[name] for name in _WORDS if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
