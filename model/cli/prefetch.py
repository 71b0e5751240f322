"""What a start can do while Python imports packages: read weights, and wake the GPU.

Imports take most of a start, and they hold Python's lock. None of this does, so it costs no time on
threads of its own.

Invariants: nothing waits for it; what fails here is met, and reported, by the code that needs it.
Importing this imports no torch.

Does not know: what is read from a checkpoint.
"""

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from model.cli.options import ModelOptions
from model.host import Host


def begin(options: ModelOptions) -> None:
    """Do what needs no package yet. O(1), on threads."""
    _start("weights", partial(read_weights, Path(options.path)))
    if _may_use_gpu(options):
        _start("gpu", open_gpu)


def begin_with_torch(options: ModelOptions) -> None:
    """Do what PyTorch, once it is imported, does the first time that it is asked to. O(1)."""
    if _may_use_gpu(options):
        _start("gpu", multiply_once)


def _start(name: str, run: Callable[[], None]) -> None:
    def try_it() -> None:
        with suppress(Exception):
            run()

    with suppress(RuntimeError):  # no thread can be started
        Host().start_thread(name, try_it)


def _may_use_gpu(options: ModelOptions) -> bool:
    """Whether this process will use the first GPU, if there is one; ranks choose theirs later."""
    if options.backend not in ("auto", "triton") or options.tp > 1:
        return False
    torch = find_spec("torch")
    if torch is None or torch.origin is None or os.environ.get("TRITON_INTERPRET"):
        return False
    return Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def read_weights(folder: Path) -> None:
    """Let the system read the weight files of a folder, if they take at most half of free memory.

    Raises:
        OSError: one cannot be opened.
    """
    files = [*folder.glob("*.safetensors")]
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * sum([file.stat().st_size for file in files]) > free_bytes:
        return
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def open_gpu() -> None:
    """Make the first GPU's context, which PyTorch takes. Up to a second.

    Raises:
        OSError: there is no driver.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # read by the driver now; PyTorch sets it
    driver = ctypes.CDLL("libcuda.so.1")
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def multiply_once() -> None:
    """Let PyTorch load its library of matrix products. Parts of a second.

    Raises:
        Exception: there is no GPU, or no memory on it.
    """
    torch = import_module("torch")
    some = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
    torch.mm(some, some)
