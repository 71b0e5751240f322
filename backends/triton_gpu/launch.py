"""Launching a kernel cheaply: Triton chooses a compiled kernel once, later launches just use it.

Triton works out anew at every launch which compiled kernel the arguments need, from each argument
and from a text of all compile-time values, and asks the driver about every pointer: 30 us and more
a launch. Here a caller asks for a `Variant` by all that can differ (compile-time values, options,
dtypes of data, the GPU), keeps it with its own plan, and launches it with addresses; what is left
to look at is whether data starts on 16 bytes. Invariants that make it right: integers are never
specialised by value (those not declared as integers are refused), index tensors have the dtype of
the contract and are not specialised by alignment, and floats never are. Kernels see tensors of
float8_e4m3fn as bytes.

What Hopper's copy engine reads is given as `Boxes`: a tensor, seen in some shape, in boxes of some
size. Triton's own record of that checks itself at length; it is made for first launches alone.

In the interpreter nothing is compiled, but the same variants are counted, so that tests without a
GPU see which ones calls need. Triton's launch hooks (for profilers) see first launches only.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backends.triton_gpu.place import Kernel, Place

Number = int | float


class Compiled(Protocol):
    """What Triton's launch returns: a kernel in the GPU, whose `run` takes no detours."""

    run: Callable[..., object]
    function: int
    packed_metadata: object


class Boxes(NamedTuple):
    """A tensor as the copy engine reads it; what kernels are launched with in Triton's place."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the last dimension 1, of the others multiples of 16 bytes."""
    block_shape: tuple[int, ...]
    """Of one copy; what lies outside of `shape` is read as 0."""
    layout: NVMMASharedLayout
    """In shared memory."""
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def described(self) -> TensorDescriptor:
        """As Triton chooses kernels by."""
        sizes = (list(self.shape), list(self.strides), list(self.block_shape))
        return TensorDescriptor(self.base, *sizes, self.layout)


class Variant:
    """A kernel for one set of compile-time values; compiled for each alignment that calls bring."""

    __slots__ = ("_compiled", "_constants", "_device", "_launcher", "_options", "_place")

    def __init__(
        self,
        launcher: "Launcher",
        place: Place,
        device: torch.device,
        constants: tuple[Hashable, ...],
        options: dict[str, int | bool],
    ) -> None:
        self._launcher = launcher
        self._place = place
        self._device = device
        self._constants = constants
        self._options = options
        self._compiled: dict[tuple[bool, ...], Compiled] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[Number],
        boxes: tuple[Boxes | None, ...] = (),
    ) -> None:
        """Run the kernel on the current stream: `boxes`, `tensors`, `numbers`, in its own order.

        Compiles where data is aligned as never before (seconds), else takes a few us.

        Raises:
            TypeError: an integer is not declared as one.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        loose = 0
        for index in self._launcher.pointers:
            loose |= addresses[index]
        alignment: tuple[bool, ...] = ()  # all data on 16 bytes
        if loose & 15:
            alignment = tuple(addresses[index] & 15 == 0 for index in self._launcher.pointers)
        with self._place.guard(self._device):
            compiled = self._compiled.get(alignment)
            if compiled is None or self._place.interpreting:
                self._first(grid, alignment, boxes, tensors, numbers)
                return
            stream = self._place.stream(self._device)
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None,
                *boxes, *addresses, *numbers, *self._constants,
            )  # fmt: skip

    def _first(
        self,
        grid: tuple[int, int, int],
        alignment: tuple[bool, ...],
        boxes: tuple[Boxes | None, ...],
        tensors: Sequence[Tensor],
        numbers: Sequence[Number],
    ) -> None:
        names = self._launcher.names[len(boxes) + len(tensors) :]
        for name, number in zip(names, numbers, strict=False):
            if isinstance(number, int) and name not in self._launcher.integers:
                raise TypeError(f"{name} is an integer, and the kernel would be compiled for it")
        launch = self._launcher.kernel[grid]
        seen = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors)
        described = (each and each.described() for each in boxes)
        compiled = launch(*described, *seen, *numbers, *self._constants, **self._options)
        self._compiled[alignment] = cast("Compiled", compiled)

    @property
    def alignments(self) -> frozenset[tuple[bool, ...]]:
        """What has been compiled (in the interpreter: called)."""
        return frozenset(self._compiled)


class Launcher:
    """One kernel and its variants in this process."""

    __slots__ = ("_variants", "indices", "integers", "kernel", "names", "pointers")

    def __init__(
        self,
        kernel: Kernel,
        names: Sequence[str],
        integers: Sequence[str],
        indices: Sequence[str],
        pointers: Sequence[str],
        boxes: int = 0,
    ) -> None:
        self.kernel = kernel
        self.names = tuple(names)
        self.integers = frozenset(integers)
        self.indices = frozenset(indices)
        self.pointers = tuple(self.names.index(name) - boxes for name in pointers)
        """Among the tensors."""
        self._variants: dict[Hashable, Variant] = {}

    def variant(
        self,
        place: Place,
        device: torch.device,
        dtypes: tuple[torch.dtype | None, ...],
        constants: tuple[Hashable, ...],
        **options: int | bool,
    ) -> Variant:
        """The variant for data of these dtypes and these compile-time values; compiles nothing."""
        key = (id(place), device, dtypes, constants, *options.values())
        found = self._variants.get(key)
        if found is None:
            fresh = Variant(self, place, device, constants, options)
            found = self._variants.setdefault(key, fresh)
        return found

    def compiled(self) -> frozenset[Hashable]:
        """Everything that has been compiled (in the interpreter: called) so far."""
        return frozenset(
            (key, alignment)
            for key, variant in self._variants.items()
            for alignment in variant.alignments
        )


def launcher(
    *,
    integers: Sequence[str] = (),
    indices: Sequence[str] = (),
    pointers: Sequence[str] = (),
    boxes: int = 0,
    in_gluon: bool = False,
) -> Callable[[Callable[..., None]], Launcher]:
    """Make a `Launcher` of a kernel's source, whose boxes come first, then pointers, then numbers.

    Args:
        integers: parameters that are integers; compiled once for all their values.
        indices: pointers to indices, of one dtype, at any alignment.
        pointers: pointers to data; compiled for each dtype, and anew where not on 16 bytes.
        boxes: how many parameters are read by the copy engine.
        in_gluon: the source is Gluon's.
    """

    def decorate(function: Callable[..., None]) -> Launcher:
        options = {
            "do_not_specialize": list(integers),
            "do_not_specialize_on_alignment": list(indices),
        }
        kernel: Kernel = (gluon if in_gluon else triton).jit(**options)(function)
        names = tuple(inspect.signature(function).parameters)
        return Launcher(kernel, names, integers, indices, pointers, boxes)

    return decorate
