"""One piece of a network: compiled by PyTorch's inductor, and kept on disk with its kernels.

A second start reads a piece and runs it: nothing is traced, and no other cache is asked. Sizes that
change are symbols, those of equal length one symbol.

Decides: what compiled code depends on, and for which sizes it holds: the compiler notes what it
assumes of a size (that 32 bits number all elements), and larger ones are not for it.

Invariants: what cannot be compiled alone is compiled by `torch.compile` at each start.

Does not know: how a network was cut, which sizes it will be run with.
"""

import hashlib
import logging
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from model.compile import artifacts
from model.compile.compile_processes import PIECES, CompileProcesses
from model.compile.stored_files import cache_dir, read_file, write_file

_log = logging.getLogger(__name__)
_OPTIONS = {"combo_kernels": True}
"""Kernels that could run in parallel become one: a launch costs as much as their work here."""

_HEAD = struct.Struct(">QQ")  # the limits
MOST = 1 << 20  # no step has as many tokens
_LEAST_LIMIT = 1024  # a piece for fewer is not worth its file


class Piece(nn.Module):
    """Compiled operations that know which dimensions of their inputs will change.

    Args:
        module: the operations; it holds no tensors.
        sized: of each input the dimensions that change: all with 0 have one length, all with 1
            another, each with -1 one of its own.
        backend: of `torch.compile`; only what "inductor" compiles is kept on disk.

    Attributes:
        limits: by these numbers, the longest dimensions that it may be called with.
        processes: the first call lets one of them compile, and calls run the operations as they
            are; None: the next call waits for that, or compiles here.
    """

    def __init__(
        self, module: fx.GraphModule, sized: Sequence[Mapping[int, int]], backend: str
    ) -> None:
        super().__init__()
        self.limits = (MOST, MOST)
        self._module = module
        self._sized = sized
        self._backend = backend
        self._marks = False
        self._run: Callable[..., Sequence[Tensor]] | None = None
        self._is_submitted = False
        self._wait: Callable[[], None] | None = None
        self.processes: CompileProcesses | None = None

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the piece; the first call compiles it. O(1) beside it."""
        if self._run is None and self.processes is not None:
            self._submit(inputs, self.processes)
            return tuple(self._module(*inputs))
        if self._run is None:
            self._run = self._compiled(inputs)
        if self._marks:
            for tensor, dims in zip(inputs, self._sized, strict=True):
                for dim in dims:
                    torch._dynamo.mark_dynamic(tensor, dim)  # noqa: SLF001  # documented
        return tuple(self._run(*inputs))

    def settle(self) -> None:
        """Stop marking dimensions: all compilation is done."""
        self._marks = False

    def _submit(self, inputs: Sequence[Tensor], processes: CompileProcesses) -> None:
        if self._is_submitted or self._backend != "inductor":
            return
        self._is_submitted = True  # or refused: once
        with suppress(OSError):  # a folder that may not be read
            path = _path(self._module, inputs, self._sized)
            if not path.exists():
                job = partial(_store, path, self._module, inputs, self._sized)
                self._wait = processes.submit(job, inputs[0].device)

    def _compiled(self, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        is_kept = self._backend == "inductor"
        if self._wait is not None:
            self._wait()
        if is_kept:
            try:
                run, self.limits = _kept(self._module, inputs, self._sized)
            except Exception as error:  # noqa: BLE001  # a compiler may raise any error
                _log.debug("compiled again at each start: %s", error)
            else:
                return run
        self._marks = True
        options: dict[str, Any] | None = _OPTIONS if is_kept else None
        return torch.compile(self._module, backend=self._backend, options=options, fullgraph=True)


def start_processes() -> None:
    """Start the processes that PyTorch compiles in, each of which loads PyTorch; once. O(1)."""
    import_module("torch._inductor.async_compile").maybe_warm_pool()


def _kept(
    module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> tuple[Callable[..., Sequence[Tensor]], tuple[int, int]]:
    """The compiled piece, from the disk or for it, and its limits. Raises where that cannot be."""
    path = _path(module, inputs, sized)
    try:
        content = read_file(path)
        first, second = _HEAD.unpack(content[: _HEAD.size])
        return artifacts.loaded(content[_HEAD.size :]), (first, second)
    except Exception as error:  # noqa: BLE001  # a file may hold anything
        _log.debug("compiling: %s", error)
    if inputs[0].device.type == "cuda":
        start_processes()
    content, limits = _saved(module, inputs, sized)
    run = artifacts.loaded(content)  # so that both starts run the same
    with suppress(OSError):  # a full disk, or one that may not be written
        write_file(path, _HEAD.pack(*limits) + content)
    return run, limits


def _store(
    path: Path, module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> None:
    """Compile a piece and write its file."""
    if path != _path(module, inputs, sized):
        raise ValueError("wanted the settings of the caller, which are part of the name")
    content, limits = _saved(module, inputs, sized)
    write_file(path, _HEAD.pack(*limits) + content)


def _saved(
    module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> tuple[bytes, tuple[int, int]]:
    """What is kept of a piece, and its limits."""
    artifact, limits = _compile(module, inputs, sized)
    return artifacts.saved(artifact), limits


def prepare() -> None:
    """Load the compiler, with all that it loads for its first piece."""
    start_processes()
    import_module("torch._inductor.compile_fx")
    device = "cuda" if torch.cuda.is_available() and "LOCAL_RANK" not in os.environ else "cpu"
    graph = fx.Graph()
    x = graph.placeholder("x")
    mean = graph.call_function(torch.mean, (x, -1), {"keepdim": True})
    graph.output((graph.call_function(torch.mul, (x, mean)),))
    small = torch.zeros(7, 64, device=device)
    _compile(fx.GraphModule(nn.Module(), graph), [small], [{0: 0}])


def _path(
    module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> Path:
    return cache_dir() / PIECES / _digest(module, inputs, sized)


def _digest(
    module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> str:
    """A name for all that compiled code depends on. O(inputs)."""
    device = inputs[0].device
    capability: object = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        capability = (gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count)
    looks = []
    for tensor, dims in zip(inputs, sized, strict=True):
        shape, stride = [*tensor.shape], [*tensor.stride()]
        looks.append((shape, stride, tensor.dtype, str(tensor.device), dims))
    # Only portable settings: the others, such as the number of threads, do not change the code.
    config = import_module("torch._inductor").config
    settings = sorted(config.save_config_portable(ignore_private_configs=False).items())
    facts = (module.code, looks, str(capability), settings, _compilers(), _OPTIONS)
    own = [Path(each).read_bytes() for each in (__file__, artifacts.__file__)]
    return hashlib.sha256(repr((facts, own)).encode()).hexdigest()


def _compilers() -> list[tuple[object, ...]]:
    """Which PyTorch and which Triton this is: versions, and when they were installed. O(1).

    PyTorch's own name for itself is the digest of all its sources, thousands of files.
    """
    found: list[tuple[object, ...]] = [(torch.__version__, torch.version.git_version)]
    for name in ("torch", "triton"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            about = Path(spec.origin).stat()
            found.append((name, spec.origin, about.st_size, about.st_mtime_ns))
    return found


def _compile(
    module: fx.GraphModule, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> tuple[Any, tuple[int, int]]:
    """What inductor makes of a piece, and its limits."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    fakes = []
    for place, (tensor, dims) in enumerate(zip(inputs, sized, strict=True)):
        kinds = [DimDynamic.STATIC] * tensor.dim()
        for dim, size in dims.items():
            kinds[dim] = DimDynamic.DYNAMIC if size < 0 else DimDynamic.DUCK
        seen = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[var-annotated]
        source = ConstantSource(f"x{place}")
        fake = mode.from_tensor(tensor.detach(), symbolic_context=seen, source=source)
        fakes.append(fake)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    owned = fx.GraphModule(nn.Module(), graph)
    values = _Noted(owned)
    with mode, enable_python_dispatcher(), torch.no_grad():
        values.run(*fakes)
    compile_alone = import_module("torch._inductor").standalone_compile
    artifact = compile_alone(
        owned, fakes, dynamic_shapes="from_graph", options={"config_patches": _OPTIONS}
    )
    return artifact, _limits(shapes, fakes, sized)


