"""What an attention call asks for beside queries, keys and values, as kernels take it."""

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """logit = scale * k_scale * q.k, capped; a window of keys; sinks; out = v_scale * sum p v."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None
    """[num_q_heads], any floating dtype."""
    e4m3: bool
    """The caches are quantised, and given as bytes."""
    k_scale: Tensor | None
    """float32 [1] or [num_kv_heads]."""
    v_scale: Tensor | None

    @property
    def k_step(self) -> int:
        """From a KV head's k_scale to the next one's: 0: they share one; -1: there is none."""
        return scale_step(self.k_scale)

    @property
    def v_step(self) -> int:
        """Likewise of v_scale."""
        return scale_step(self.v_scale)

    def k_scale_or(self, other: Tensor) -> Tensor:
        """k_scale, or where there is none a pointer that no kernel follows."""
        return other if self.k_scale is None else self.k_scale

    def v_scale_or(self, other: Tensor) -> Tensor:
        """Likewise v_scale."""
        return other if self.v_scale is None else self.v_scale


def scale_step(scale: Tensor | None) -> int:
    """From a KV head's scale to the next one's: 0 where they share one, -1 where there is none."""
    return -1 if scale is None else int(scale.shape[0] > 1)
