"""The work of a start beside Python's imports: weights, the GPU's context, other processes.

Imports take most of a start, and they hold Python's lock. This work does not, so it runs on other
threads meanwhile.

Invariants: nothing waits for it; what fails here fails again, and is reported, in the code that
needs it. Importing this imports no torch.

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
from model.compile.compile_processes import compile_processes
from model.control.config import EngineConfig
from model.host import Event, Host

_AT_ONCE = 1 << 30
"""Bytes of one call, which does not hold Python's lock."""


def begin(options: ModelOptions, config: EngineConfig) -> Event:
    """Start all of it, on threads. O(1).

    Args:
        options: the model and its backend.
        config: if it compiles networks, processes that do so start too.

    Returns:
        An event to set when PyTorch is imported; one of the threads waits for it.
    """
    has_torch = Host().event()
    _start("weights", partial(read_weights, Path(options.path)))
    if _may_use_gpu(options):
        # PyTorch sets it too, later than the driver reads it. Here, because C code on another
        # thread may read the environment while it moves.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        _start("gpu", partial(_prepare_gpu, has_torch, config))
    return has_torch


def may_share_compiling(config: EngineConfig) -> bool:
    """Return True if other processes may compile a network that is not split over ranks. O(1).

    They hold GPU memory, so they must end before free memory is measured, and they know only
    PyTorch's own operators.
    """
    is_measured = config.num_blocks is None and config.kv_memory_bytes is None
    return config.compile and is_measured and not config.batch_invariant


def _prepare_gpu(has_torch: Event, config: EngineConfig) -> None:
    """Make the context, start compile processes, and use PyTorch on the GPU once it is imported.

    PyTorch would wait for the context with Python's lock, and no import would go on meanwhile.
    """
    open_gpu()
    if may_share_compiling(config):
        compile_processes().start()
    has_torch.wait()
    compute_once()


def _start(name: str, run: Callable[[], None]) -> None:
    def try_it() -> None:
        with suppress(Exception):
            run()

    with suppress(RuntimeError):  # no thread can be started
        Host().start_thread(name, try_it)


def _may_use_gpu(options: ModelOptions) -> bool:
    """Return True if this process will use the first GPU, if there is one; ranks choose later."""
    if options.backend not in ("auto", "triton") or options.tp > 1:
        return False
    torch = find_spec("torch")
    if torch is None or torch.origin is None or os.environ.get("TRITON_INTERPRET"):
        return False
    return Path(torch.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()


def read_weights(folder: Path) -> None:
    """Read a folder's weight files into the page cache, if they fit into half of the free memory.

    The files are sent to the null device, so that the system reads them without copying them. With
    POSIX_FADV_WILLNEED, Linux reads no more than the first few MB of a file.

    Raises:
        OSError: one cannot be opened.
    """
    files = [*folder.glob("*.safetensors")]
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * sum([file.stat().st_size for file in files]) > free_bytes:
        return
    with Path(os.devnull).open("wb") as null:
        for file in files:
            with file.open("rb") as opened:
                place = 0
                while sent := os.sendfile(null.fileno(), opened.fileno(), place, _AT_ONCE):
                    place += sent


def open_gpu() -> None:
    """Make the first GPU's context, which PyTorch takes over. Up to a second.

    Raises:
        OSError: there is no driver, or no GPU.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(gpu), 0):
        raise OSError("there is no GPU")
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def compute_once() -> None:
    """Make PyTorch load its library of products, and kernels that most layers launch. A second.

    Raises:
        Exception: there is no GPU, or no memory on it.
    """
    torch = import_module("torch")
    functions = torch.nn.functional
    with torch.no_grad():
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(x, x)
        mean = x.float().pow(2).mean(-1, keepdim=True)
        normal = (x.float() * torch.rsqrt(mean + 1.0)).to(x.dtype)
        angles = torch.cat((mean, mean), dim=-1)
        turned = x[:, :2] * angles.cos().to(x.dtype) + torch.cat((-x[:, :1], x), dim=-1)[:, :2]
        functions.embedding(torch.arange(2, device=x.device), functions.silu(normal) * x)
        turned + angles.sin().to(x.dtype)
