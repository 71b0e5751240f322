"""Half precision and fast exponentials for kernels whose compiler has neither.

Numba knows no float16, bfloat16 or float8 on a CPU, so kernels see bits: float32 as itself,
bfloat16 as uint16, float16 as int16, float8_e4m3fn as uint8. `widen` and `narrow` convert, chosen
by the array's type; both vectorise. A tensor enters as its address, read in every call, and a
tag that says what lies there (`TAGS`, `WORD_TAGS`); `at` makes an array of the two. Nothing on the
way owns memory or outlives the call, and no Python object is made for it.

Invariant: what is compiled from this file is part of `SOURCE_DIGEST`, which every cached kernel
closes over, because numba's cache looks only at the kernel's own file.
"""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from backends.numba_cpu.cache_folder import compiled

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes())

FASTMATH = frozenset({"reassoc", "contract", "nsz", "arcp", "afn"})
"""Never nnan and ninf: masks are -inf, and NaN has to stay visible."""

LOG2E = 1.4426950408889634

Tag = np.float32 | np.uint8 | np.uint16 | np.int16 | np.int32 | np.int64
"""A number of the type of what lies at an address; its value says nothing."""

TAGS: dict[torch.dtype, Tag] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.float16: np.int16(0),
    torch.float8_e4m3fn: np.uint8(0),
}
"""For kernels that compute, by dtype."""

WORD_TAGS: dict[int, Tag] = {1: np.uint8(0), 2: np.uint16(0), 4: np.float32(0), 8: np.int64(0)}
"""For kernels that only move bits, by bytes an element."""

if TYPE_CHECKING:
    _F = TypeVar("_F", bound=Callable[..., object])
    _A = TypeVar("_A", bound=np.ndarray)

    def jit(**options: object) -> Callable[[_F], _F]:
        """`numba.njit` keeps a function's type."""

    def exact(**options: object) -> Callable[[_F], _F]:
        """`numba.njit` keeps a function's type."""

    def widen(bits: float) -> np.float32:
        """To float32."""

    def narrow(value: float, like: float) -> float:
        """From float32."""

    def float_of(bits: np.int32) -> np.float32:
        """From 32 bits."""

    def at(address: int, size: int, tag: Tag) -> np.ndarray:
        """The array of `size` elements of the tag's type at an address; unchecked."""

    def prefetch(array: _A, offset: int) -> None:
        """Start loading a cache line."""

    def span(array: _A, offset: int, size: int) -> _A:
        """A part of an array."""

