"""Multi-head latent attention (MLA): the cache keeps latents, not keys and values of every head.

Such a layer (DeepSeek-V2, arXiv:2405.04434) computes keys and values of all heads from one vector
per token with a matrix. The matrix can be absorbed: queries are multiplied by its key part and
results by its value part, and the cache holds only the vector. In Transformers such modules
decompress in a separate method, `expand_kv`, which is replaced here.

Decides: which layers are absorbed: those whose `expand_kv` gives, on random numbers, what the two
products give, and whose latents the backend supports. The others stay as they are.

Invariants: results are the same except for rounding; under any other attention, and after `absorb`
with nothing to absorb, a layer has Transformers' own `expand_kv`.

Does not know: caches, batches, which backend runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

OURS = "kvcore_"
"""The prefix of the names of our attention implementations."""
_TOLERANCE = 0.02
"""The relative error allowed by the check: a wrong formula is off by about 1."""


@dataclass(frozen=True, slots=True)
class _Absorbed:
    """Replaces `expand_kv` of a layer: passes latents on to our attention."""

    module: nn.Module
    projection: nn.Linear
    """latent -> [num_heads * (key_dim + value_dim)]; read in every pass, because it may move."""
    key_dim: int
    """Size of the part of a key that is not rotated."""
    value_dim: int

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, heads, num_tokens, ...]: of one head, or the layer's."""
        module: Any = self.module
        if module.config._attn_implementation.startswith(OURS):  # noqa: SLF001
            return torch.cat([latent, rotated], -1), latent
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotated)
        return expanded

    def queries(self, query: Tensor) -> Tensor:
        """Return queries for latents: [num_tokens, num_heads, latent_dim + rotated_dim]."""
        plain, rotated = torch.tensor_split(query, [self.key_dim], 2)
        keys = self._matrix()[:, : self.key_dim]
        return torch.cat([(plain.transpose(0, 1) @ keys).transpose(0, 1), rotated], 2)

    def values(self, out: Tensor) -> Tensor:
        """Return the layer's results from those of latents: [num_tokens, num_heads, value_dim]."""
        values = self._matrix()[:, self.key_dim :]
        return (out.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)

    def _matrix(self) -> Tensor:
        weight = self.projection.weight
        return weight.view(-1, self.key_dim + self.value_dim, weight.shape[1])


def absorb(network: nn.Module, max_latent_dim: int) -> int:
    """Absorb the layers of a network whose latents fit; return their number. A product each.

    Args:
        network: is changed; the changes of an earlier call are undone first.
        max_latent_dim: the largest latent; 0: absorb no layer.
    """
    found = 0
    every: Iterator[Any] = network.modules()
    for module in every:
        if absorbed(module) is not None:
            del module.expand_kv
        record = _record(module, max_latent_dim)
        if record is not None:
            module.expand_kv = record
            found += 1
    return found


def absorbed(module: nn.Module) -> _Absorbed | None:
    """Return the replacement of a layer's `expand_kv`; None: it has keys and values."""
    record = module.__dict__.get("expand_kv")
    return record if isinstance(record, _Absorbed) else None


def _record(module: Any, max_latent_dim: int) -> _Absorbed | None:  # noqa: ANN401
    projection: Any = getattr(module, "kv_b_proj", None)
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes: list[int] = [getattr(module, name, 0) for name in names]
    is_linear = type(projection) is nn.Linear and getattr(projection, "bias", None) is None
    if not hasattr(module, "expand_kv") or not is_linear or 0 in sizes:
        return None
    latent_dim, rotated_dim, key_dim, value_dim = sizes
    weight = projection.weight
    plain = not weight.is_meta and weight.shape[1] == latent_dim
    if not plain or latent_dim + rotated_dim > max_latent_dim:
        return None
    record = _Absorbed(module, projection, key_dim, value_dim)
    return record if _is_what_it_does(record, latent_dim, rotated_dim) else None


def _is_what_it_does(record: _Absorbed, latent_dim: int, rotated_dim: int) -> bool:
    """Compare logits and values of random numbers, decompressed and absorbed."""
    module: Any = record.module
    weight = record.projection.weight
    num_heads = weight.shape[0] // (record.key_dim + record.value_dim)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    latent, rotated = (draw(1, 1, 5, size).to(weight) for size in (latent_dim, rotated_dim))
    query = draw(5, num_heads, record.key_dim + rotated_dim).to(weight)
    row = torch.cat([latent, rotated], -1)[0, 0]
    try:
        with torch.no_grad():
            keys, values = module.expand_kv(latent, rotated)
            pairs = (
                (
                    torch.einsum("thd,hnd->htn", query, keys[0]),
                    torch.einsum("thd,nd->htn", record.queries(query), row),
                ),
                (
                    values[0].transpose(0, 1),
                    record.values(latent[0, 0][:, None].expand(-1, num_heads, -1)),
                ),
            )
    except (RuntimeError, TypeError, ValueError):  # another kind of layer
        return False
    return all(
        one.shape == other.shape
        and float((one - other).float().norm()) <= _TOLERANCE * float(one.float().norm())
        for one, other in pairs
    )
