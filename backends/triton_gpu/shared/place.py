"""The place of kernel launches: a CUDA device, or Triton's interpreter on the CPU.

Decides the guard around a launch: on a GPU the tensors' device becomes the current one; the
interpreter keeps global state, so there launches take turns. Gives plans the properties of a GPU.
Keeps the plans of calls whose arguments have been checked: a plan depends on nothing but its key.
`jit` and `Kernel` give Triton's decorator a type.
"""

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
import triton
from torch import Tensor

HOPPER = 9
_E4M3 = (8, 9)
MOST_PLANS = 4096
"""Plans kept; then all are forgotten, and made anew as calls come."""


class Kernel(Protocol):
    """A kernel as `jit` returns it."""

    __name__: str
    cache_key: str
    """A digest of its source and of the functions it calls; computed at the first access."""
    warmup: Callable[..., object]
    """Compiles it for arguments, and launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The launcher for a grid."""
        ...


if TYPE_CHECKING:
    _F = TypeVar("_F")

    def jit(**options: object) -> Callable[[Callable[..., None]], Kernel]:
        """`triton.jit` with options."""

    def device_function(function: _F) -> _F:
        """`triton.jit` for functions that kernels call."""
else:
    jit = triton.jit
    device_function = triton.jit


class Gpu(NamedTuple):
    """The properties of a GPU that plans and compilers depend on."""

    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int
    """The shared memory that a program may have."""


SMALL = Gpu((0, 0), 4, 99 << 10)
"""The properties that plans see under the interpreter."""


class Place:
    """A device type and the guard that a launch needs there."""

    __slots__ = ("_alone", "_plans", "_turns", "device", "interpreting", "launches", "stream")

    def __init__(self, *, interpreting: bool) -> None:
        self.interpreting = interpreting
        self.device = torch.device("cpu" if interpreting else "cuda")
        """The current CUDA device, or the CPU under the interpreter."""
        self.launches = not interpreting
        """True if compiled kernels run here, rather than the interpreter."""
        self._turns = threading.Lock()
        self._alone = interpreting or torch.cuda.device_count() == 1
        self._plans: dict[Hashable, object] = {}
        self.stream = _stream
        """The handle of a device's current stream, by the device's index."""

    def plan(self, key: Hashable) -> object:
        """Return the plan that `keep` was given for this key, or None."""
        return self._plans.get(key)

    def keep(self, key: Hashable, plan: object) -> None:
        """Keep the plan of a call that has passed its checks."""
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan

    def gpu(self, device: torch.device) -> Gpu:
        """Return the properties of a device that plans see."""
        return SMALL if self.interpreting else _gpu(device)

    def num_multiprocessors(self, device: torch.device) -> int:
        """Return the number of multiprocessors of a GPU."""
        return self.gpu(device).num_multiprocessors

    def can_chain(self, device: torch.device) -> bool:
        """Return True if a kernel may start before the one it depends on has ended (PDL)."""
        return self.gpu(device).capability[0] >= HOPPER

    def is_hopper(self, device: torch.device) -> bool:
        """Return True if the device has the matrix instructions of compute capability 9."""
        return self.gpu(device).capability[0] == HOPPER

    def has_e4m3(self, device: torch.device) -> bool:
        """Return True if the device has an instruction that widens e4m3 (from sm_89 on)."""
        return self.gpu(device).capability >= _E4M3

    def shared_bytes(self, device: torch.device) -> int:
        """Return the shared memory that a program may have."""
        return self.gpu(device).shared_bytes

    def starter(self, kernel: Kernel, grid: tuple[int, int, int]) -> Callable[..., object]:
        """Return the call that compiles a kernel and launches it for the first time."""
        return kernel[grid]

    def is_current(self, index: int | None) -> bool:
        """Return True if launches on this GPU need no guard."""
        return self._alone or index == torch.cuda.current_device()

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        """Hold this around a launch on tensors of this device."""
        if self.interpreting:
            return self._turns
        if self._alone or device.index == torch.cuda.current_device():
            return _NO_GUARD
        return torch.cuda.device(device)


_NO_GUARD = nullcontext()


def _raw_stream(index: int | None) -> int:
    stream: int = triton.runtime.driver.active.get_current_stream(index)
    return stream


_torch = torch._C  # noqa: SLF001 - Triton itself asks it
_stream: Callable[[int | None], int] = getattr(_torch, "_cuda_getCurrentRawStream", _raw_stream)


def sign(tensor: Tensor | None) -> Hashable:
    """All of a tensor that argument checks and plans look at: everything but values and address."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__  # type: ignore[unreachable]  # a caller's mistake
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@lru_cache
def _gpu(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    shared_bytes = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return Gpu((found.major, found.minor), found.multi_processor_count, shared_bytes)


def ceil_div(count: int, size: int) -> int:
    """Tiles of `size` that cover `count`."""
    return -(-count // size)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
