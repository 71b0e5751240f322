"""A dense product whose sums stay in registers: four rows by 64 or 16 columns at a time.

    c[r, j] += sum over k of a[r, k] * b[k, j]

Written as vector instructions, because a compiler that vectorises such loops keeps the sums in
memory or adds them across a vector. 64 columns are four registers of AVX-512, and with four rows
16 sums, half of its registers; where registers are fewer, 16 columns are taken at a time. Each sum
runs over k in order, in float32, so that it does not depend on the shape. Compiled code from here
is part of `SOURCE_DIGEST`, see `bits`.
"""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.numba_cpu import bits
from backends.numba_cpu.bits import jit, span

SOURCE_DIGEST = zlib.crc32(Path(__file__).read_bytes(), bits.SOURCE_DIGEST)

LANES = 16
"""Columns that a product is cut into; `c` and `b` have a multiple of them."""

ROWS_AT_ONCE = 4
"""Rows that a product is cut into; `a` and `c` have a multiple of them."""

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

_WIDE = 4 * LANES if dict(get_host_cpu_features()).get("avx512f") else LANES

if TYPE_CHECKING:

    def _product_of(num_vectors: int) -> Callable[..., None]:
        """The product of four rows with a multiple of LANES columns."""

else:

    def _product_of(num_vectors: int):  # noqa: ANN202 - typed above
        @intrinsic
        def multiply(  # noqa: ANN202
            _context: object, c: types.Type, a: types.Type, b: types.Type, sizes: types.Type
        ):
            return types.none(c, a, b, sizes), partial(_emit, num_vectors=num_vectors)

        return multiply

    def _emit(
        context: object, builder: ir.IRBuilder, sig: object, args: list, num_vectors: int
    ) -> object:
        """The loop over the terms, around sums that the compiler puts into registers."""
        c_stride, a_stride, b_stride, num_terms = cgutils.unpack_tuple(builder, args[3])
        c, a, b = (
            context.make_array(sig.args[i])(context, builder, args[i]).data for i in range(3)
        )
        vector, word = ir.VectorType(ir.FloatType(), LANES), num_terms.type
        undefined = ir.Constant(vector, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)

        def place(array: object, row: object, stride: object, column: object) -> object:
            return builder.gep(array, [builder.add(builder.mul(row, stride), column)])

        def vectors(array: object, row: object, stride: object) -> list:
            starts = [place(array, row, stride, word(LANES * j)) for j in range(num_vectors)]
            return [builder.bitcast(start, vector.as_pointer()) for start in starts]

        results = [vectors(c, word(r), c_stride) for r in range(ROWS_AT_ONCE)]
        sums = [
            [cgutils.alloca_once_value(builder, builder.load(result, align=4)) for result in row]
            for row in results
        ]
        with cgutils.for_range(builder, num_terms) as loop:
            factors = [builder.load(each, align=4) for each in vectors(b, loop.index, b_stride)]
            for r, row in enumerate(sums):
                scalar = builder.load(place(a, word(r), a_stride, loop.index))
                first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
                everywhere = builder.shuffle_vector(first, undefined, lanes)
                for so_far, factor in zip(row, factors, strict=True):
                    term = builder.fmul(everywhere, factor, flags=("contract",))
                    total = builder.fadd(builder.load(so_far), term, flags=("contract",))
                    builder.store(total, so_far)
        for row, row_sums in zip(results, sums, strict=True):
            for result, total in zip(row, row_sums, strict=True):
                builder.store(builder.load(total), result, align=4)
        return context.get_dummy_value()


_multiply_wide = _product_of(_WIDE // LANES)
_multiply_narrow = _product_of(1)


@jit()
def multiply_rows(
    c: Floats,  # flat, ROWS_AT_ONCE rows, written
    c_stride: int,
    a: Floats,  # flat, ROWS_AT_ONCE rows
    a_stride: int,
    b: Floats,  # flat, num_terms rows
    b_stride: int,
    num_terms: int,
    num_columns: int,
) -> None:
    """c[r, j] += sum of a[r, k] * b[k, j], of four rows and `num_columns`, rounded up to LANES."""
    sizes = (c_stride, a_stride, b_stride, num_terms)
    j = 0
    while j + _WIDE <= num_columns:
        _multiply_wide(span(c, j, 1), a, span(b, j, 1), sizes)
        j += _WIDE
    while j < num_columns:
        _multiply_narrow(span(c, j, 1), a, span(b, j, 1), sizes)
        j += LANES
