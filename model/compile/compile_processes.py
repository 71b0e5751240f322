"""Processes that compile beside the one that starts: each a piece of a network, or some kernels.

PyTorch's compiler and most of Triton's are Python, so one process compiles one thing after another.
If no piece is stored, processes are started while the weights load. Each loads the compilers,
does one job, whose result it stores on disk, where the caller finds it, and ends.

Decides: how many processes there are, and what is sent to one: the operations of a piece, or a
function, with the shapes, strides and dtypes of tensors.

Invariants: a process that fails, hangs or is missing costs time and nothing else; none outlives its
caller, or has memory of the GPU after `close`.

Does not know: what a job compiles, and how, which file it is kept in.
"""

import io
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

_COMMAND = "from model.compile.pieces import serve; serve()"
_MOST = 8  # a network of one kind of layer has 5 different pieces; draws, and steps of few tokens
_CORES = 2  # of each: for itself, and for processes of PyTorch's own
_GPU_BYTES = 3 << 30  # of each: a context, and the arrays on which kernels are timed
_MOST_THREADS = 32  # of all together, as PyTorch's own compiler has
_LOOK_S = 0.5  # how often a process looks whether its caller is there
_PATIENCE_S = 120.0  # how long a piece may take
_SIZE = struct.Struct(">Q")
_PIPE = 60_000  # bytes that a pipe takes before they are read

Job = Callable[[], object]
"""Compiles something and stores it; for another process to find by its name."""


def do_all(jobs: Sequence[Job]) -> None:
    """Do one job after another. O(jobs)."""
    for job in jobs:
        job()


class CompileProcesses:
    """Processes that wait for a job each; see `compile_processes`."""

    def __init__(self) -> None:
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._is_over = False

    @property
    def are_running(self) -> bool:
        """Whether there are some. O(1)."""
        return bool(self._all)

    def start(self) -> None:
        """Start them, once, if this machine has cores for them. O(1)."""
        with self._lock, suppress(OSError):
            count = 0 if self._is_over or self._all else _num_processes()
            for _ in range(count):
                self._all.append(_start(count))
                self._waiting.append(self._all[-1])

    def can_compile(self, device: torch.device) -> bool:
        """Whether one waits for a job, and the device has memory for all of them. O(1)."""
        if not self._waiting or device.type != "cuda":
            return bool(self._waiting)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return bool(free_bytes > len(self._all) * _GPU_BYTES)

    def submit(self, job: Job, device: torch.device) -> Callable[[], None] | None:
        """Let one do a job; returns what waits for that, or None: none can. O(job).

        Args:
            job: gets tensors without memory for those that it holds.
            device: the current one while it is done.
        """
        with suppress(Exception):  # a job may hold what only this process knows
            written = io.BytesIO()
            _Pickler(written).dump((job, device))
            content = written.getvalue()
            if len(content) <= _PIPE and self._waiting:
                process = self._waiting.pop(0)
                if process.stdin is not None:
                    process.stdin.write(_SIZE.pack(len(content)) + content)
                    process.stdin.flush()
                    return partial(_wait, process, time.monotonic() + _PATIENCE_S)
        return None

    def close(self) -> None:
        """End them, whatever they do; none will be started again. O(processes)."""
        with self._lock:
            self._is_over = True
            ended, self._all, self._waiting = self._all, [], []
        for process in ended:
            if process.returncode is None:  # else its number may be another's
                _kill(process)
        for process in ended:
            with suppress(OSError), process:  # waits, and closes the pipe
                pass


@cache
def compile_processes() -> CompileProcesses:
    """Those of this process: they start beside its weights, and end when its network is compiled.

    One start is in progress in a process, whichever engine it is for. O(1).
    """
    return CompileProcesses()


def serve_one(prepare: Callable[[], object]) -> None:
    """Be such a process: prepare for any job, do the one that comes, and end. Never returns."""
    threading.Thread(target=_end_with_caller, args=(os.getppid(),), daemon=True).start()
    with suppress(Exception):
        prepare()
    stdin = sys.stdin.buffer
    head = stdin.read(_SIZE.size)
    if len(head) == _SIZE.size:
        content = stdin.read(*_SIZE.unpack(head))
        with suppress(Exception):  # the caller meets the error itself
            job, device = pickle.loads(content)  # noqa: S301  # from the caller
            if device.type == "cuda":
                torch.cuda.set_device(device)
            job()
    _end_group()


def _end_with_caller(caller: int) -> None:
    """End when the caller has ended."""
    while os.getppid() == caller:
        time.sleep(_LOOK_S)
    _end_group()


def _end_group() -> None:
    """End this process and those that it has started."""
    os.killpg(0, signal.SIGKILL)


def _num_processes() -> int:
    """As many as this process's share of the machine has cores for; none if they only share."""
    cores = _num_cores()
    return min(_MOST, cores // _CORES) if cores > _CORES else 0


def _num_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return 0
    said = os.environ.get("LOCAL_WORLD_SIZE", "")  # by torchrun
    neighbours = max(1, int(said)) if said.isdecimal() else 1
    return len(os.sched_getaffinity(0)) // neighbours


def _start(count: int) -> "subprocess.Popen[bytes]":
    threads = str(max(2, min(_MOST_THREADS, _num_cores()) // count))
    given = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ, "PYTHONPATH": _path()}
    return subprocess.Popen(  # noqa: S603  # this very Python
        [sys.executable, "-P", "-c", _COMMAND],  # -P: what lies here is not imported
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=given,
        start_new_session=True,  # a group, to be ended as one
    )


def _wait(process: "subprocess.Popen[bytes]", until_s: float) -> None:
    try:
        process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):  # also what it has left
        os.killpg(process.pid, signal.SIGKILL)


def _path() -> str:
    """Where another process finds what this one has found."""
    return os.pathsep.join(str(Path(each).absolute()) for each in sys.path)


class _Pickler(pickle.Pickler):
    """Of tensors it keeps how they look, of graphs their operations, of operators the name."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401  # as Python has it
        """See `pickle.Pickler`."""
        if isinstance(value, Tensor):
            if value.storage_offset():
                raise ValueError("wanted tensors that begin where their memory does")
            return _seen, (tuple(value.shape), value.stride(), value.dtype, value.device)
        if isinstance(value, fx.GraphModule):
            return _module, (_operations(value.graph),)
        if isinstance(value, torch._ops.OpOverload):  # noqa: SLF001
            return _operator, (str(value),)
        return NotImplemented


class _Number(int):
    """Stands for the node with that number."""


def _operations(graph: fx.Graph) -> list[tuple[str, Any, str, Any, Any]]:
    numbers = {node: _Number(number) for number, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            node.name,
            *fx.map_arg((node.args, node.kwargs), numbers.__getitem__),
        )
        for node in graph.nodes
    ]


def _module(operations: Sequence[tuple[str, Any, str, Any, Any]]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def node_of(value: Any) -> Any:  # noqa: ANN401  # arguments of any operator
        return nodes[value] if isinstance(value, _Number) else value

    for op, target, name, *given in operations:
        args, kwargs = fx.node.map_aggregate(tuple(given), node_of)
        nodes.append(graph.create_node(op, target, args, kwargs, name))
    return fx.GraphModule(nn.Module(), graph)


def _operator(name: str) -> object:
    space, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def _seen(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor that looks so, without memory."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
