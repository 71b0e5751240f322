"""Processes of this Python that compile for the one that starts them: helpers.

Decides: what a helper gets from its caller (where packages are found; tensors by their looks, for
example), how many cores helpers share, and how they end. Invariants: none outlives its caller; what
a helper has started ends with it. Importing this imports no torch.

Does not know: what helpers do.
"""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_BEGIN = "from backends.helper_process import end_with_caller; end_with_caller()\n"
_LOOK_S = 0.5  # how often a helper looks whether its caller is there


class HelperProcess(subprocess.Popen[bytes]):
    """A helper; it reads from a pipe, and is a group, to be ended as one. A few ms.

    Args:
        code: the code that it runs.
        environment: beside this process's own.
        answers: True if it writes to a pipe too.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, code: str, environment: Mapping[str, str], *, answers: bool = False) -> None:
        path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
        super().__init__(
            # -P: what lies here is not imported
            [sys.executable, "-P", "-c", _BEGIN + code, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment, "PYTHONPATH": path},
            start_new_session=True,
        )

    def kill(self) -> None:
        """End it, and all that it has started. O(1)."""
        if self.returncode is None:  # else its number may be another's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait_or_kill(self, patience_s: float) -> None:
        """Wait until it ends; kill it once it has computed, or done nothing, for `patience_s`.

        Its work is counted in processor time, and that of all that it has started with it: on a
        busy machine a helper is late and not lost. Where that is unknown, time alone counts.
        """
        first = latest = _worked_s(self.pid)
        since_s = time.monotonic()
        while self.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self.wait(min(_LOOK_S, patience_s))
                return
            now = _worked_s(self.pid)
            if now > latest:
                latest, since_s = now, time.monotonic()
            if max(now - first, time.monotonic() - since_s) > patience_s:
                self.kill()

    def close(self) -> None:
        """Wait until it has ended, and close its pipes."""
        with suppress(OSError), self:
            pass


def _worked_s(group: int) -> float:
    """Return the processor time of a group of processes; 0 where it is unknown. O(processes)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # a process may end meanwhile
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += sum(map(int, fields[11:15]))  # also of children that have ended
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


@cache
def expecting() -> list[HelperProcess]:
    """Helpers of this process that wait for work to come, unless its start fails. O(1)."""
    return []


def take_expected() -> HelperProcess | None:
    """One of them that still runs. O(those that have ended)."""
    with suppress(IndexError):
        while True:
            helper = expecting().pop()
            if helper.poll() is None:
                return helper
            helper.close()
    return None


def end_with_caller() -> None:
    """Have this process, a helper, end when its caller has ended. O(1)."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()


def _end_with(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(_LOOK_S)
    os.killpg(0, signal.SIGKILL)


def num_cores() -> int:
    """Cores of this process's share of the machine; 0: less than one, or unknown. O(cores)."""
    if not hasattr(os, "sched_getaffinity"):
        return 0
    said = os.environ.get("LOCAL_WORLD_SIZE", "")  # by torchrun
    neighbours = max(1, int(said)) if said.isdecimal() else 1
    return len(os.sched_getaffinity(0)) // neighbours


def pickled(value: object, reduce: Callable[[object], Any]) -> bytes:
    """A value as bytes. O(value).

    Args:
        value: may hold what only this process has.
        reduce: of that, what a helper makes it of: see `pickle.Pickler.reducer_override`.

    Raises:
        Exception: it holds more of it.
    """

    class Pickler(pickle.Pickler):
        reducer_override = staticmethod(reduce)

    written = io.BytesIO()
    Pickler(written).dump(value)
    return written.getvalue()
