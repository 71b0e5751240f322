"""Processes that compile pieces: what they leave is what the caller runs, and they always end."""

import fcntl
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._inductor
from torch import fx, nn

from backends import HelperProcess, helper_process
from backends.helper_process import expecting
from model.cli import start as cli_start
from model.cli.options import ModelOptions
from model.cli.prefetch import may_share_compiling
from model.compile import compile_processes, jobs, pieces, piecewise
from model.compile.compile_processes import PIECES, CompileProcesses
from model.compile.piecewise import compile_piecewise
from model.compile.stored_files import has_stored, write_file
from model.compile.traced_network import trace_network
from model.control.config import EngineConfig
from model.errors import ModelNotFoundError
from model.forward import network
from tests.hang import HANG_S
from tests.model.compile.test_pieces import SIZED, WEIGHT, module, needs_compiler
from tests.model.compile.test_piecewise import agree, inputs
from tests.model.compile.test_traced_network import CPU, switched
from tests.model.networks import build

UNPREPARED = "from model.compile.compile_processes import serve_one; serve_one(lambda: None)"


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Two, which load nothing before their job."""
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_processes, "_num_processes", lambda: 2)
    monkeypatch.setattr(compile_processes, "_COMMAND", UNPREPARED)
    started = CompileProcesses()
    yield started
    started.close()


def is_alive(pid):
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()


def ends(pid):
    until = time.monotonic() + HANG_S
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_network_runs_pieces_that_only_other_processes_have_compiled(
    request, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_processes, "_num_processes", lambda: 3)
    monkeypatch.setattr(pieces, "_compile", None)
    monkeypatch.setattr(torch, "compile", None)
    started = CompileProcesses()
    request.addfinalizer(started.close)
    monkeypatch.setattr(piecewise, "compile_processes", lambda: started)
    piecewise.start_compiler(in_pieces=True)
    traced = trace_network(switched(build("qwen3", 3)), CPU)
    network = compile_piecewise(traced, "inductor")
    given = inputs(8, [0, 3, 7])
    network.submit(lambda: network.logits(*given, None))  # attention is not asked
    assert [piece._wait is None for piece in network.pieces] == [False] * 3
    assert agree(traced, network, given)
    started.close()
    assert not started.can_compile(CPU)
    network.submit(None)


@pytest.mark.parametrize(
    "command",
    ["import sys; sys.exit(1)", "import time; time.sleep(1000)", "while True: pass"],
)
def test_a_process_that_fails_or_hangs_is_not_waited_for(processes, monkeypatch, command):
    monkeypatch.setattr(compile_processes, "_COMMAND", command)
    monkeypatch.setattr(compile_processes, "_PATIENCE_S", 60 if "exit" in command else 0.1)
    processes.start()
    assert processes.are_running
    first, _ = processes._all
    wait = processes.submit(partial(print, "a job"), CPU)
    if wait is not None:  # it may have ended before it was asked
        wait()
    assert ends(first.pid)


def test_a_process_that_is_late_on_a_busy_machine_is_waited_for(monkeypatch):
    """It gets the processor now and then: far less than its patience in ten times as long."""
    worked = itertools.count(1, 1e-4)
    monkeypatch.setattr(helper_process, "_worked_s", lambda _: next(worked))
    late = HelperProcess("import time; time.sleep(2)", {})
    late.wait_or_kill(0.2)
    late.close()
    assert late.returncode == 0


def test_the_work_of_a_process_is_that_of_all_that_it_has_started():
    code = "import os, time; os.fork(); end = time.process_time() + 0.4\n"
    code += "while time.process_time() < end: pass\n"
    code += "open(1, 'w').write('x'); time.sleep(1000)"
    both = HelperProcess(code, {}, answers=True)
    assert both.stdout.read(2) == b"xx"
    assert helper_process._worked_s(both.pid) >= 0.7
    both.kill()
    both.close()
    assert helper_process._worked_s(1 << 30) == 0  # there is no such group


def test_a_piece_whose_process_has_ended_is_compiled_here(processes, monkeypatch, tmp_path):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_processes, "_COMMAND", "")
    made = []
    monkeypatch.setattr(pieces, "_kept", lambda *it: made.append(0) or (it[0], (60, 60)))
    processes.start()
    piece = pieces.Piece(module(), SIZED, "inductor")
    x = torch.ones(4, 16)
    for asked in (processes, None, None):
        piece.processes = asked
        assert all(map(torch.equal, piece(x, WEIGHT), module()(x, WEIGHT)))
        assert made == ([] if asked else [0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_compiles_the_kernels_of_draws_where_there_are_some(monkeypatch, device):
    events = []

    class Passes:
        def warm_up(self, *of):
            events.append(of)

    class Processes:
        def can_compile(self, device):
            return True

        def submit(self, job, device):
            job()
            return partial(events.append, device)

    monkeypatch.setattr(network, "compile_processes", Processes)
    monkeypatch.setattr(network, "passes_for", lambda _: Passes())
    of = SimpleNamespace(dtype=torch.float32)
    it = SimpleNamespace(device=torch.device(device), vocab_size=64, _network=of)
    network.PagedNetwork.warm_up_draws(it)
    of = (64, torch.float32, it.device)
    assert events == ([of, it.device, of] if device == "cuda" else [of])


ON_A_GPU = """
import sys
import triton
from model.cli.options import ModelOptions
from model.cli.prefetch import may_share_compiling
from model.cli.start import make_engine
from model.compile import pieces
from model.control.config import EngineConfig
from tests.bench.engine.networks import loader

