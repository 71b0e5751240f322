"""The KV tensors of a model, one pair a layer, and what they weigh.

Decides: the shape of each layer's cache, and how many blocks to have where nobody said.

Invariants: every layer's cache has the same number of blocks of the same size, so one block table
serves them all; block 0 is the null block and is never written.

Does not know: which block belongs to whom (`kvcore`), or how a kernel reads it (`backends`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import InvalidArgumentError

_CPU_BUDGET_BYTES = 1 << 30
_GPU_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token: `num_kv_heads` keys and values of `head_dim`."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value. O(1)."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCaches:
    """A pair `k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]` a layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def allocate(
        cls,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> "KVCaches":
        """Allocate zeroed caches. Costs num_blocks * block_size * token_bytes of every layer.

        Raises:
            InvalidArgumentError: the device has not that much memory.
        """
        try:
            layers = tuple(_pair(shape, num_blocks, block_size, device) for shape in shapes)
        except (RuntimeError, MemoryError) as error:
            wanted_bytes = token_bytes(shapes) * num_blocks * block_size
            raise InvalidArgumentError(
                f"num_blocks: {num_blocks} blocks take {wanted_bytes:,} bytes, "
                f"which could not be allocated on {device}"
            ) from error
        return cls(layers)


def token_bytes(shapes: Iterable[LayerShape]) -> int:
    """Bytes that one token takes in all layers together. O(num_layers)."""
    return sum(shape.token_bytes for shape in shapes)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take. O(1)."""
    return -(-num_tokens // block_size)


def default_num_blocks(
    shapes: Sequence[LayerShape], block_size: int, device: torch.device, max_useful: int | None
) -> int:
    """Blocks to allocate where nobody said, the null block included. O(num_layers).

    As many as fit into 1 GiB on a CPU or 80 % of the free memory of a GPU, and no more than
    `max_useful` plus the null block where that is known.
    """
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        budget_bytes = int(free_bytes * _GPU_SHARE)
    else:
        budget_bytes = _CPU_BUDGET_BYTES
    affordable = max(2, budget_bytes // (token_bytes(shapes) * block_size))
    return affordable if max_useful is None else min(affordable, max_useful + 1)


def _pair(
    shape: LayerShape, num_blocks: int, block_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
    k_cache = torch.zeros(size, dtype=shape.dtype, device=device)
    v_cache = torch.zeros(size, dtype=shape.dtype, device=device)
    return k_cache, v_cache
