"""Compiling a warm-up's kernels side by side, in other processes.

Triton's compiler holds Python's lock for half of its time, so threads wait for each other and for
whatever else a process does before its first request. So a helper process is started, which loads
Triton once and forks; each of its children makes its share of the caller's calls, on tensors
without memory, as if on the caller's GPU, which none of them touches: a launch compiles the kernel
and ends there. What is compiled lies on disk, where Triton finds it when the caller makes the call.

Decides which process compiles what, when the helper starts (at once, or before that where a warm-up
is expected; if kernels are on disk, when a call takes long), and how it and its caller communicate.
Invariants: a helper that fails, hangs or is missing costs time and nothing else; no process
outlives its caller.

Does not know: which calls there are, what Triton keeps where.
"""

import os
import pickle
import select
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from backends.helper_process import HelperProcess, expecting, num_cores, pickled, take_expected
from backends.triton_gpu.shared.place import Gpu, Kernel, Place

_COMMAND = "from backends.triton_gpu.ahead import main; main()"
_BEGUN = b"begun\n"
_END_S = 5.0
MOST_CHILDREN = 16
"""Each takes some 150 MB, and its assembler as much."""
PATIENCE_S = 60.0
"""The time without a finished call after which the caller goes on without the processes."""
JOB_S = 180.0
"""The time that a helper waits for a warm-up, if none comes and its caller does not end it."""
SOON_S = 0.15
"""A call that takes longer compiles a kernel: reading one from disk takes a few hundredths."""


Calls = Callable[[Place], Sequence[Callable[[], object]]]
"""A function that returns calls to make at a place; another process finds it by its name."""


def expect() -> None:
    """Start the helper of a `make` to come, if no kernel is on disk: it loads Triton. O(1)."""
    with suppress(Exception):  # no Python, no processes: the caller compiles
        if not expecting() and not _has_kernels():
            expecting().append(_start())


def _has_kernels() -> bool:
    with suppress(OSError):
        return any(True for _ in Path(triton.knobs.cache.dir).iterdir())
    return False


def make(calls: Calls, place: Place, gpu: Gpu) -> None:
    """Make calls for the first time; returns when all have returned.

    The last come first, until other processes compile: those are to be the quickest to compile, and
    where all is on disk already they have been made by then. The others follow as their kernels
    come.
    """
    with _Compilers(gpu, calls) as compilers:
        left = dict(enumerate(calls(place)))
        while left and not compilers.have_begun.is_set():
            left.popitem()[1]()
            compilers.num_made += 1
        while left and (number := compilers.next_finished()) is not None:
            if number in left:
                left.pop(number)()
    for call in left.values():  # no process has compiled for it
        call()


class _Compilers:
    """The processes, from `with` on, if there is something to compile; ended at its end.

    Attributes:
        have_begun: set when they compile.
        num_made: the calls that the caller has made without them.
    """

    def __init__(self, gpu: Gpu, calls: Calls) -> None:
        self._job = gpu, calls
        self._helper: HelperProcess | None = None
        self._listener: threading.Thread | None = None
        self._finished: SimpleQueue[int | None] = SimpleQueue()
        self._starting, self._is_over = threading.Lock(), threading.Event()
        self.have_begun = threading.Event()
        self.num_made = 0

    def __enter__(self) -> Self:
        listener = threading.Thread(target=self._run, daemon=True)
        with suppress(RuntimeError):  # no threads: the caller compiles
            listener.start()
            self._listener = listener
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _run(self) -> None:
        """Start a helper once one is needed, and listen to it."""
        try:
            if not self._is_needed():
                return
            job = pickled(self._job, _by_looks)
            with self._starting:
                if self._is_over.is_set():
                    return
                self._helper = helper = take_expected() or _start()
        except Exception:  # noqa: BLE001  # no Python, no processes: the caller compiles
            return
        self._listen(helper, job)

    def _is_needed(self) -> bool:
        """Return True once a call takes long; at once if no kernel was on disk.

        False if the calls end first.
        """
        made = -1 if _has_kernels() and not expecting() else self.num_made
        while made != self.num_made:
            made = self.num_made
            if self._is_over.wait(SOON_S):
                return False
        return True

    def next_finished(self) -> int | None:
        """Return the number of a call whose kernels are on disk, or None.

        None: none has come for `PATIENCE_S`, or none will.
        """
        with suppress(Empty):
            return self._finished.get(timeout=PATIENCE_S)
        return None

    def _listen(self, helper: HelperProcess, job: bytes) -> None:
        with suppress(OSError, ValueError):  # the helper has ended, or is ended now
            if helper.stdin:
                helper.stdin.write(job)
                helper.stdin.flush()
            for line in helper.stdout or ():
                if line == _BEGUN:
                    self.have_begun.set()
                elif line.strip().isdigit():
                    self._finished.put(int(line))
        self._finished.put(None)
        self.have_begun.set()

    def _end(self) -> None:
        self._is_over.set()
        with self._starting:
            helper, self._helper = self._helper or take_expected(), None
        if helper is None:
            return
        helper.kill()
        helper.wait()
        if self._listener:
            self._listener.join(_END_S)
            if self._listener.is_alive():  # a fork of another thread's has the pipe
                return
        helper.close()


