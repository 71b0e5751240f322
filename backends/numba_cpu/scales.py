"""The scales of a quantised cache as the kernels take them: one float32 a KV head.

Invariant: a cache that is not quantised has scales of 1, by which multiplying changes no bit.
"""

import numpy as np
from torch import Tensor

from backends.errors import InvalidArgumentError

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def per_head(name: str, scale: Tensor | None, num_kv_heads: int) -> Floats:
    """float32 [num_kv_heads] from None, [1] or [num_kv_heads].

    Raises:
        InvalidArgumentError: a scale is not finite or not above 0.
    """
    if scale is None:
        return np.ones(num_kv_heads, np.float32)
    scales = np.array(np.broadcast_to(scale.detach().numpy(), num_kv_heads), np.float32)
    for head, value in enumerate(scales):
        if not (np.isfinite(value) and value > 0):
            raise InvalidArgumentError(f"{name}[{head}]", "finite and above 0", str(value))
    return scales
