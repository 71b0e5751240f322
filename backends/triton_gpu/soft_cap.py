"""What the attention kernels share: how a logit is capped, and the base of their exponentials.

    cap_logits(x) = cap * tanh(x / cap)

Exponentials are powers of two, which GPUs compute in one instruction: exp(x) = exp2(x * LOG2E).
"""

import triton.language as tl

from backends.triton_gpu.place import device_function

LOG2E = tl.constexpr(1.4426950408889634)


@device_function
def cap_logits(logits: tl.tensor, soft_cap: tl.tensor) -> tl.tensor:
    """Give cap * tanh(logits / cap): a series near 0; elsewhere a form that cannot overflow."""
    x = logits / soft_cap
    y = x * x
    near = x + x * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return soft_cap * tl.where(tl.abs(x) < 0.25, near, tl.where(x > 0, far, -far))