def _start() -> HelperProcess:
    if not hasattr(os, "fork"):
        raise OSError("this system does not fork")
    return HelperProcess(_COMMAND, {"CUDA_VISIBLE_DEVICES": ""}, answers=True)


def main() -> None:
    """Run the helper: a job comes from stdin; each call that is compiled becomes a line."""
    import_module("backends.triton_gpu.backend")  # what a job needs
    if not select.select([sys.stdin.buffer], [], [], JOB_S)[0]:
        return
    job: tuple[Gpu, Calls] = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the caller
    gpu, make_calls = job
    triton.runtime.driver.set_active(_Driver(gpu))
    calls = make_calls(_Elsewhere(gpu))
    share = num_children(len(calls))
    _say(_BEGUN)
    children = [_fork(range(first, len(calls), share), calls) for first in range(share)]
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)  # its caller waits: nothing that is loaded needs to be taken apart


def num_children(num_calls: int) -> int:
    """Processes that share `num_calls` calls: one a core of this process's share of the machine."""
    return max(1, min(num_calls, num_cores(), MOST_CHILDREN))


def _fork(numbers: Sequence[int], calls: Sequence[Callable[[], object]]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        for number in numbers:
            with suppress(Exception):  # the caller meets the error itself
                calls[number]()
                _say(b"%d\n" % number)
    finally:
        os._exit(0)


def _say(line: bytes) -> None:
    os.write(1, b"\n" + line)  # in one go: all write there; and apart from what a start may say


class _Elsewhere(Place):
    """A place that compiles kernels for a GPU of another process and does not launch them."""

    __slots__ = ("_gpu",)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(interpreting=False)
        self.device = torch.device("meta")
        self.launches = False
        self._alone = True
        self._gpu = gpu

    def gpu(self, _device: torch.device) -> Gpu:
        """Return the properties of the other process's GPU."""
        return self._gpu

    def starter(self, kernel: Kernel, grid: tuple[int, int, int]) -> Callable[..., object]:
        """Return the call that compiles a kernel for its arguments."""
        return partial(_compile, kernel, grid)


def _compile(
    kernel: Kernel,
    grid: tuple[int, int, int],
    *given: object,
    **options: Any,  # noqa: ANN401  # of any kernel
) -> object:
    compiled: Any = kernel.warmup(*given, grid=grid, **options)
    with suppress(Exception):  # Triton 3.6 and older: what launches it is compiled too, from C
        launcher = import_module("triton.backends.nvidia.driver").CudaLauncher
        launcher(compiled.src, compiled.metadata)
    return compiled


class _Driver:
    """The part of a driver that Triton's compiler uses."""

    def __init__(self, gpu: Gpu) -> None:
        major, minor = gpu.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return 0, the only device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Return 0, the default stream."""
        return 0


def _by_looks(value: object) -> Any:  # noqa: ANN401  # as Python has it
    if isinstance(value, Tensor):
        return _seen, (tuple(value.shape), value.stride(), value.dtype)
    return NotImplemented


def _seen(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
