"""What other processes compile is found, and whatever they do, each call is made once."""

import importlib.util
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)

import triton
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable

from backends.helper_process import expecting
from backends.triton_gpu import ahead, backend
from backends.triton_gpu.shared import launch, place
from backends.triton_gpu.warm_up import warm_up
from tests.backends import ahead_calls
from tests.backends.gpus import H100
from tests.hang import HANG_S

assert backend  # whose import brings in all kernels
KERNELS = dict(launch._launchers)


class Naming(place.Place):
    """Where a kernel is asked for its name, and not compiled."""

    def __init__(self):
        super().__init__(interpreting=False)
        self.launches = False
        self.names = {}

    def starter(self, kernel, grid):
        name = kernel.__module__, kernel.__name__
        return lambda *_, **__: self.names.update({name: kernel.cache_key})


def forget_names():
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("backends.tri")]
    values = [value for module in modules for value in vars(module).values()]
    for value in values:
        each = value.kernel if isinstance(value, launch.Launcher) else value
        if isinstance(each, JITCallable):
            each.hash, each.used_global_vals = None, {}
    launch._name_kernels.cache_clear()


def names(order):
    """What kernels are called on disk in a process that compiles them in this order."""
    forget_names()
    where = Naming()
    for key in order:
        variant = launch.Variant(KERNELS[key], where, torch.device("cpu"), (), {})
        variant._first((1, 1, 1), (), (), (), ())
    return where.names


@given(st.permutations(sorted(KERNELS)))
@settings(max_examples=20, deadline=None)
def test_a_kernel_has_one_name_on_disk_whichever_a_process_compiles_first(order):
    assert names(order) == names(sorted(KERNELS))


def test_without_an_order_of_its_own_triton_gives_kernels_other_names(monkeypatch):
    """When it no longer does, `launch._name_kernels` has nothing left to do."""
    order = sorted(KERNELS)
    monkeypatch.setattr(launch, "_name_kernels", lambda: None)
    launch._name_kernels.cache_clear = lambda: None
    assert names(order) != names(order[::-1])


def made(folder, behaviour="compiles"):
    """What became of six calls, in order."""
    ahead_calls.make(folder, behaviour)
    events = (folder / "order").read_text().splitlines()
    found = [event for event in events if event.startswith("made")]
    assert sorted(found) == [f"made {number}" for number in range(6)]  # each once
    return events


def all_are_gone(folder):
    pids = (folder / "pids").read_text().split()
    assert pids
    until = time.monotonic() + HANG_S
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_are_waited_for(events):
    """Whether no call was made before what it needs; the last is the caller's, at the start."""
    return all(events.index(f"compiled {n}") < events.index(f"made {n}") for n in range(5))


@pytest.mark.parametrize("behaviour", ["compiles", "slow"])
def test_calls_are_made_once_their_kernels_are_there(tmp_path, behaviour):
    assert all_are_waited_for(made(tmp_path, behaviour))


def test_calls_that_are_quick_wait_for_nobody(tmp_path):
    assert made(tmp_path, "quick") == [f"made {number}" for number in reversed(range(6))]


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """An event for each helper that is started, none of which works."""
    started = SimpleQueue()

    def start():
        started.put("a helper")
        raise OSError

    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "kernels"))
    return started


def test_calls_whose_kernels_are_on_disk_start_no_process(tmp_path, helpers, monkeypatch):
    monkeypatch.setattr(ahead, "SOON_S", 60)
    (tmp_path / "kernels/of another start").mkdir(parents=True)
    made(tmp_path, "quick")
    assert helpers.empty()
    compilers = idle()
    compilers._is_over.set()
    assert not compilers._is_needed()


def idle():
    """Compilers while their caller makes a call."""
    return ahead._Compilers(H100, partial(ahead_calls.marking, None, 6))


def test_a_call_that_takes_long_starts_a_helper(tmp_path, helpers):
    (tmp_path / "kernels/of another start").mkdir(parents=True)
    with idle():
        assert helpers.get(timeout=HANG_S)


