"""How a process of the command line ends: its exit code, and the one line that says why.

Decides: what SIGINT, SIGTERM and SIGHUP do. They end the process at once, with one line; where the
body said that it can stop by itself (`stopping`), the first one only asks it to, so that nothing
finished is lost, and the second ends it.

Invariants: 1 is never given here, so that it can only mean what the run says it means; stdout is
flushed before the code is chosen, so an output that could not be written is never a success; a bug
keeps its traceback, and says where to report it.

Does not know: what was run.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from model.cli.progress import say
from model.errors import ModelError

BAD_INPUT = 2
FAILED = 3
READER_GONE = 141
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}
_MAX_LINE = 2000

_REPORT = "This is a bug in kvcore: please report the lines above, and the command, to its authors."


class Stopped(KeyboardInterrupt):  # as what it is made of, it is no error
    """A signal asked for an end, and the work came to one.

    Args:
        number: of the signal.
        report: what is there nevertheless.
    """

    def __init__(self, number: int, report: str) -> None:
        super().__init__(number)
        self.number = number
        self.report = report


class Asked:
    """Whether a signal has asked for an end.

    Attributes:
        number: of the signal; None: it has not.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def __bool__(self) -> bool:
        return self.number is not None


@contextlib.contextmanager
def exits() -> Iterator[None]:
    """Run the body; an exception that leaves it becomes an exit code and a line on stderr.

    Raises:
        SystemExit: instead of any exception, and as the body raised it.
    """
    try:
        with _flushed_output():
            yield
    except ModelError as error:
        _say(f"error: {error}")
        code = BAD_INPUT
    except Stopped as error:
        _say(f"{_word(error.number)}: {error.report}")
        code = _code(error.number)
    except KeyboardInterrupt:
        _say(_word(signal.SIGINT))
        code = _code(signal.SIGINT)
    except BrokenPipeError:
        _drop_output()
        code = READER_GONE
    except (OSError, MemoryError) as error:
        _say(f"error: {str(error) or 'out of memory'}")
        _drop_output()
        code = FAILED
    except Exception:  # noqa: BLE001  # a bug: all of it is told, and it must not exit with 1
        _say(f"{traceback.format_exc()}{_REPORT}", is_one_line=False)
        code = FAILED
    else:
        return
    sys.exit(code)


@contextlib.contextmanager
def leaves() -> Iterator[None]:
    """`exits` for a whole process, with its signals: it is gone when the body is done.

    Nothing is torn down: freeing what torch and its compilers hold takes seconds, and gives nobody
    anything. For the same reason a signal unwinds nothing; an exception raised in the middle of
    loading a C++ library would abort the process.
    """
    for number in _signals():
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job, nohup
            signal.signal(number, _end)
    code: object = 0
    try:
        with exits():
            yield
    except SystemExit as ending:
        code = ending.code
    _leave(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def stopping() -> Iterator[Asked]:
    """Let the body stop by itself: the first signal asks it to, the next one does as before.

    Yields:
        What to look at between two pieces of work.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():  # only that one sets handlers
        yield asked
        return

    def ask(number: int, frame: FrameType | None) -> None:
        earlier = before[signal.Signals(number)]
        if asked.number is None:
            asked.number = number
        elif callable(earlier):
            earlier(number, frame)
        else:
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _signals()}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number in heeded:
            signal.signal(number, before[number])


def _end(number: int, _: FrameType | None) -> None:
    """What a signal does: one line, and the process is gone."""
    _say(_word(number))
    _leave(_code(number))


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # RuntimeError: the signal came in the middle of a write.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                stream.flush()
    os._exit(code)


def _signals() -> list[signal.Signals]:
    """The signals that ask for an end, as far as this system has them."""
    return [signal.Signals[name] for name in _WORDS if hasattr(signal, name)]


def _word(number: int) -> str:
    return _WORDS[signal.Signals(number).name]


def _code(number: int) -> int:
    return 128 + number


@contextlib.contextmanager
def _flushed_output() -> Iterator[None]:
    if sys.stdout is None:
        raise OSError("stdout is closed")
    try:
        yield
    finally:
        sys.stdout.flush()


def _say(text: str, *, is_one_line: bool = True) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # there is nowhere left to complain
        if is_one_line:
            line = " ".join(text.split())
            text = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..."
        say(text)


def _drop_output() -> None:
    """Send what stdout still holds nowhere: the interpreter would complain when it flushes."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # a stream without a descriptor of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
