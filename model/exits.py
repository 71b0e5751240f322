"""How a process of the command line ends: its exit code, and the one line that says why.

Invariants: 1 is never given here, so that it can only mean what the run says it means; stdout is
flushed before the code is chosen, so an output that could not be written is never a success; a bug
keeps its traceback.

Does not know: what was run.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from model.errors import ModelError

BAD_INPUT = 2
FAILED = 3
INTERRUPTED = 130
READER_GONE = 141


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
    except KeyboardInterrupt:
        _say("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        code = READER_GONE
    except (OSError, MemoryError) as error:
        _say(f"error: {str(error) or 'out of memory'}")
        _drop_output()
        code = FAILED
    except Exception:  # noqa: BLE001  # a bug: all of it is told, and it must not exit with 1
        _say(traceback.format_exc(), is_one_line=False)
        code = FAILED
    else:
        return
    sys.exit(code)


@contextlib.contextmanager
def _flushed_output() -> Iterator[None]:
    if sys.stdout is None:
        raise OSError("stdout is closed")
    try:
        yield
    finally:
        sys.stdout.flush()


def _say(text: str, *, is_one_line: bool = True) -> None:
    if sys.stderr is not None:  # print takes None for stdout
        with contextlib.suppress(OSError):  # there is nowhere left to complain
            print(" ".join(text.split()) if is_one_line else text, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Send what stdout still holds nowhere: the interpreter would complain when it flushes."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # a stream without a descriptor of its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