@pytest.mark.parametrize("exists", [True, False])
def test_without_any_kernel_on_disk_a_helper_starts_at_once(exists, tmp_path, helpers, monkeypatch):
    monkeypatch.setattr(ahead, "SOON_S", 1000)
    if exists:
        (tmp_path / "kernels").mkdir()
    with idle():
        assert helpers.get(timeout=HANG_S)


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """A helper that waits for a warm-up, without kernels on disk."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "kernels"))
    for interpreting in (True, False, False):
        where = place.Place(interpreting=interpreting)
        backend.TritonBackend(where).warmup((), max_num_seqs=1, max_query_len=1)
    [helper] = expecting()
    yield helper
    expecting().clear()
    helper.kill()
    with helper:
        pass


@pytest.mark.parametrize("dies", [False, True])
def test_a_helper_that_was_expected_compiles_if_it_still_waits(
    tmp_path, expected, dies, monkeypatch
):
    if dies:
        expected.kill()
        expected.wait()
    else:
        monkeypatch.setattr(ahead, "_start", None)
    assert all_are_waited_for(made(tmp_path, "compiles"))
    assert not expecting()
    assert expected.poll() is not None


@pytest.mark.parametrize("has_kernels", [False, True])
def test_calls_that_end_before_a_helper_is_asked_end_the_one_that_was_expected(
    tmp_path, expected, has_kernels
):
    if has_kernels:  # which others have stored since
        (tmp_path / "kernels/of another start").mkdir(parents=True)
    compilers = idle()
    compilers._end()
    compilers._run()
    assert not expecting()
    assert expected.returncode is not None


def test_none_is_expected_where_kernels_are_on_disk(tmp_path, helpers):
    (tmp_path / "kernels/of another start").mkdir(parents=True)
    ahead.expect()
    assert helpers.empty()
    assert not expecting()


def test_names_of_kernels_are_found_while_weights_load(monkeypatch):
    monkeypatch.setattr(ahead, "expect", lambda: None)
    forget_names()
    triton_key.cache_clear()
    where = Naming()
    where.launches = True
    before = {*threading.enumerate()}
    warm_up(lambda _: None, where, (), 1, 1)
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert triton_key.cache_info().currsize == 1
    assert all(kernel.kernel.hash is not None for kernel in KERNELS.values())


@pytest.mark.parametrize("waits", [True, False])
def test_a_helper_that_is_never_asked_ends(tmp_path, waits):
    code = (
        "from backends.triton_gpu import ahead; import sys\n"
        f"ahead.JOB_S = 0.0; ahead._COMMAND = 'from backends.triton_gpu import ahead; "
        f"ahead.JOB_S = {0.0 if waits else 600.0}; ahead.main()'\n"
        "ahead.expect(); [helper] = ahead.expecting()\n"
        f"print(helper.wait() if {waits} else helper.pid, flush=True)"
    )
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    if waits:
        assert done.stdout == "0\n"
    else:
        (tmp_path / "pids").write_text(done.stdout)
        assert all_are_gone(tmp_path)


@pytest.mark.parametrize("behaviour", ["fails", "dies"])
def test_what_another_process_cannot_compile_is_left_to_the_caller(tmp_path, behaviour):
    events = made(tmp_path, behaviour)
    assert "compiled 1" not in events
    compiled = {event for event in events if event.startswith("compiled")}
    assert compiled >= {f"compiled {n}" for n in ((0, 3) if behaviour == "fails" else (0,))}


def test_processes_that_hang_are_waited_for_so_long_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE_S", 0.5)
    made(tmp_path, "hangs")
    assert all_are_gone(tmp_path)


@pytest.mark.parametrize("behaviour", ["raises", "orphans"])
def test_a_call_that_fails_ends_all_processes(tmp_path, behaviour):
    with pytest.raises(ValueError, match="the caller's own"):
        made(tmp_path, behaviour)
    assert all_are_gone(tmp_path)


def test_no_process_outlives_its_caller(tmp_path):
    command = [sys.executable, "-m", "tests.backends.ahead_calls", str(tmp_path), "hangs"]
    with subprocess.Popen(command) as caller:
        until = time.monotonic() + HANG_S
        while not (tmp_path / "pids").exists() and time.monotonic() < until:
            time.sleep(0.01)
        caller.kill()
    assert all_are_gone(tmp_path)


def no_threads(self):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (ahead, "_COMMAND", "print('what a start may say'); raise SystemExit(1)"),
        (sys, "executable", "/no/such/python"),
        (sys, "executable", None),
        (ahead.threading.Thread, "start", no_threads),
        (sys, "path", [*sys.path, None]),
    ],
)
def test_without_a_helper_the_caller_makes_all_calls(tmp_path, monkeypatch, where, name, value):
    monkeypatch.setattr(where, name, value)
    made(tmp_path, "quick")


def test_what_a_helper_says_when_it_starts_and_what_lies_around_changes_nothing(
    tmp_path, monkeypatch
):
    for name in ("found", "around", "marks"):
        (tmp_path / name).mkdir()
    (tmp_path / "found/sitecustomize.py").write_text(
        "import os, pathlib; os.write(1, b'7 '); pathlib.Path(__file__).with_name('ran').touch()"
    )
    (tmp_path / "around/pickle.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path / "around")
    entries = [Path("/no string"), str(tmp_path / "found"), *sys.path]
    monkeypatch.setattr(sys, "path", entries)
    assert all_are_waited_for(made(tmp_path / "marks", "slow"))
    assert (tmp_path / "found/ran").exists()


@pytest.mark.parametrize(
    ("calls", "neighbours", "children"),
    [(40, "1", 16), (5, "1", 5), (40, "8", 4), (40, "0", 16), (40, "x", 16)],
)
def test_processes_are_no_more_than_calls_and_cores(monkeypatch, calls, neighbours, children):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", neighbours)
    assert ahead.num_children(calls) == children


@pytest.mark.slow
def test_what_other_processes_compile_is_found_by_triton(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.backends.ahead_check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "all is found\n"


WARM_UP = """
import torch, triton, backends
from backends.triton_gpu import ahead
begin = ahead._Compilers.__enter__
def begun(self):
    begin(self)
    self.have_begun.wait()
    return self
ahead._Compilers.__enter__ = begun  # so that the caller waits for the others at once
found = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
backend = backends.get_backend("triton")
assert triton.runtime.driver.active.utils
built = []
build = triton.runtime.build._build
triton.runtime.build._build = lambda *it, **them: built.append(it[0]) or build(*it, **them)
k = torch.empty(100, 16, 8, 128, dtype=torch.bfloat16, device=backend.device)
cache = backends.KVCache(k, torch.empty_like(k))
layer = backends.LayerCall(16, k.dtype, cache, backends.AttentionTerms(0.1), shared_prefix=True)
backend.warmup([layer], max_num_seqs=64, max_query_len=512)
torch.cuda.synchronize()
print(len(found), found.count(False), len(built))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_other_processes_compile_is_found_by_launches_on_a_gpu(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", WARM_UP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, *compiled = map(int, done.stdout.split())
    assert count > 20
    assert compiled == [0, 0]  # neither a kernel nor what launches it
