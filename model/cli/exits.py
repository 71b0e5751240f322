"""The end of a command-line process: its exit code, and the one line that says why.

Decides: exit codes, and that a signal ends the process at once, with one line, unless the body
handles signals itself (`signals.stopping`).

Invariants: 1 is never given here, so that it can only mean what the run says it means; stdout is
flushed before the code is chosen, so an output that could not be written is never a success; a bug
keeps its traceback, and says where to report it. A library that cannot be imported, because of the
environment or its installation, is no bug of ours, and neither is an error beside a package in a
version that is not supported.

Does not know: what was run.
"""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from model.cli.limits import exhausted
from model.cli.progress import say
from model.cli.settings import flag_name
from model.cli.signals import end_by, word
from model.cli.versions import unsupported
from model.control.config import EngineConfig
from model.control.settings import settings_of
from model.errors import ModelError, RankLostError

BAD_INPUT = 2
FAILED = 3
READER_GONE = 141
_MAX_LINE = 2000
_MAX_REASON = 300
_OURS = ("__main__", "backends", "kvcore", "model")
_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")

_SETTING = re.compile(r"^\w+(?=: )|(?<= combined with )\w+")
_REPORT = "This is a bug in kvcore. Please report the lines above together with the command."


class Stopped(KeyboardInterrupt):  # as what it is made of, it is no error
    """A signal asked for an end, and the work has ended."""

    def __init__(self, number: int, report: str) -> None:
        super().__init__(number)
        self.number = number
        self.report = report


@contextlib.contextmanager
def exits() -> Iterator[None]:
    """Run the body; an exception that leaves it becomes an exit code and a line on stderr.

    Raises:
        SystemExit: instead of any exception, and as the body raised it.
    """
    try:
        with _flushed_output():
            yield
    except Stopped as error:
        _say(f"{word(error.number)}: {error.report}")
        code = _code(error.number)
    except KeyboardInterrupt:
        _say(word(signal.SIGINT))
        code = _code(signal.SIGINT)
    except BrokenPipeError:
        _drop_output()
        code = READER_GONE
    except Exception as error:  # noqa: BLE001
        code = _failed(error)
    else:
        return
    sys.exit(code)


@contextlib.contextmanager
def leaves() -> Iterator[None]:
    """Run the body of a whole process as `exits` does, with its signals; end it afterwards.

    Nothing is torn down: freeing what torch and its compilers hold takes seconds and has no
    effect. For the same reason a signal unwinds nothing; an exception raised in the middle of
    loading a C++ library would abort the process.
    """
    end_by(_end)
    code: object = 0
    try:
        with exits():
            yield
    except SystemExit as ending:
        code = ending.code
    _leave(code if isinstance(code, int) else 0)


def in_flags(message: str) -> str:
    """Return an error about a setting of an engine, with the names of its flags. O(settings)."""
    flags = {one.name: flag_name(one) for one in settings_of(EngineConfig) if one.flag != ""}
    return _SETTING.sub(lambda found: flags.get(found[0], found[0]), message)


def _end(number: int, _: FrameType | None) -> None:
    """End the process at a signal, with one line."""
    _say(word(number))
    _leave(_code(number))


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            # RuntimeError: the signal came in the middle of a write.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                stream.flush()
    os._exit(code)


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


def _failed(error: Exception) -> int:
    """Say in a line what an error means to the user; return the exit code."""
    limit = exhausted(error)
    if limit is None and isinstance(error, ModelError):
        _say(f"error: {in_flags(str(error))}")
        return BAD_INPUT
    if limit is None and not isinstance(error, (OSError, MemoryError)):
        return _fault(error)
    if not (isinstance(error, RankLostError) and error.was_told):
        _say(f"error: {limit or str(error) or 'out of memory'}")
    _drop_output()
    return FAILED


def _fault(error: Exception) -> int:
    """Tell an error that nothing foresaw; the exit code, which is not 1."""
    versions: list[str] = []
    with contextlib.suppress(ImportError, OSError, ValueError):  # metadata that cannot be read
        versions = unsupported()
    if versions:
        _say(f"error: {'; '.join(versions)} ({type(error).__name__}: {_brief(error)})")
        return BAD_INPUT
    library = _not_loaded(error)
    if library:
        _say(f"error: {library} does not load: {type(error).__name__}: {_brief(error)}")
        return BAD_INPUT
    _say(f"{traceback.format_exc()}{_REPORT}", is_one_line=False)
    return FAILED


def _not_loaded(error: Exception) -> str:
    """Return the library whose import has raised an error; empty if something else has."""
    below: list[tuple[str, str]] = []  # package and function, of the calls below our last one
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        below = [] if package in _OURS else [*below, (package, frame.f_code.co_name)]
    if not below:
        name = error.name if isinstance(error, ImportError) else None
        package = (name or "").partition(".")[0]
        return "" if package in _OURS else package
    if below[0][1] != "<module>" and below[0][0] not in _IMPORTING:
        return ""
    return next((package for package, _ in below if package not in _IMPORTING), "")


def _brief(error: BaseException) -> str:
    """Return the beginning of an error's message."""
    text = " ".join(str(error).split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}..."


def _drop_output() -> None:
    """Send what stdout still holds nowhere: the interpreter would complain when it flushes."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
