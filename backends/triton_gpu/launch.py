"""Launching a kernel cheaply: Triton chooses a compiled variant once, later launches look it up.

Triton works out anew at every launch which variant the arguments need, from each argument and from
a text of all compile-time values: 20 us and more. Here the key is what may really differ: the
compile-time values, the options, the GPU, and of each data pointer its dtype and whether it starts
on 16 bytes. Invariants that make it right: integers are never specialised by value (those that
are not named as integers are refused), index tensors have the dtype of the contract and are not
specialised by alignment, and floats never are.

In the interpreter nothing is compiled, but the same keys are kept, so that tests without a GPU see
which variants a call needs.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import cast

import triton
from torch import Tensor

from backends.triton_gpu.place import Kernel, Place


class Launcher:
    """One kernel and the variants of it that have been compiled in this process."""

    __slots__ = ("_pointers", "_variants", "indices", "integers", "kernel", "names")

    def __init__(
        self,
        kernel: Kernel,
        names: Sequence[str],
        integers: Sequence[str],
        indices: Sequence[str],
        pointers: Sequence[str],
    ) -> None:
        self.kernel = kernel
        self.names = tuple(names)
        self.integers = frozenset(integers)
        self.indices = frozenset(indices)
        self._pointers = tuple(self.names.index(name) for name in pointers)
        self._variants: dict[Hashable, Kernel] = {}

    @property
    def variants(self) -> frozenset[Hashable]:
        """Keys of the variants that calls have needed so far."""
        return frozenset(self._variants)

    def launch(
        self,
        place: Place,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | int | float, ...],
        constants: tuple[Hashable, ...],
        **options: int | bool,
    ) -> None:
        """Run the kernel: `arguments`, then the compile-time `constants`, in its own order.

        Compiles where this variant is new in this process (seconds), else takes a few us.

        Raises:
            TypeError: an integer argument is not one that the kernel takes unspecialised.
        """
        first = arguments[0]
        if not isinstance(first, Tensor):
            raise TypeError(f"{self.names[0]} is no tensor")
        device = first.device
        pointers = [arguments[i] for i in self._pointers]
        kinds = [(p.dtype, p.data_ptr() & 15) for p in pointers if isinstance(p, Tensor)]
        key = (constants, *kinds, device.index, *options.values())
        with place.guard(device):
            kernel = self._variants.get(key)
            if kernel is None:
                self._check(arguments)
                compiled = self.kernel[grid](*arguments, *constants, **options)
                self._variants[key] = (
                    self.kernel if place.interpreting else cast("Kernel", compiled)
                )
            elif place.interpreting:
                kernel[grid](*arguments, *constants, **options)
            else:
                x, y, z = (*grid, 1, 1)[:3]
                kernel[x, y, z](*arguments, *constants)

    def _check(self, arguments: tuple[Tensor | int | float, ...]) -> None:
        for name, argument in zip(self.names, arguments, strict=False):
            if isinstance(argument, int) and name not in self.integers:
                raise TypeError(f"{name} is an integer, and the kernel would be compiled for it")


def launcher(
    *, integers: Sequence[str] = (), indices: Sequence[str] = (), pointers: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Launcher]:
    """Make a `Launcher` of a kernel's source.

    Args:
        integers: parameters that are integers; compiled once for all their values.
        indices: pointers to indices, of one dtype, at any alignment.
        pointers: pointers to data; a variant for each dtype, and for those not on 16 bytes.
    """

    def decorate(function: Callable[..., None]) -> Launcher:
        kernel: Kernel = triton.jit(
            do_not_specialize=list(integers), do_not_specialize_on_alignment=list(indices)
        )(function)
        names = tuple(inspect.signature(function).parameters)
        return Launcher(kernel, names, integers, indices, pointers)

    return decorate
