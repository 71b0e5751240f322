"""What is done beside imports is only ever a gain: it imports no torch, waits for nothing, reports
nothing.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import types
from importlib.machinery import ModuleSpec

import pytest

from model.cli import prefetch
from model.cli.options import ModelOptions
from model.control.config import EngineConfig
from tests.hang import HANG_S


@pytest.fixture
def run_here(monkeypatch):
    """Run threads immediately, on this one; returns the list of what they do, in order."""
    done = []

    def start_thread(_host, _name, run):
        run()

    event = types.SimpleNamespace(wait=lambda: done.append("waited for PyTorch"))
    monkeypatch.setattr(prefetch.Host, "start_thread", start_thread)
    monkeypatch.setattr(prefetch.Host, "event", lambda _: event)
    monkeypatch.setattr(prefetch, "compute_once", lambda: done.append("computed"))
    return done


@pytest.fixture
def torch_with_gpus(tmp_path, monkeypatch):
    """An installation of PyTorch with CUDA."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtorch_cuda.so").touch()
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(prefetch, "find_spec", lambda _: spec)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


class Driver:
    """A CUDA driver that records its calls; without GPUs it cannot be initialised."""

    def __init__(self, gpus, asked):
        self.asked = asked
        self._fault = 0 if gpus else 100

    def __getattr__(self, name):
        def ask(*_):
            self.asked.append(name)
            return self._fault

        return ask


def test_no_torch_is_imported():
    code = "import sys, model.cli.prefetch; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"False\n"


CONTEXT = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
LATER = ["waited for PyTorch", "computed"]


@pytest.mark.parametrize(
    ("gpus", "compiles", "wanted"),
    [
        (0, True, ["cuInit"]),
        (1, False, [*CONTEXT, *LATER]),
        (1, True, [*CONTEXT, "processes that compile", *LATER]),
    ],
)
def test_where_there_is_a_gpu_its_context_and_compilers_come_before_pytorch_uses_it(
    gpus, compiles, wanted, torch_with_gpus, run_here, monkeypatch
):
    driver = Driver(gpus, run_here)
    started = types.SimpleNamespace(start=lambda: run_here.append("processes that compile"))
    monkeypatch.setattr(prefetch, "compile_processes", lambda: started)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    fake = types.SimpleNamespace(**{**vars(prefetch.ctypes), "CDLL": lambda _: driver})
    monkeypatch.setattr(prefetch, "ctypes", fake)
    prefetch.begin(
        ModelOptions(model=str(torch_with_gpus), backend="triton"), EngineConfig(compile=compiles)
    )
    assert run_here == wanted


def test_no_thread_changes_the_environment(torch_with_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # as it was, after the test
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    monkeypatch.setattr(prefetch.Host, "start_thread", lambda *_: None)
    prefetch.begin(ModelOptions(model=str(torch_with_gpus), backend="triton"), EngineConfig())
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


@pytest.mark.parametrize(
    "options",
    [{"backend": "numba"}, {"backend": "a plug-in"}, {"backend": "triton", "tp": 2}],
    ids=str,
)
def test_a_gpu_that_will_not_be_used_is_left_alone(options, torch_with_gpus):
    assert prefetch._may_use_gpu(ModelOptions())
    assert not prefetch._may_use_gpu(ModelOptions(**options))


def test_no_gpu_is_asked_for_by_a_pytorch_or_a_triton_of_cpus(torch_with_gpus, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not prefetch._may_use_gpu(ModelOptions())
    monkeypatch.delenv("TRITON_INTERPRET")
    (torch_with_gpus / "lib/libtorch_cuda.so").unlink()
    assert not prefetch._may_use_gpu(ModelOptions())


def cached(path):
    """The part of a file that the system has in memory."""
    size, libc = path.stat().st_size, ctypes.CDLL(None)
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as there:
        first = ctypes.addressof(ctypes.c_char.from_buffer(there))
        assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it has in memory")
def test_whole_weights_are_read_unless_they_would_take_all_memory(tmp_path, monkeypatch):
    files = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.bin")]
    for path in files:
        with path.open("wb") as file:
            file.write(bytes(32 << 20))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(cached(path) for path in files):
        pytest.skip("this file system keeps all files in memory")
    with monkeypatch.context() as patched:
        sizes = {"SC_AVPHYS_PAGES": 2 * (64 << 20) - 1, "SC_PAGE_SIZE": 1}
        patched.setattr(os, "sysconf", sizes.get)
        prefetch.read_weights(tmp_path)
    assert [cached(path) for path in files] == [0, 0, 0]
    monkeypatch.setattr(prefetch, "_AT_ONCE", 7 << 20)
    prefetch.read_weights(tmp_path)
    assert [cached(path) for path in files] == [1, 1, 0]


@pytest.mark.filterwarnings("error")  # what a thread raises is a warning of pytest
def test_what_cannot_be_read_is_left_to_whoever_needs_it(tmp_path, torch_with_gpus, monkeypatch):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        prefetch.read_weights(tmp_path)
    for path in (tmp_path, tmp_path / "nothing", "owner/name", "\ud800"):
        prefetch.begin(ModelOptions(model=str(path), backend="triton"), EngineConfig()).set()
    for thread in threading.enumerate():
        if thread.name in ("weights", "gpu"):
            thread.join(HANG_S)

    def no_threads(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(prefetch.Host, "start_thread", no_threads)
    prefetch.begin(ModelOptions(model=str(tmp_path)), EngineConfig())