else:

    def jit(*, cache: bool = False, **options: object):  # noqa: ANN201 - typed above
        """`numba.njit` with the flags that every kernel here has."""
        return exact(cache=cache, fastmath=set(FASTMATH), **options)

    def exact(*, cache: bool = False, **options: object):  # noqa: ANN201 - typed above
        """`numba.njit` for functions whose roundings are part of the contract: no fast math."""
        make = partial(njit, nogil=True, error_model="numpy", **options)
        return partial(compiled, make, cache=cache)

    @intrinsic
    def widen(_context: object, bits: types.Type):  # noqa: ANN201 - typed above
        """The float32 that a float32, bfloat16, float16 or e4m3 (uint8) stands for."""
        word, half = ir.IntType(32), ir.IntType(16)

        def generate(_c: object, builder: ir.IRBuilder, _s: object, args: list) -> object:
            if bits == types.float32:
                return args[0]
            if bits == types.uint16:
                shifted = builder.shl(builder.zext(args[0], word), word(16))
                return builder.bitcast(shifted, ir.FloatType())
            if bits == types.uint8:  # its exponent and fraction are float16's, 2^8 smaller
                raw = builder.zext(args[0], half)
                size = builder.and_(raw, half(0x7F))
                sign = builder.shl(builder.and_(raw, half(0x80)), half(8))
                bare = builder.or_(sign, builder.shl(size, half(7)))
                small = builder.fpext(builder.bitcast(bare, ir.HalfType()), ir.FloatType())
                value = builder.fmul(small, ir.Constant(ir.FloatType(), 256.0))
                nan = builder.bitcast(word(0x7FC00000), ir.FloatType())
                return builder.select(builder.icmp_unsigned("==", size, half(0x7F)), nan, value)
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

        return types.float32(bits), generate

    @intrinsic
    def narrow(_context: object, value: types.Type, like: types.Type):  # noqa: ANN201 - above
        """Round a float32 to the nearest of `like`'s format, ties to even; NaN stays NaN.

        To e4m3 (uint8), which has no infinity, sizes above 448 become 448.
        """
        word, half = ir.IntType(32), ir.IntType(16)

        def generate(_c: object, builder: ir.IRBuilder, _s: object, args: list) -> object:
            if like == types.float32:
                return args[0]
            if like == types.int16:
                return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), half)
            raw = builder.bitcast(args[0], word)
            if like == types.uint8:
                return _narrow_e4m3(builder, raw)
            odd = builder.and_(builder.lshr(raw, word(16)), word(1))
            rounded = builder.add(raw, builder.add(odd, word(0x7FFF)))
            top = builder.trunc(builder.lshr(rounded, word(16)), half)
            is_nan = builder.fcmp_unordered("uno", args[0], args[0])
            return builder.select(is_nan, half(0x7FC0), top)

        return like(value, like), generate

    def _narrow_e4m3(builder: ir.IRBuilder, raw: object) -> object:
        """Bits of a float32 to those of e4m3; the largest size is 448, NaN is 0x7F."""
        word, single = ir.IntType(32), ir.FloatType()
        size = builder.and_(raw, word(0x7FFFFFFF))
        is_nan = builder.icmp_unsigned(">", size, word(0x7F800000))
        size = builder.select(
            builder.icmp_unsigned("<", size, word(0x43E00000)), size, word(0x43E00000)
        )
        odd = builder.and_(builder.lshr(size, word(20)), word(1))
        rounded = builder.add(size, builder.add(odd, word(0x7FFFF)))
        normal = builder.sub(builder.lshr(rounded, word(20)), word(120 << 3))
        # below 2^-6 its steps are 2^-9, as a float32's are at 2^14: adding that rounds
        shifted = builder.fadd(builder.bitcast(size, single), ir.Constant(single, 16384.0))
        tiny = builder.sub(builder.bitcast(shifted, word), word(0x46800000))
        is_tiny = builder.icmp_unsigned("<", size, word(0x3C800000))
        sign = builder.and_(builder.lshr(raw, word(24)), word(0x80))
        signed = builder.or_(sign, builder.select(is_tiny, tiny, normal))
        return builder.trunc(builder.select(is_nan, word(0x7F), signed), ir.IntType(8))

    @intrinsic
    def float_of(_context: object, _bits: types.Type):  # noqa: ANN201 - typed above
        """The float32 with these 32 bits."""

        def generate(_c: object, builder: ir.IRBuilder, _s: object, args: list) -> object:
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.int32), generate

    @intrinsic
    def at(_context: object, _address: types.Type, _size: types.Type, tag: types.Type):  # noqa: ANN201
        """The array of `size` elements of the tag's type at an address; unchecked."""
        result = types.Array(tag, 1, "C")

        def generate(context: object, builder: ir.IRBuilder, _s: object, args: list) -> object:
            whole = context.make_array(result)(context, builder)
            item = context.get_data_type(tag)
            width = context.get_abi_sizeof(item)
            context.populate_array(
                whole,
                data=builder.inttoptr(args[0], item.as_pointer()),
                shape=[args[1]],
                strides=[ir.Constant(args[1].type, width)],
                itemsize=ir.Constant(args[1].type, width),
                meminfo=None,
            )
            return whole._getvalue()  # noqa: SLF001 - the way that numba gives

        return result(types.intp, types.intp, tag), generate

    @intrinsic
    def prefetch(_context: object, array: types.Array, _offset: types.Type):  # noqa: ANN201
        """Ask for the cache line of array[offset]; any offset is allowed, past the end too."""

        def generate(context: object, builder: ir.IRBuilder, sig: object, args: list) -> object:
            source = context.make_array(sig.args[0])(context, builder, args[0])
            byte = ir.IntType(8).as_pointer()
            word = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            hint = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
            line = builder.bitcast(builder.gep(source.data, [args[1]]), byte)
            builder.call(hint, [line, word(0), word(3), word(1)])
            return context.get_dummy_value()

        return types.none(array, types.intp), generate

    @intrinsic
    def span(_context: object, array: types.Array, _offset: types.Type, _size: types.Type):  # noqa: ANN201
        """array[offset : offset + size] of a flat array: unchecked, no reference counted."""

        def generate(context: object, builder: ir.IRBuilder, sig: object, args: list) -> object:
            source = context.make_array(sig.args[0])(context, builder, args[0])
            part = context.make_array(sig.return_type)(context, builder)
            context.populate_array(
                part,
                data=builder.gep(source.data, [args[1]]),
                shape=[args[2]],
                strides=[source.itemsize],
                itemsize=source.itemsize,
                meminfo=None,
            )
            return part._getvalue()  # noqa: SLF001 - the way that numba gives

        return array(array, types.intp, types.intp), generate


_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (
    np.float32(np.log(2.0) ** k / float(np.prod(range(1, k + 1)))) for k in range(1, 8)
)


@jit()
def exp2(x: np.float32) -> np.float32:
    """2 ** x for x <= 0, to 2 units in the last place; 0 below -126; NaN for NaN."""
    low = np.float32(-126.0)
    y = low if x < low else x  # noqa: FURB136 - max would drop NaN
    whole = np.int32(y - np.float32(0.5))
    f = y - np.float32(whole)
    p = _C7 * f + _C6
    p = p * f + _C5
    p = p * f + _C4
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + np.float32(1.0)
    p *= float_of((whole + np.int32(127)) << np.int32(23))
    return p if not x < low else np.float32(0.0)


@jit()
def tanh(x: np.float32) -> np.float32:
    """The hyperbolic tangent, to a few units in the last place everywhere."""
    size = abs(x)
    e = exp2(np.float32(-2.0 * LOG2E) * size)
    far = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    y = x * x
    near = np.float32(-1382.0 / 155925.0) * y + np.float32(62.0 / 2835.0)
    near = near * y + np.float32(-17.0 / 315.0)
    near = near * y + np.float32(2.0 / 15.0)
    near = near * y + np.float32(-1.0 / 3.0)
    near = x + x * y * near
    return near if size < np.float32(0.3) else (far if x > np.float32(0.0) else -far)
