"""A piece is compiled once on a machine, for every size that its code holds for."""

import os
import pickle
import shutil
import stat
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
from torch import _inductor as inductor
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor import async_compile, codecache, select_algorithm, triton_bundler
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    guard_bool,
)

from model.compile import artifacts, pieces, piecewise
from model.compile.pieces import MOST, Piece
from model.compile.piecewise import compile_piecewise
from model.compile.traced_network import trace_network
from tests.model.compile.test_traced_network import CPU, switched
from tests.model.networks import build

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pieces"


def module():
    """[n, 16] times a weight, and the halves of what is positive there."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    product = graph.call_function(nn.functional.linear, (x, weight))
    size = graph.call_method("size", (x, 0))
    halves = graph.call_function(torch.reshape, (product, (size, 2, -1)))
    graph.output((graph.call_function(torch.relu, (halves,)), product))
    return fx.GraphModule(nn.Module(), graph)


WEIGHT = nn.Parameter(torch.linspace(-1, 1, 8 * 16).reshape(8, 16))
SIZED = [{0: 0}, {}]


@torch.no_grad()
def runs(piece):
    """Whether a piece gives what its operations give, for several sizes."""
    for count in (12, 2, 50, 3000):
        x = torch.linspace(-2, 3, count * 16).reshape(count, 16)
        wanted = module()(x, WEIGHT)
        assert all(map(torch.allclose, piece(x, WEIGHT), wanted, [1e-4] * 2, [1e-4] * 2))


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # the compiler's own, as where it is called
def test_a_second_start_compiles_nothing(folder, monkeypatch):
    made, compile_piece = [], pieces._compile
    monkeypatch.setattr(pieces, "_compile", lambda *it: made.append(0) or compile_piece(*it))
    monkeypatch.setattr(torch, "compile", None)
    for _ in range(2):
        piece = Piece(module(), SIZED, "inductor")
        runs(piece)
        assert piece.limits == (MOST, MOST)
    assert len(made) == 1
    [path] = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    runs(Piece(module(), SIZED, "inductor"))
    assert len(made) == 2
    runs(Piece(module(), SIZED, "inductor"))
    assert len(made) == 2


def aliasing():
    """[n, 16], a view of the input, and twice the input."""
    graph = fx.Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("weight")
    view = graph.call_function(torch.narrow, (x, 1, 0, 8))
    graph.output((view, graph.call_function(torch.mul, (x, 2.0))))
    return fx.GraphModule(nn.Module(), graph)


@torch.no_grad()
def agrees(made):
    """Whether a piece of these operations, new or stored, gives what they give."""
    x = torch.linspace(-2, 3, 12 * 16).reshape(12, 16)
    given = Piece(made(), SIZED, "inductor")(x, WEIGHT)
    assert all(map(torch.allclose, given, made()(x, WEIGHT), [1e-4] * 2, [1e-4] * 2))


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["direct", "of an input", "other kernels"])
def test_a_second_start_reads_no_source_of_pytorch_and_starts_no_process(way, folder, monkeypatch):
    made = aliasing if way == "of an input" else module
    agrees(made)
    ways, threads, config = [], [], inductor.config
    load, run_of = inductor.CompiledArtifact.load, artifacts._run_of

    def loading(**what):
        ways.append("with the compiler")
        threads.append(config.compile_threads)  # with one, none is asked to compile
        return load(**what)

    def running(direct):
        ways.append("direct")
        threads.append(config.compile_threads)
        return run_of(direct) if way == "direct" else 1 / 0

    monkeypatch.setattr(inductor.CompiledArtifact, "load", loading)
    monkeypatch.setattr(artifacts, "_run_of", running)
    monkeypatch.setattr(codecache, "torch_key", unread := lambda: 1 / 0)
    monkeypatch.setattr(pieces, "_compile", None)
    agrees(made)
    expected = {
        "direct": ["direct"],
        "of an input": ["with the compiler"],
        "other kernels": ["direct", "with the compiler"],
    }
    assert ways == expected[way]
    assert {*threads} == {1}
    assert config.compile_threads != 1
    assert codecache.torch_key is unread


@pytest.fixture(scope="module")
def plain():
    """What inductor notes of the module, as of one that runs without its loader."""
    x = torch.zeros(12, 16)
    seen = []

    def note(graph, about, kernels):
        seen.append((graph, about, kernels))
        return is_plain(graph, about, kernels)

    is_plain, artifacts._is_plain = artifacts._is_plain, note
    try:
        pieces._saved(module(), [x, WEIGHT], SIZED)
    finally:
        artifacts._is_plain = is_plain
    [(graph, about, kernels)] = seen
    return vars(graph), about, kernels


KERNEL = "add = async_compile.triton('add', 'def add(): pass', device_str='cuda')\n"


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("without", "behind", "changes", "kernels"),
    [
        ("\0", "buf1 = align(s0)\n", {}, []),  # a function that is left out
        ("\0", "extern_kernels.convolution(buf0)\n", {}, []),  # that Triton computes too
        ("\0", KERNEL, {}, []),  # none is stored
        ("\0", KERNEL, {}, ["multiply"]),
        ("\0", "", {}, ["add"]),
        ("\0", "", {"constants": {"c": torch.ones(2)}}, []),
        ("\0", "", {"frozen_param_names": {"c": "weight"}}, []),
        ("\0", "", {"torchbind_constants": {"c": object()}}, []),
        ("\0", "", {"mutated_input_idxs": {0}}, []),
        *[(line, "", {}, []) for line in artifacts._REPLACED],
    ],
)
def test_what_needs_more_than_its_source_is_loaded_with_the_compiler(
    plain, without, behind, changes, kernels
):
    noted, about, _ = plain
    assert artifacts._is_plain(SimpleNamespace(**noted), about, [])
    tuned = {**noted, "source_code": noted["source_code"] + KERNEL}
    assert artifacts._is_plain(SimpleNamespace(**tuned), about, ["add"])
    source = noted["source_code"].replace(without, "") + behind
    graph = SimpleNamespace(**{**noted, "source_code": source, **changes})
    assert not artifacts._is_plain(graph, about, kernels)


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_products_of_another_library_are_loaded_with_the_compiler(plain, monkeypatch):
    noted, about, _ = plain
    products = select_algorithm.extern_kernels
    name = next(
        name for name in artifacts._PRODUCTS if f"extern_kernels.{name}(" in noted["source_code"]
    )
    monkeypatch.setattr(products, name, lambda *_, **__: None)
    assert not artifacts._is_plain(SimpleNamespace(**noted), about, [])


SOURCE = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
add = async_compile.triton('add', 'source of add', device_str='cuda')
async_compile.wait(globals())
del async_compile

def call(args):
    return [add(*args), *args]
"""


