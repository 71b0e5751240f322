"""What PyTorch's inductor has compiled, as bytes: a second start runs it without the compiler.

The loader of inductor imports the whole compiler, 600 modules, for a name of matrix products. So
beside what inductor saves lies what its loader would run: the source of the calls, and the kernels
that they launch. Where they are there, they are run directly.

Decides: which code can run so: its results are new tensors, it changes no input and holds no
tensor, and it calls nothing but PyTorch's own products and kernels that are stored with it.

Invariants: what runs is inductor's own source with inductor's own kernels. It belongs to one build
of PyTorch, which is part of the name of its file.

Does not know: what a piece computes, where its file is.
"""

import logging
import pickle
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

Run = Callable[..., Sequence[Tensor]]

_SIZE = struct.Struct(">Q")
_PRODUCTS = ("mm", "addmm", "bmm")
_REPLACED = (
    "from torch._inductor.select_algorithm import extern_kernels\n",
    "from torch._inductor.codegen.memory_planning import _align as align\n",
    "from torch._inductor.async_compile import AsyncCompile\n",
)


def saved(artifact: Any) -> bytes:  # noqa: ANN401  # of inductor
    """A compiled artifact as bytes for `loaded`. O(bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        artifact.save(path=str(path))
        content = path.read_bytes()
    direct = b""
    with suppress(Exception):  # it does not look as expected
        direct = _direct(content)
    return _SIZE.pack(len(direct)) + direct + content


def loaded(content: bytes) -> Run:
    """The artifact that was saved. Starts no process, and computes no digest of PyTorch. O(bytes).

    Its PyTorch is not compared with this one again, because the name of its file contains that.
    """
    (size,) = _SIZE.unpack(content[: _SIZE.size])
    direct, artifact = content[_SIZE.size :][:size], content[_SIZE.size + size :]
    inductor = import_module("torch._inductor")
    with inductor.config.patch(compile_threads=1), _known_digest(artifact):
        if direct:
            try:
                return _run_of(direct)
            except Exception as error:  # noqa: BLE001  # other settings, say
                _log.debug("loading with the compiler: %s", error)
        with tempfile.NamedTemporaryFile() as file:
            file.write(artifact)
            file.flush()
            run: Run = inductor.CompiledArtifact.load(path=file.name)
            return run


def prepare() -> None:
    """Import what `loaded` needs. A tenth of a second, once."""
    for name in ("async_compile", "runtime.autotune_cache", "triton_bundler", "utils"):
        import_module(f"torch._inductor.{name}")


@contextmanager
def _known_digest(artifact: bytes) -> Iterator[None]:
    """Let inductor take the digest of PyTorch's sources, which it asks for, from the artifact."""
    codecache: Any = import_module("torch._inductor.codecache")
    _, digest = (reader := _reader(artifact)).read_bytes(), reader.read_bytes()
    compute = codecache.torch_key
    codecache.torch_key = lambda: digest
    try:
        yield
    finally:
        codecache.torch_key = compute


def _reader(artifact: bytes) -> Any:  # noqa: ANN401  # of PyTorch
    return import_module("torch.utils._appending_byte_serializer").BytesReader(artifact)


def _direct(artifact: bytes) -> bytes:
    """What `_run_of` needs; empty if it cannot run this.

    Raises:
        Exception: the artifact does not look as expected.
    """
    reader = _reader(artifact)
    _ = reader.read_bytes(), reader.read_bytes(), reader.read_str()
    manager = import_module("torch.compiler._cache").CacheArtifactManager
    found = manager.deserialize(reader.read_bytes())
    [stored], [entry] = found["inductor"], found["aot_autograd"]
    graph = pickle.loads(stored.content)  # noqa: S301  # inductor has just written it
    about = pickle.loads(entry.content).runtime_metadata  # noqa: S301
    bundle = graph._triton_bundle  # noqa: SLF001
    bundle = None if bundle is None else _once(bundle)
    kernels = [] if bundle is None else [each.kernel_name for each in bundle.static_autotuners]
    if not _is_plain(graph, about, kernels):
        return b""
    tuned = [(each.key, each.content) for each in found.get("autotune", ())]
    return pickle.dumps((graph.source_code, bundle, [*graph.inputs_to_check], tuned))


def _is_plain(graph: Any, about: Any, kernels: Sequence[str]) -> bool:  # noqa: ANN401  # of PyTorch
    """Whether code can run without inductor's loader: see the module."""
    source = graph.source_code
    products = import_module("torch._inductor.select_algorithm").extern_kernels
    called = {*re.findall(r"\bextern_kernels\.(\w+)", source)}
    return (
        all(line in source for line in _REPLACED)
        and not re.search(r"\balign\(", source)
        and called.issubset(_PRODUCTS)
        and all(getattr(products, name) is getattr(torch, name) for name in called)
        and sorted(kernels) == sorted({*re.findall(r"\basync_compile\.triton\('(\w+)'", source)})
        and not (graph.constants or graph.frozen_param_names or graph.torchbind_constants)
        and not graph.mutated_input_idxs
        and all(each.output_type.name == "non_alias" for each in about.output_info)
    )


def _once(bundle: Any) -> Any:  # noqa: ANN401  # of inductor
    """Kernels of a piece, each once; those of a GPU are collected twice."""
    files = {each.kernel_hash: each for each in bundle.kernel_artifacts}
    tuners = {each.cache_key: each for each in bundle.static_autotuners}
    return replace(bundle, kernel_artifacts=[*files.values()], static_autotuners=[*tuners.values()])


def _run_of(direct: bytes) -> Run:
    """Run the source as inductor's loader does, and align its inputs as that does."""
    source, bundle, checked, tuned = pickle.loads(direct)  # noqa: S301  # of a file of this user
    artifact = import_module("torch._inductor.runtime.autotune_cache").AutotuneCacheArtifact
    for key, content in tuned:
        artifact(key, content).populate_cache()
    kernels: Mapping[str, str] = {}
    if bundle is not None:
        import_module("torch._inductor.triton_bundler").TritonBundler.read_and_emit(bundle)
        kernels = {each.kernel_name: each.cache_key for each in bundle.static_autotuners}
    for line in _REPLACED:
        source = source.replace(line, "")
    names: dict[str, Any] = {
        "__name__": __name__,
        "AsyncCompile": partial(_Kernels, kernels),
        "extern_kernels": SimpleNamespace(**{name: getattr(torch, name) for name in _PRODUCTS}),
    }
    exec(compile(source, "<compiled piece>", "exec"), names)  # noqa: S102  # inductor's
    align = import_module("torch._inductor.utils").align_inputs_from_check_idxs
    call = align(names["call"], checked, ())

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            results: Sequence[Tensor] = call([*inputs])
            return results

    return run


class _Kernels:
    """Finds kernels that are stored; those of a CPU are compiled, as `AsyncCompile` does it."""

    def __init__(self, kernels: Mapping[str, str]) -> None:
        self._kernels = kernels
        module = import_module("torch._inductor.async_compile")
        self._found = module.CompiledTritonKernels._cache  # noqa: SLF001
        self._load = module._load_triton_kernel_from_source  # noqa: SLF001
        compiler = module.AsyncCompile()
        self.cpp_pybinding, self.wait = compiler.cpp_pybinding, compiler.wait

    def triton(self, name: str, source: str, device_str: str = "cuda") -> object:
        """A kernel, on its GPU."""
        del device_str
        future = self._found.pop(self._kernels[name])
        future.reload_kernel_from_src = partial(self._load, name, source)
        return future.result()
