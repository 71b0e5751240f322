"""Processes that compile beside the one that starts: each a piece of a network, or some kernels.

PyTorch's compiler and most of Triton's are Python, so one process compiles one thing after another.
If no piece is stored, processes are started while packages are imported. Each loads the compilers,
does one job, whose result it stores on disk, where the caller finds it, and ends.

Decides: how many processes there are, and how long one may compute.

Invariants: a process that fails, hangs or is missing costs time and nothing else; none outlives its
caller, or has memory of the GPU after `close`.

Importing this imports no torch.

Does not know: what a job compiles, or where the result is stored.
"""

import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

from backends import HelperProcess, num_cores, take_expected
from model.compile.stored_files import can_store, has_stored

if TYPE_CHECKING:
    import torch

    from model.compile.jobs import Job

_COMMAND = "from model.compile.compile_processes import serve; serve()"
_MOST = 8  # a network of one kind of layer has 5 different pieces; draws, and steps of few tokens
_CORES = 2  # of each: for itself, and for other work of the start
_GPU_BYTES = 3 << 30  # of each: a context, and the arrays on which kernels are timed
_PATIENCE_S = 120.0  # of processor time for a job, or of waiting while it computes nothing
_SIZE = struct.Struct(">Q")
PIECES = "pieces"
"""The folder of what most of them store."""
_PIPE = 60_000  # bytes that a pipe takes before they are read


class CompileProcesses:
    """Processes that wait for a job each; see `compile_processes`."""

    def __init__(self) -> None:
        self._waiting: list[HelperProcess] = []
        self._all: list[HelperProcess] = []
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def are_running(self) -> bool:
        """Whether there are some. O(1)."""
        return bool(self._all)

    def start(self) -> None:
        """Start them, once, if this machine has cores for them and pieces are to be compiled. O(1).

        Not where an earlier start has stored some, of this network or another, or none can be.
        """
        with self._lock, suppress(OSError):
            is_time = not (self._is_over or self._all or has_stored(PIECES))
            for _ in range(_num_processes() if is_time and can_store(PIECES) else 0):
                self._all.append(_start())
                self._waiting.append(self._all[-1])

    def can_compile(self, device: "torch.device") -> bool:
        """Whether one waits for a job, and the device has memory for all of them. O(1)."""
        if not self._waiting or device.type != "cuda":
            return bool(self._waiting)
        free_bytes, _ = import_module("torch").cuda.mem_get_info(device)
        return bool(free_bytes > len(self._all) * _GPU_BYTES)

    def submit(self, job: "Job", device: "torch.device") -> Callable[[], None] | None:
        """Let one do a job; returns what waits for that, or None: none can. O(job)."""
        with suppress(Exception):  # a job may hold what only this process knows
            content = import_module("model.compile.jobs").write(job, device)
            if len(content) <= _PIPE and self._waiting:
                process = self._waiting.pop(0)
                if process.stdin is not None:
                    process.stdin.write(_SIZE.pack(len(content)) + content)
                    process.stdin.flush()
                    return partial(process.wait_or_kill, _PATIENCE_S)
        return None

    def close(self) -> None:
        """End them, whatever they do; none will be started again. O(processes).

        And helpers that a backend expected to need: all kernels are there, or the start has failed.
        """
        with self._lock:
            self._is_over = True
            ended, self._all, self._waiting = self._all, [], []
        while expected := take_expected():
            ended.append(expected)
        for process in ended:
            process.kill()
        for process in ended:
            process.close()


@cache
def compile_processes() -> CompileProcesses:
    """Those of this process: they start beside its imports and end when its network is compiled.

    One start is in progress in a process, whichever engine it is for. O(1).
    """
    return CompileProcesses()


def serve() -> None:
    """Be such a process, for pieces and kernels. Never returns."""
    serve_one(lambda: import_module("model.compile.pieces").prepare())


def serve_one(prepare: Callable[[], object]) -> None:
    """Be such a process: prepare for any job, do the one that comes, and end. Never returns."""
    with suppress(Exception):
        prepare()
    stdin = sys.stdin.buffer
    head = stdin.read(_SIZE.size)
    if len(head) == _SIZE.size:
        content = stdin.read(*_SIZE.unpack(head))
        with suppress(Exception):  # the caller meets the error itself
            import_module("model.compile.jobs").run(content)
    os.killpg(0, signal.SIGKILL)  # also what the job has left


def _num_processes() -> int:
    """As many as this process's share of the machine has cores for; none if they only share."""
    cores = num_cores()
    return min(_MOST, cores // _CORES) if cores > _CORES else 0


def _start() -> HelperProcess:
    # They compile beside each other: none starts processes of PyTorch's own.
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1")
    process = HelperProcess(_COMMAND, {"TORCHINDUCTOR_COMPILE_THREADS": threads})
    if process.stdin is not None:  # a small pipe refuses a job
        os.set_blocking(process.stdin.fileno(), False)
    return process