def test_a_stored_kernel_runs_with_its_settings_on_aligned_inputs(tmp_path, monkeypatch):
    """On a GPU its code may assume alignment, which none of a CPU does."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = SimpleNamespace(result=lambda: torch.add)
    cache = async_compile.CompiledTritonKernels._cache
    emit = partial(cache.__setitem__, "a key", found)
    monkeypatch.setattr(triton_bundler.TritonBundler, "read_and_emit", lambda _: emit())
    kernel = triton_bundler.StaticallyLaunchedAutotuner("a key", "add", None)
    bundle = triton_bundler.TritonBundle([], [kernel])
    direct = pickle.dumps((SOURCE, bundle, [0], [("ab/kernel.best_config", b"{}")]))
    run = artifacts._run_of(direct)
    assert "a key" not in cache
    assert found.reload_kernel_from_src.args == ("add", "source of add")
    assert (tmp_path / "ab/kernel.best_config").read_bytes() == b"{}"
    loose, aligned = torch.arange(17.0)[1:], torch.ones(16)
    assert loose.data_ptr() % 16
    total, *seen = run(loose, aligned)
    assert torch.equal(total, loose + 1)
    assert not any(each.data_ptr() % 16 for each in seen)
    emit = dict
    with pytest.raises(KeyError):  # a folder of Triton's that may not be written, say
        artifacts._run_of(direct)


def test_a_kernel_that_is_stored_twice_is_one():
    file, other = (triton_bundler.TritonKernelArtifacts(name, 0, []) for name in ("a", "b"))
    old, new = (triton_bundler.StaticallyLaunchedAutotuner("a", "add", object()) for _ in range(2))
    bundle = triton_bundler.TritonBundle([file, other, file], [old, new])
    assert artifacts._once(bundle) == triton_bundler.TritonBundle([file, other], [new])


_SECOND = """
import sys
import torch
from model.compile import pieces
from tests.model.compile.test_pieces import agrees, module
pieces._compile = None
agrees(module)
print(*[name for name in sys.modules if name.startswith("torch._inductor.")])
"""


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_second_start_does_not_import_the_compiler(folder):
    agrees(module)
    command = [sys.executable, "-c", _SECOND]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {*done.stdout.split()}
    assert "torch._inductor.async_compile" in imported
    assert not imported & {f"torch._inductor.{name}" for name in ("compile_fx", "ir", "lowering")}


@pytest.mark.filterwarnings("ignore")
def test_the_compiler_starts_its_processes_where_no_piece_is_stored(folder, monkeypatch):
    started, tried = [], []
    others = SimpleNamespace(start=lambda: tried.append(0), are_running=False)
    monkeypatch.setattr(piecewise, "start_processes", lambda: started.append(0))
    monkeypatch.setattr(piecewise, "compile_processes", lambda: others)
    piecewise.start_compiler()
    assert not tried
    assert len(started) == 1
    piecewise.start_compiler(in_pieces=True)  # there are too few cores, say
    assert len(tried) == 1
    assert len(started) == 2
    others.are_running = True
    piecewise.start_compiler(in_pieces=True)
    assert len(tried) == 2
    assert len(started) == 2
    folder.mkdir(parents=True)
    (folder / "a piece").touch()
    piecewise.start_compiler(in_pieces=True)
    assert len(tried) == 2
    assert len(started) == 2


def test_what_code_depends_on_changes_its_name(folder, tmp_path, monkeypatch):
    x = torch.zeros(12, 16)
    before = pieces._digest(module(), [x, WEIGHT], SIZED)
    assert pieces._digest(module(), [x + 1, WEIGHT], SIZED) == before
    other = module()
    next(iter(other.graph.find_nodes(op="call_function", target=torch.relu))).target = torch.sin
    other.recompile()
    names = {
        before,
        pieces._digest(other, [x, WEIGHT], SIZED),
        pieces._digest(module(), [x.double(), WEIGHT], SIZED),
        pieces._digest(module(), [x.T.contiguous().T, WEIGHT], SIZED),
        pieces._digest(module(), [x, WEIGHT], [{0: -1}, {}]),
    }
    monkeypatch.setitem(pieces._OPTIONS, "combo_kernels", False)
    names.add(pieces._digest(module(), [x, WEIGHT], SIZED))
    for version in ("git_version", "__file__"):
        installed = tmp_path / "torch/__init__.py"
        installed.parent.mkdir(exist_ok=True)
        installed.touch()
        spec = ModuleSpec("torch", None, origin=str(installed))
        monkeypatch.setattr(torch.version, "git_version", version)
        monkeypatch.setattr(pieces, "find_spec", lambda _, spec=spec: spec)
        names.add(pieces._digest(module(), [x, WEIGHT], SIZED))
    os.utime(installed, (1, 1))
    names.add(pieces._digest(module(), [x, WEIGHT], SIZED))
    assert len(names) == 9


def test_what_cannot_be_compiled_alone_is_compiled_at_each_start(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(pieces, "_compile", lambda *_: 1 / 0)
    monkeypatch.setattr(torch, "compile", lambda it, **how: asked.append(how) or it)
    piece = Piece(module(), SIZED, "inductor")
    runs(piece)
    assert [each["backend"] for each in asked] == ["inductor"]
    assert not folder.exists()


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_stored_is_compiled_once_a_start(tmp_path, monkeypatch):
    (tmp_path / "cache").touch()  # no folder
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "compile", None)
    runs(Piece(module(), SIZED, "inductor"))


def assuming(*conditions):
    """The limit of code that assumes something of a size, which was 12."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    seen = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    tokens, rows = (
        mode.from_tensor(torch.zeros(n), symbolic_context=seen, source=ConstantSource(f"x{n}"))
        for n in (12, 7)
    )
    assert guard_bool(rows.shape[0] * 100_000 <= 2**31 - 1)
    for condition in conditions:
        assert guard_bool(condition(tokens.shape[0]))
    limit, other = pieces._limits(shapes, [tokens, rows], [{0: 0}, {0: 1}])
    assert other == 16_384
    assert pieces._limits(shapes, [rows], [{0: -1}]) == (16_384, 16_384)
    return limit


def test_code_is_for_no_size_that_breaks_what_it_assumes():
    assert assuming() == MOST
    limit = assuming(lambda n: n * 151_936 <= 2**31 - 1)
    assert limit * 151_936 <= 2**31 - 1 < 2 * limit * 151_936
    assert assuming(lambda n: n * 3072 < 2**31, lambda n: n * 151_936 <= 2**31 - 1) == limit
    for narrow in (lambda n: n % 4 == 0, lambda n: n == 12, lambda n: n < 600, lambda n: n > 5):
        with pytest.raises(ValueError, match="wanted code for any size"):
            assuming(narrow)


def test_a_step_above_the_limit_runs_as_traced():
    traced = trace_network(switched(build("qwen3", 3)), CPU)
    network = compile_piecewise(traced, "eager")
    for piece in network.pieces:
        piece.limits = (100, 60)
    network.pieces[1].limits = (40, 70)
    network.settle()
    rows = torch.arange(3)
    assert network._choose(40, rows)[0] == network.module.forward
    assert network._choose(41, rows)[0] == traced.module.forward
    assert network._choose(40, torch.arange(60))[0] == network.module.forward
    assert network._choose(40, torch.arange(61))[0] == traced.module.forward