class _Noted(fx.Interpreter):
    """Notes the value of each node where the compiler looks for it."""

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401  # as PyTorch has it
        """See `fx.Interpreter`."""
        value = n.meta["example_value"] = super().run_node(n)
        return value


def _limits(
    shapes: ShapeEnv, inputs: Sequence[Tensor], sized: Sequence[Mapping[int, int]]
) -> tuple[int, int]:
    """The longest dimensions for which the compiler's assumptions hold; those with -1 limit both.

    Raises:
        ValueError: they do not hold for all shorter ones.
    """
    hints = dict(getattr(shapes, "backed_var_to_val", None) or shapes.var_to_val)
    limits = [MOST, MOST]
    for tensor, dims in zip(inputs, sized, strict=True):
        for dim, size in dims.items():
            node: Any = getattr(tensor.shape[dim], "node", None)
            least = 0
            if node is not None and node.expr.is_symbol:  # otherwise it became a number
                least = _limit(shapes, node.expr, hints)
            if least < _LEAST_LIMIT or least < node.hint:
                found = [guard.expr for guard in shapes.guards]
                raise ValueError(f"wanted code for any size, got {found}")
            for each in (0, 1) if size < 0 else (size,):
                limits[each] = min(limits[each], least)
    return limits[0], limits[1]


def _limit(shapes: ShapeEnv, symbol: Any, hints: dict[Any, Any]) -> int:  # noqa: ANN401  # of sympy
    """The highest power of two up to which all assumptions hold that are about a size."""
    limit = MOST
    for guard in shapes.guards:
        size = 2 if symbol in guard.expr.free_symbols else limit + 1
        while size <= limit:
            near = {size - 1, size, size + 1} - {1, limit + 1}
            if not all(guard.expr.xreplace({**hints, symbol: each}) for each in near):
                limit = size // 2
            size *= 2
    return limit
