"""Values of quantised caches in kernels: 8-bit floats (e4m3) to float16, and float32 to them.

Kernels see the caches of float8_e4m3fn as bytes. A byte's exponent and fraction are those of a
float16 that is 2^8 times smaller, so that widening is exact; NaN stays NaN. Narrowing has the
roundings of the contract: to the nearest, ties to even, sizes above 448 to 448, NaN to 0x7F. GPUs
from sm_89 on have an instruction for either (NATIVE); elsewhere it is done in integers, to the same
bits.
"""

import triton.language as tl
from torch import Tensor

from backends.triton_gpu.shared.place import device_function


def scale_step(scale: Tensor | None) -> int:
    """From a KV head's scale to the next one's: 0 where they share one, -1 where there is none."""
    return -1 if scale is None else int(scale.shape[0] > 1)


@device_function
def load_scale(scales: tl.tensor, kv_head: tl.tensor, STEP: tl.constexpr) -> tl.tensor:
    """A KV head's scale; 1 where there is none (see `scale_step`)."""
    if STEP >= 0:
        return tl.load(scales + kv_head * STEP)
    return 1.0


@device_function
def widen(stored: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """float16 values of bytes."""
    if NATIVE:
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        raw = stored.to(tl.uint16)
        bare = ((raw & 0x80) << 8) | ((raw & 0x7F) << 7)
        value = bare.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((raw & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value


@device_function
def narrow(value: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """The bytes of float32 values."""
    if NATIVE:
        stored = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        stored = _narrow_in_integers(value)
    return stored


@device_function
def _narrow_in_integers(value: tl.tensor) -> tl.tensor:
    raw = value.to(tl.uint32, bitcast=True)
    size = raw & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    size = tl.minimum(size, 0x43E00000)
    normal = ((size + ((size >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # below 2^-6 its steps are 2^-9, as a float32's are at 2^14: adding that rounds
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    signed = ((raw >> 24) & 0x80) | tl.where(size < 0x3C800000, tiny, normal)
    return tl.where(is_nan, 0x7F, signed).to(tl.uint8)
