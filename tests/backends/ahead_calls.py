"""Calls for `backends.triton_gpu.ahead` that leave marks; a module that other processes find."""

import os
import time
from functools import partial

_PATIENCE_S = 30


def marking(folder, count, where, *, behaviour="compiles"):
    """Calls that say in `folder/order` that they were compiled (elsewhere) or made (here).

    The one that is made first, the last one, waits until the helper has begun, unless it is to be
    quick.
    """

    def call(number):
        if where.launches:
            if behaviour != "quick" and number == count - 1:
                _wait_for(folder / "begun")
            if behaviour == "hangs":
                raise ValueError("the caller's own")
            _append(folder / "order", f"made {number}")
            return
        (folder / "begun").touch()
        _append(folder / "pids", str(os.getpid()))
        if behaviour == "fails" and number == 1:
            raise ValueError("this kernel cannot be compiled")
        if behaviour == "dies" and number == 1:
            os.abort()
        if behaviour == "hangs":
            time.sleep(1000)
        _append(folder / "order", f"compiled {number}")

    return [partial(call, number) for number in range(count)]


def _append(path, line):
    with path.open("a") as file:
        file.write(f"{line}\n")


def _wait_for(path):
    until = time.monotonic() + _PATIENCE_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.5)  # what the helper says comes a moment later
