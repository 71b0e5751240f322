"""Launching a kernel cheaply: Triton chooses a compiled kernel once, later launches just use it.

Triton works out anew at every launch which compiled kernel the arguments need, from each argument
and from a text of all compile-time values, and asks the driver about every pointer: 30 us and more
a launch. Here a caller asks for a `Variant` by all that can differ (compile-time values, options,
dtypes of data, the GPU), keeps it with its own plan, and launches it with addresses; what is left
to look at is whether data starts on 16 bytes. Invariants that make it right: integers are never
specialised by value (those not declared as integers are refused), index tensors have the dtype of
the contract and are not specialised by alignment, and floats never are. Kernels see tensors of
float8_e4m3fn as bytes.

Hopper's copy engine reads a tensor in boxes of some size, which a `Box` describes. The descriptor
that the driver makes of it is kept by the tensor's address. Where Triton's launcher is one that
is known (`shorten`), the compiled function in it is called, without the Python around it.

In the interpreter nothing is compiled, but the same variants are counted, so that tests without a
GPU see which ones calls need. Triton's launch hooks (for profilers) see first launches only.
"""

import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental import gluon
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backends.triton_gpu.shared.place import Kernel, Place

Number = int | float
MOST_KEPT = 256
"""Addresses of one tensor that the copy engine's description is kept for."""
KNOWN = ("3.6", "3.7")
"""The minor versions of Triton whose launcher `shorten` knows. For another, kernels are launched
through Triton's own Python, which is right and takes longer; a test fails for it."""
_address = Tensor.data_ptr
_minor = ".".join(triton.__version__.split(".")[:2])


class Run(Protocol):
    """Triton's way to launch a compiled kernel, and what it was made from."""

    launch: Callable[..., object]
    launch_cooperative_grid: bool
    launch_pdl: bool
    global_scratch_size: int
    profile_scratch_size: int
    arg_annotations: object
    """Since Triton 3.7; likewise the next."""
    kernel_signature: object

    def __call__(self, *args: object) -> None:
        """Launch."""


class Compiled(Protocol):
    """A kernel in the GPU, as Triton's launch returns it; its `run` takes fewer detours."""

    run: Run
    function: int
    packed_metadata: object


class Boxes(NamedTuple):
    """A tensor as the copy engine reads it; kernels take it in place of Triton's descriptor."""

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: NVMMASharedLayout
    padding: str = "zero"
    round_f32_to_tf32: bool = False

    def described(self) -> TensorDescriptor:
        """Return the descriptor by which Triton chooses kernels."""
        sizes = (list(self.shape), list(self.strides), list(self.block_shape))
        return TensorDescriptor(self.base, *sizes, self.layout)


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """The description of a tensor that the copy engine needs, without its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the last dimension 1, of the others multiples of 16 bytes."""
    block_shape: tuple[int, ...]
    """Of one copy; what lies outside of `shape` is read as 0."""
    layout: NVMMASharedLayout
    """In shared memory."""
    kept: dict[int, list[object]] = field(default_factory=dict, repr=False)
    """The launch arguments that the driver has made, by address."""

    def of(self, tensor: Tensor) -> Boxes:
        """Return the tensor in such boxes."""
        return Boxes(tensor, self.shape, self.strides, self.block_shape, self.layout)

    def arguments(self, tensor: Tensor, kind: object) -> list[object]:
        """Return the arguments for the tensor, in a kernel that wants boxes of this kind."""
        address = tensor.data_ptr()
        found = self.kept.get(address)
        if found is None:
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            _have_context()
            found = self.kept[address] = make_tensordesc_arg(self.of(tensor), kind)
        return found


_threads = threading.local()


def _have_context() -> None:
    """Let this thread have a context: the driver describes no tensor to one that has none.

    A thread has one from its first call of CUDA's runtime on, which a launch may come before.
    """
    if getattr(_threads, "has_context", False) or not torch.cuda.is_available():
        return
    if not torch.cuda.is_current_stream_capturing():  # a capture comes after other calls
        torch.cuda.current_stream().synchronize()
    _threads.has_context = True


class Short(NamedTuple):
    """The compiled function that launches a kernel, and what it takes after grid and stream."""

    launch: Callable[..., object]
    head: tuple[object, ...]
    kinds: tuple[object, ...]
    """Of the boxes."""
    is_packed: bool
    """True if a kernel's own arguments are one tuple."""

    def run(
        self, grid: tuple[int, int, int], stream: object, arguments: tuple[object, ...]
    ) -> None:
        """Launch the kernel with its own arguments, the boxes' first."""
        own = (arguments,) if self.is_packed else arguments
        self.launch(*grid, stream, *self.head, *own)


def shorten(compiled: Compiled) -> Short | None:
    """Return the way past Triton's Python, or None if the launcher is not one that is known.

    `CudaLauncher` makes closures and asks for scratch memory at each launch, and has the driver
    describe each tensor of boxes anew. Since 3.7 one compiled function launches every kernel, and
    takes a description of the arguments.
    """
    run = compiled.run
    if _minor not in KNOWN or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, kinds = run.launch, ()
    if inspect.isfunction(launch):  # around the compiled one, for boxes
        inside = inspect.getclosurevars(launch).nonlocals
        launch, kinds = inside["launcher"], tuple(inside["tensordesc_meta"])
    start = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    hooks, scratch = (compiled.packed_metadata, None, None, None), (None, None)
    if _minor == "3.6":
        return Short(launch, (*start, *scratch, *hooks), kinds, is_packed=False)
    described = (run.arg_annotations, run.kernel_signature)
    return Short(launch, (*start, *hooks, *scratch, *described), kinds, is_packed=True)


