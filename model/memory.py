"""How many blocks to have, where nobody said.

Does not know: who uses them, how a tensor is laid out (`layout.py`).
"""

import torch

from model.layout import CacheLayout

_CPU_BUDGET_BYTES = 1 << 30
_GPU_SHARE = 0.8


def default_num_blocks(
    layout: CacheLayout, block_size: int, device: torch.device, max_useful: int | None
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
    affordable = max(2, budget_bytes // layout.kv_bytes(1, block_size))
    return affordable if max_useful is None else min(affordable, max_useful + 1)
