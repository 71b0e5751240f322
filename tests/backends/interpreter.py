"""Triton's interpreter with products that are equal on every processor; imported where it runs.

Its products are NumPy's. BLAS has other code for each kind of processor, and with some of it a
row's result depends on the row's place in the tile. No GPU does that, and tests compare bits.

It also repeats four things at each operation or call of a function, which take most of its time.
None of them has an effect here:

- It computes whether an integer overflows, and drops the result unless it debugs.
- It replaces the functions of `triton.language` by its own, which a kernel's start has done for the
  functions that the kernel calls. What it looks through for them is the same each time, too.
- It makes a table of NumPy's types, to look one up.
- It makes the shape of a tensor, wrapped twice, and computes what types such shapes have.
"""

import functools
import inspect
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

_replace_all = interpreter._patch_lang
_numpy_type = functools.cache(interpreter._get_np_dtype)  # of a number's type
_POINTER = np.dtype(np.uint64)


@functools.cache
def _builtins(package):
    """Their names; first asked for before any is replaced."""
    return [name for name, each in inspect.getmembers(package) if tl.core.is_builtin(each)]


@functools.cache
def _languages(function):
    """The packages whose functions it may call."""
    return [package for package in (tl, tl.core) if package in function.__globals__.values()]


def _patch_builtin(package, builder, scope):
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


def _patch_lang(function):
    if any(tl.core.is_builtin(package.load) for package in _languages(function)):
        return _replace_all(function)
    return interpreter._LangPatchScope()


def _get_np_dtype(type_):
    scalar = type_.scalar
    return _POINTER if scalar.is_ptr() else _numpy_type(scalar)


@functools.cache
def _wrapped(sizes):
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _make_tensor(self, handle, type_):
    self.handle, self.type, self.dtype = handle, type_, type_.scalar
    self.shape, self.numel = _wrapped((*type_.shape.values,) if type_.is_block() else ())


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Add up the products of each element by itself, in the order of the inner dimension."""
    if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
        raise NotImplementedError("wanted matrices of at least 16 bits: NumPy has no FP8")
    rows, columns = (each.data.astype(d.data.dtype) for each in (a, b))
    total = d.data.copy()
    for k in range(rows.shape[-1]):
        total += rows[..., k, None] * columns[..., k, None, :]
    return interpreter.TensorHandle(total, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang = _patch_lang
interpreter._get_np_dtype = _get_np_dtype
tl.core.tensor.__init__ = _make_tensor
