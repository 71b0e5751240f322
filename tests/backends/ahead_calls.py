"""Calls for `backends.triton_gpu.ahead` that leave marks; a module that other processes find."""

import importlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from backends.triton_gpu import ahead
from backends.triton_gpu.shared import place
from tests.backends.gpus import H100
from tests.hang import HANG_S


def marking(folder, count, where, *, behaviour="compiles"):
    """Calls that say in `folder/order` that they were compiled (elsewhere) or made (here).

    The one that is made first, the last one, waits until the helper has begun, unless it is to be
    quick.
    """

    def call(number):
        if where.launches:
            if behaviour != "quick" and number == count - 1:
                _wait_for(folder / "begun")
            if behaviour in ("raises", "orphans"):
                raise ValueError("the caller's own")
            _append(folder / "order", f"made {number}")
            return
        (folder / "begun").touch()
        _append(folder / "pids", str(os.getpid()))
        if behaviour == "fails" and number == 1:
            raise ValueError("this kernel cannot be compiled")
        if behaviour == "dies" and number == 1:
            os.abort()
        if behaviour == "orphans" and number == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        if behaviour in ("hangs", "raises", "orphans"):
            time.sleep(1000)
        if behaviour == "slow":
            time.sleep(0.6)
        _append(folder / "order", f"compiled {number}")

    return [partial(call, number) for number in range(count)]


def _append(path, line):
    with path.open("a") as file:
        file.write(f"{line}\n")


def _wait_for(path):
    until = time.monotonic() + HANG_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)  # what the helper says comes a moment later


def make(folder, behaviour, count=6):
    """Make such calls, as if on an H100."""
    calls = partial(marking, folder, count, behaviour=behaviour)
    ahead.make(calls, place.Place(interpreting=False), H100)


if __name__ == "__main__":
    importlib.import_module("tests.backends.ahead_calls").make(Path(sys.argv[1]), sys.argv[2])