found, compile_piece = [], pieces._compile
def noted(*given):
    found.append("a piece")
    return compile_piece(*given)
pieces._compile = noted
def compiled(*, src, cache_hit, **_):
    if not cache_hit:
        found.append(src.fn.__name__)
triton.knobs.compilation.listener = compiled
options = ModelOptions(model="qwen3-0.6b", backend="triton")
engine = make_engine(options, EngineConfig(compile=True), load=loader(options.model))
assert engine.prepare().startswith("compiled"), engine.prepare()
print("compiled here:", *found)
print("the compiler is imported:", "torch._inductor.select_algorithm" in sys.modules)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_start_on_a_gpu_leaves_compilers_to_other_processes_and_a_second_needs_none(tmp_path):
    caches = ("KVCORE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {**os.environ, **{name: str(tmp_path / name) for name in caches}}
    if len(os.sched_getaffinity(0)) < 16:
        pytest.skip("fewer than 16 cores: there are fewer processes than jobs")
    command = [sys.executable, "-c", ON_A_GPU]
    for quick in ({"_copy", "_scatter", "_fill"}, set()):  # made while the processes load
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        *_, line, last = done.stdout.splitlines()
        assert set(line.removeprefix("compiled here:").split()) <= quick, line
    assert last == "the compiler is imported: False"


def test_a_gpu_without_a_number_is_the_callers(monkeypatch):
    """PyTorch makes no GPU the current one without its number, so the job would fail."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    device = torch.device("cuda")  # as a backend names it
    sent = pickle.loads(jobs.write(str, device))  # noqa: S301  # ours
    assert sent == (str, torch.device("cuda", 3))


def test_none_is_asked_where_the_gpu_has_no_memory_for_all(processes, monkeypatch):
    free_bytes = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes[-1], 80 << 30))
    processes.start()
    for device, free_gib, can in (("cuda", 6, False), ("cuda", 7, True), ("cpu", 0, True)):
        free_bytes.append(free_gib << 30)  # two processes take 3 GiB each
        assert processes.can_compile(torch.device(device)) == can


def test_what_no_process_can_be_told_is_refused(processes):
    assert processes.submit(partial(print, "none has started"), CPU) is None
    processes.start()
    for untold in (lambda: None, torch.zeros(4)[1:], "x" * 100_000):
        assert processes.submit(partial(print, untold), CPU) is None
    assert len(processes._waiting) == 2


def test_none_outlives_its_caller_or_leaves_a_process(processes, tmp_path):
    code = (
        f"import os, time; os.environ['KVCORE_CACHE_DIR'] = {str(tmp_path)!r}\n"
        "from model.compile.compile_processes import CompileProcesses\n"
        "import torch; import model.compile.compile_processes as own\n"
        f"own._num_processes = lambda: 2; own._COMMAND = {UNPREPARED!r}\n"
        "p = CompileProcesses(); p.start(); p.submit(os.getpid, torch.device('cpu'))\n"
        "print(*[each.pid for each in p._all], flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        pids = [int(word) for word in caller.stdout.readline().split()]
        assert len(pids) == 2
        caller.kill()
    assert all(map(ends, pids))
    processes.start()
    busy = f"sleep 1000 & echo $! > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid; sleep 1000"
    wait = processes.submit(partial(os.system, busy), CPU)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    mine = [each.pid for each in processes._all]
    assert all(map(is_alive, mine))
    processes.close()
    wait()
    assert all(map(ends, [*mine, int((tmp_path / "pid").read_text())]))
    processes.start()
    assert not processes.are_running


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_none_loads_what_its_job_needs_after_its_caller_has_ended(tmp_path, ends_at_once):
    unending = "from model.compile.compile_processes import serve_one; import time; "
    unending += f"open({str(tmp_path / 'begun')!r}, 'w'); serve_one(lambda: time.sleep(1000))"
    code = (
        f"import os, time; os.environ['KVCORE_CACHE_DIR'] = {str(tmp_path / 'cache')!r}\n"
        "import model.compile.compile_processes as own\n"
        f"own._num_processes = lambda: 1; own._COMMAND = {unending!r}\n"
        "p = own.CompileProcesses(); p.start(); print(p._all[0].pid, flush=True)\n"
        f"time.sleep(0 if {ends_at_once} else 1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        pid = int(caller.stdout.readline())
        while not ends_at_once and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        caller.kill()
    assert ends(pid)


def test_a_pipe_that_holds_little_refuses_a_job_of_a_process_that_does_not_read(processes):
    processes.start()
    first, _ = processes._all
    os.kill(first.pid, signal.SIGSTOP)
    fcntl.fcntl(first.stdin, fcntl.F_SETPIPE_SZ, 4096)  # what a user of many pipes gets
    assert processes.submit(partial(print, "x" * 50_000), CPU) is None
    processes.close()
    assert ends(first.pid)


def test_half_a_piece_is_none(processes, tmp_path):
    (tmp_path / PIECES).mkdir()
    (tmp_path / PIECES / ".a piece.0011").touch()
    assert not has_stored(PIECES)


def test_a_graph_arrives_as_it_was():
    graph = fx.Graph()
    x = graph.placeholder("x0")
    size = graph.call_method("size", (x, 0))
    wide = graph.call_function(torch.ops.aten.to.dtype, (x, torch.float32))
    part = graph.call_function(torch.narrow, (wide, -1, 0, 2))
    both = graph.call_function(torch.cat, ([part, wide], -1))
    shaped = graph.call_function(torch.reshape, (both, (size, 1, -1)))
    graph.output((graph.call_function(torch.mean, (shaped, [-1]), {"keepdim": True}), size))
    sent = fx.GraphModule(nn.Module(), graph)
    tensor = torch.zeros(3, 4, dtype=torch.float16).T
    (came, seen), _ = pickle.loads(jobs.write((sent, tensor), CPU))  # noqa: S301  # ours
    assert came.code == sent.code
    assert seen.shape == (4, 3)
    assert seen.stride() == (1, 4)
    assert seen.dtype == torch.float16


@pytest.mark.parametrize(
    ("cores", "ranks", "count"), [(2, "", 0), (4, "", 2), (16, "", 8), (64, "8", 4), (64, "x", 8)]
)
def test_there_are_as_many_as_this_share_of_the_machine_feeds(monkeypatch, cores, ranks, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert compile_processes._num_processes() == count


def test_they_start_once(processes):
    processes.start()
    assert processes.are_running
    pids = [each.pid for each in processes._all]
    processes.start()
    assert processes.are_running
    assert [each.pid for each in processes._all] == pids
    os.killpg(pids[0], signal.SIGKILL)
    processes.close()
    assert not any(map(is_alive, pids))


def test_a_folder_that_may_not_be_read_costs_time_alone(processes, monkeypatch):
    asked = []

    def exists(path):
        asked.append(path)
        raise PermissionError(path)

    monkeypatch.setattr(Path, "exists", exists)
    piece = pieces.Piece(module(), SIZED, "inductor")
    piece.processes = processes
    x = torch.ones(4, 16)
    for _ in range(2):  # as in two layers
        assert all(map(torch.equal, piece(x, WEIGHT), module()(x, WEIGHT)))
    assert len(asked) == 1


@pytest.mark.parametrize(("said", "is_set"), [(None, "1"), ("7", "7")])
def test_none_starts_processes_of_its_own_unless_told_to(
    processes, monkeypatch, tmp_path, said, is_set
):
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    if said is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, said)
    write = f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(os.environ[{name!r}])"
    monkeypatch.setattr(compile_processes, "_COMMAND", f"import os, pathlib; {write}")
    processes.start()
    for each in processes._all:
        each.wait()
    assert (tmp_path / "seen").read_text() == is_set


def test_none_is_started_where_pieces_are_stored_or_none_can_be(processes, monkeypatch, tmp_path):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path / "file/in the way"))
    (tmp_path / "file").touch()
    processes.start()
    assert not processes.are_running
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path))
    write_file(tmp_path / PIECES / "a piece", b"")
    processes.start()
    assert not processes.are_running
    (tmp_path / PIECES / "a piece").unlink()
    processes.start()
    assert processes.are_running


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_what_another_process_compiles_under_other_settings_is_not_stored(
    processes, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVCORE_CACHE_DIR", str(tmp_path))
    processes.start()
    piece, given = pieces.Piece(module(), SIZED, "inductor"), (torch.ones(4, 16), WEIGHT)
    piece.processes = processes
    with torch._inductor.config.patch(deterministic=True):
        piece(*given)
    piece._wait()
    assert not has_stored(PIECES)
    piece = pieces.Piece(module(), SIZED, "inductor")
    piece.processes = processes
    piece(*given)
    piece._wait()
    assert has_stored(PIECES)


def test_a_start_that_fails_ends_them(processes, monkeypatch):
    monkeypatch.setattr(cli_start, "compile_processes", lambda: processes)
    processes.start()
    (first, *_), options = processes._all, ModelOptions(backend="numba")
    expected = HelperProcess("import time; time.sleep(1000)", {})
    cli_start.make_engine(options, EngineConfig(num_blocks=8))
    assert processes.are_running

    def fails(*_):
        expecting().append(expected)  # for kernels of attention
        raise ModelNotFoundError("wanted a model")

    with pytest.raises(ModelNotFoundError):
        cli_start.make_engine(options, EngineConfig(num_blocks=8), load=fails)
    assert not processes.are_running
    assert ends(first.pid)
    assert ends(expected.pid)


@pytest.mark.parametrize(
    "settings",
    [
        {"compile": False},
        {"num_blocks": 8},
        {"kv_memory_bytes": 1 << 20},
        {"batch_invariant": True},
    ],
)
def test_they_are_started_only_where_they_help(settings):
    assert may_share_compiling(EngineConfig(compile=True))
    assert not may_share_compiling(EngineConfig(**{"compile": True, **settings}))
