"""The logits of the attention kernels, scaled and capped, and the base of their exponentials.

    logit = scale * q.k, or with a soft cap: cap * tanh(scale * q.k / cap)

`tanh` is x times a quotient of two polynomials in x^2: a minimax fit of the relative error over [0,
LARGEST], 2e-7, and 5e-7 when it is computed in float32. It takes multiplications and one reciprocal
square root. Exponentials and reciprocals are what a GPU computes fewest of per clock, and the
softmax needs its own. The relative error is as small near 0, so a large cap changes nothing.

Exponentials are powers of two, which GPUs compute in one instruction: exp(x) = exp2(x * LOG2E).
"""

import triton.language as tl

from backends.triton_gpu.shared.place import device_function

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(8.3)  # tanh differs from 1 by 1e-7 from here on


@device_function
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent of float32, within 5e-7 of the value; of NaN it is NaN."""
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    y = x * x
    above = 0.12899062037467957 + y * (0.002922477200627327 + y * 1.112101563194301e-05)
    above = 0.9999998211860657 + y * above
    below = 0.02369868941605091 + y * (0.00023463954858016223 + y * 2.3612884092472086e-07)
    below = 1 + y * (0.4623223841190338 + y * below)
    root = tl.rsqrt(below)  # a division takes three times as long
    return above * x * (root * root)


@device_function
def base2_logits(
    products: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor, HAS_CAP: tl.constexpr
) -> tl.tensor:
    """Logits of q.k in base 2."""
    if HAS_CAP:
        return tanh(products * (scale / soft_cap)) * (soft_cap * LOG2E)
    return products * (scale * LOG2E)


@device_function
def split_logits(
    products: tl.tensor, scale: tl.tensor, soft_cap: tl.tensor,
    HAS_CAP: tl.constexpr, NEGATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(x, factor) with x * factor the logits in base 2, and factor above 0; NEGATIVE: the scale."""
    factor = tl.maximum(tl.abs(scale), 1e-30) * LOG2E  # above 0, because -inf * 0 is NaN
    if HAS_CAP:
        products = tanh(products * (scale / soft_cap))
        factor = soft_cap * LOG2E
    elif NEGATIVE:
        products = -products
    return products, factor