class Variant:
    """A kernel for one set of compile-time values; compiled for each alignment that calls bring."""

    __slots__ = (
        "_compiled", "_constants", "_device", "_index", "_launcher", "_options", "_place",
        "_pointers", "_short",
    )  # fmt: skip

    def __init__(
        self,
        launcher: "Launcher",
        place: Place,
        device: torch.device,
        constants: tuple[Hashable, ...],
        options: dict[str, int | bool],
    ) -> None:
        self._launcher = launcher
        self._pointers = launcher.pointers
        self._place = place
        self._device = device
        self._index = device.index
        self._constants = constants
        self._options = options
        self._compiled: dict[tuple[bool, ...], Compiled] = {}
        self._short: Short | None = None

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        numbers: Sequence[Number],
        boxes: Sequence[Box | None] = (),
        boxed: Sequence[Tensor] = (),
    ) -> None:
        """Run the kernel on the current stream: `boxed`, `tensors`, `numbers`, in its own order.

        Compiles where data is aligned as never before (seconds), else takes a few us.

        Raises:
            TypeError: an integer is not declared as one.
        """
        addresses = [*map(_address, tensors)]
        loose = 0
        for index in self._pointers:
            loose |= addresses[index]
        short = self._short
        if short is None or loose & 15 or not self._place.is_current(self._index):
            self._launch(grid, tensors, addresses, numbers, boxes, boxed)
            return
        boxed_arguments: list[object] = []
        if boxes:
            kinds = iter(short.kinds)
            for box, tensor in zip(boxes, boxed, strict=True):
                boxed_arguments += (None,) if box is None else box.arguments(tensor, next(kinds))
        arguments = (*boxed_arguments, *addresses, *numbers, *self._constants)
        short.run(grid, self._place.stream(self._index), arguments)

    def _launch(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor],
        addresses: Sequence[int],
        numbers: Sequence[Number],
        boxes: Sequence[Box | None],
        boxed: Sequence[Tensor],
    ) -> None:
        """Likewise, whatever the alignment, and as Triton does it."""
        alignment: tuple[bool, ...] = ()  # all data on 16 bytes
        if any(addresses[index] & 15 for index in self._pointers):
            alignment = tuple(addresses[index] & 15 == 0 for index in self._pointers)
        pairs = zip(boxes, boxed, strict=True)
        seen = tuple(None if box is None else box.of(each) for box, each in pairs)
        if seen:
            _have_context()
        with self._place.guard(self._device):
            compiled = self._compiled.get(alignment)
            if compiled is None or not self._place.launches:
                self._first(grid, alignment, seen, tensors, numbers)
                return
            compiled.run(
                *grid, self._place.stream(self._index), compiled.function,
                compiled.packed_metadata, None, None, None,
                *seen, *addresses, *numbers, *self._constants,
            )  # fmt: skip

    def _first(
        self,
        grid: tuple[int, int, int],
        alignment: tuple[bool, ...],
        boxes: Sequence[Boxes | None],
        tensors: Sequence[Tensor],
        numbers: Sequence[Number],
    ) -> None:
        names = self._launcher.names[len(boxes) + len(tensors) :]
        for name, number in zip(names, numbers, strict=False):
            if isinstance(number, int) and name not in self._launcher.integers:
                raise TypeError(f"{name} is an integer, and the kernel would be compiled for it")
        if not self._place.interpreting:
            _name_kernels()
        launch = self._place.starter(self._launcher.kernel, grid)
        seen = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors)
        described = (each and each.described() for each in boxes)
        made = launch(*described, *seen, *numbers, *self._constants, **self._options)
        compiled = self._compiled[alignment] = cast("Compiled", made)
        if not alignment and self._place.launches:
            self._short = shorten(compiled)

    @property
    def alignments(self) -> frozenset[tuple[bool, ...]]:
        """The alignments compiled so far (in the interpreter: called)."""
        return frozenset(self._compiled)


class Launch(NamedTuple):
    """All of a launch except its tensors and the numbers that differ between calls."""

    variant: Variant
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    """The kernel's first numbers."""
    boxes: tuple[Box | None, ...] = ()

    def run(
        self, tensors: Sequence[Tensor], *numbers: Number, boxed: Sequence[Tensor] = ()
    ) -> None:
        """Run the kernel on the current stream."""
        self.variant.launch(self.grid, tensors, (*self.numbers, *numbers), self.boxes, boxed)


_launchers: dict[tuple[str, str], "Launcher"] = {}


def find_names() -> None:
    """Compute what the names of kernels on disk are made of. Half a second, once.

    Half of it is a digest of Triton's library, which leaves Python to other threads.
    """
    with suppress(Exception):  # another version: the first launch computes it
        import_module("triton.runtime.cache").triton_key()
    _name_kernels()


@lru_cache(maxsize=1)
def _name_kernels() -> None:
    """Give every kernel the name that it has on disk, always in one order. 0.1 s, once.

    Triton's name for a kernel depends on which of the functions that it calls have a
    name already: a process that met kernels in another order would compile them once more.
    """
    for _, each in sorted(_launchers.items()):
        _ = each.kernel.cache_key


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
        _launchers[kernel.__module__, kernel.__name__] = self

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
        boxes: the number of parameters that the copy engine reads.
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
