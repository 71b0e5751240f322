"""Compiling a warm-up's kernels side by side, in processes of their own.

Triton's compiler holds Python's lock for half of its time, so threads wait for each other and for
whatever else a process does before its first request. So a helper process is started, which loads
Triton once and forks; each of its children makes its share of the caller's calls, on tensors
without memory, as if on the caller's GPU, which none of them touches: a launch compiles the kernel
and ends there. What is compiled lies on disk, where Triton finds it when the caller makes the call.

Decides: who compiles what, and how the helper is told and listened to. Invariants: a helper that
fails or is missing costs time and nothing else; no process outlives its work.

Does not know: which calls there are, what Triton keeps where.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from backends.triton_gpu.place import Gpu, Kernel, Place

_COMMAND = "from backends.triton_gpu.ahead import main; main()"
_BEGUN = b"begun\n"


Calls = Callable[[Place], Sequence[Callable[[], object]]]
"""What makes calls that launch kernels at a place; for another process to find by its name."""


def make(calls: Calls, place: Place, gpu: Gpu) -> None:
    """Make calls for the first time; returns when all have returned.

    The last come first, until other processes compile: those are to be the quickest to compile, and
    where all is on disk already they have been made by then. The others follow as their kernels
    come.

    Args:
        calls: what takes longest to compile first.
        place: where to make them.
        gpu: what the place runs on.
    """
    left = dict(enumerate(calls(place)))
    with _Compilers(gpu, calls) as compilers:
        while left and not compilers.have_begun.is_set():
            left.popitem()[1]()
        for number in iter(compilers.finished.get, None) if left else ():
            if number in left:
                left.pop(number)()
    for call in left.values():  # no process has compiled for it
        call()


class _Compilers:
    """The processes, from `with` on; ended at its end.

    Attributes:
        have_begun: that they compile.
        finished: the numbers of calls whose kernels are on disk, as they come; None: no more will.
    """

    def __init__(self, gpu: Gpu, calls: Calls) -> None:
        self._job = gpu, calls
        self._helper: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread
        self.have_begun = threading.Event()
        self.finished: SimpleQueue[int | None] = SimpleQueue()

    def __enter__(self) -> Self:
        with suppress(OSError):  # no such program, no more processes: whoever calls compiles
            self._helper = helper = _start(self._job)
            self._listener = threading.Thread(target=self._listen, args=(helper,), daemon=True)
            self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._helper is not None:
            with suppress(ProcessLookupError):
                if self._helper.poll() is None:
                    os.killpg(self._helper.pid, signal.SIGKILL)
            self._listener.join()

    def _listen(self, helper: "subprocess.Popen[bytes]") -> None:
        with helper:
            for line in helper.stdout or ():
                if line == _BEGUN:
                    self.have_begun.set()
                elif line.strip().isdigit():
                    self.finished.put(int(line))
        self.finished.put(None)
        self.have_begun.set()


def _start(job: tuple[Gpu, Calls]) -> "subprocess.Popen[bytes]":
    if not hasattr(os, "fork"):
        raise OSError("this system does not fork")
    with tempfile.TemporaryFile() as told:
        _Pickler(told).dump(job)
        told.seek(0)
        return subprocess.Popen(  # noqa: S603  # this very Python
            [sys.executable, "-c", _COMMAND],
            stdin=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _path()},
            start_new_session=True,  # a group, to be ended as one
        )


def main() -> None:
    """Run the helper: a job comes from stdin; each call that is compiled becomes a line."""
    job: tuple[Gpu, Calls] = pickle.load(sys.stdin.buffer)  # noqa: S301  # whoever started it
    gpu, make_calls = job
    triton.runtime.driver.set_active(_Driver(gpu))
    calls = make_calls(_Elsewhere(gpu))
    share = min(len(calls), len(os.sched_getaffinity(0)))
    _say(_BEGUN)
    children = [_fork(range(first, len(calls), share), calls) for first in range(share)]
    for child in children:
        os.waitpid(child, 0)


def _fork(numbers: Sequence[int], calls: Sequence[Callable[[], object]]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        for number in numbers:
            calls[number]()
            _say(b"%d\n" % number)
    finally:
        os._exit(0)


def _say(line: bytes) -> None:
    os.write(1, line)  # in one go: all children write there


class _Elsewhere(Place):
    """Where kernels are compiled for a GPU of another process, and not launched."""

    __slots__ = ("_gpu",)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(interpreting=False)
        self.device = torch.device("meta")
        self.launches = False
        self._alone = True
        self._gpu = gpu

    def gpu(self, _device: torch.device) -> Gpu:
        """The other process's."""
        return self._gpu

    def starter(self, kernel: Kernel, grid: tuple[int, int, int]) -> Callable[..., object]:
        """What compiles a kernel for its arguments."""
        return partial(kernel.warmup, grid=grid)


class _Driver:
    """What Triton's compiler asks of a driver."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The default one."""
        return 0


class _Pickler(pickle.Pickler):
    """Of tensors it keeps how they look."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401  # as Python has it
        """See `pickle.Pickler`."""
        if isinstance(value, Tensor):
            return _seen, (tuple(value.shape), value.stride(), value.dtype)
        return NotImplemented


def _seen(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _path() -> str:
    """Where the helper finds what this process has found."""
    return os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
