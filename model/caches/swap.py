"""Swapping: blocks of preempted requests move to host memory, if that is cheaper than recomputing.

Decides: when it is. To recompute a token costs two operations per weight; to store and load it
moves its keys and values twice. So swapping is cheaper where a network has more weights per byte of
a token's keys and values than the machine does operations in the time of moving two bytes:

    weights / token_bytes > rate of arithmetic / rate of copying

The right side, rounded, is `_WEIGHTS_PER_BYTE`: a GPU at 400 TFLOP/s, half of what an H200 reaches
in matrix products, behind a link of 50 GB/s (page-locked, an H200's moved 55 GB/s each way); a CPU
at 100 GFLOP/s that copies 10 GB/s. In a mixture of experts only the weights that a token uses
count. Layers with windows move only the blocks inside the window, which the rule ignores.

Invariants: transfers and copies run on the stream of the network, in order, so a later pass sees
their results; for a GPU the host memory is page-locked.

Does not know: which requests are preempted, what a block holds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import backends
import kvcore
from model.caches.kv_caches import KVCaches
from model.caches.layout import CacheLayout
from model.caches.memory import MemoryPlan, host_free_bytes
from model.control.config import EngineConfig
from model.control.step import Transfer
from model.errors import InvalidArgumentError

_WEIGHTS_PER_BYTE = {"cuda": 8000.0, "cpu": 10.0}

_DEFAULT_BYTES = 4 << 30
_DEFAULT_SHARE = 4  # at most 1 / 4 of the cache's bytes, and of the free host memory


class BlockMover:
    """Moves and copies blocks in the caches of one network, as the scheduler plans."""

    def __init__(self, backend: backends.Backend, caches: KVCaches) -> None:
        self._backend = backend
        self._storages = caches.storages

    def transfer(self, stores: Sequence[Transfer], loads: Sequence[Transfer]) -> None:
        """Store, then load. O(their blocks); on a GPU this returns before it is done."""
        for transfer in stores:
            blocks = self._ids(transfer.block_ids)
            transfer.copy.payload = [self._to_host(storage[blocks]) for storage in self._storages]
        for transfer in loads:
            blocks, stored = self._ids(transfer.block_ids), transfer.copy.payload
            if not isinstance(stored, list):
                raise InvalidArgumentError(f"loads: nothing was stored of {transfer.request!r}")
            place = 0
            for first, stop in transfer.ranges:
                into = blocks[place : place + stop - first]
                place += stop - first
                for storage, content in zip(self._storages, stored, strict=True):
                    part: Tensor = content[first:stop]
                    storage[into] = part.to(storage.device, non_blocking=True)

    def copy(self, orders: Sequence[kvcore.CopyOrder]) -> None:
        """Make the copies of forks. O(their blocks)."""
        if orders:
            pairs = [[order.src, order.dst] for order in orders]
            copies = torch.tensor(pairs, dtype=torch.int64).to(self._backend.device)
            self._backend.copy_blocks(self._storages, copies)

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self._backend.device)

    def _to_host(self, content: Tensor) -> Tensor:
        if content.device.type == "cpu":
            return content
        host = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
        return host.copy_(content, non_blocking=True)


def plan_host_blocks(
    config: EngineConfig, network: nn.Module, layout: CacheLayout, memory: MemoryPlan
) -> int:
    """Decide how many blocks of preempted requests host memory may hold. O(parameters).

    Raises:
        InvalidArgumentError: host memory was asked for, and there is too little.
    """
    asked = config.swap_memory_bytes
    if asked == 0:
        return 0
    free_bytes = host_free_bytes()
    block_bytes = layout.kv_bytes(1, config.block_size)
    if asked is not None:
        if free_bytes is not None and asked > free_bytes:
            raise InvalidArgumentError(
                f"swap_memory_bytes: wanted at most the {free_bytes} bytes that are free, "
                f"got {asked}"
            )
        return asked // block_bytes
    weights, device = _weights_a_token(network), next(network.parameters()).device.type
    if weights <= layout.token_bytes * _WEIGHTS_PER_BYTE.get(device, 0.0):
        return 0
    limits = [_DEFAULT_BYTES, memory.kv_bytes // _DEFAULT_SHARE]
    if free_bytes is not None:
        limits.append(free_bytes // _DEFAULT_SHARE)
    return min(limits) // block_bytes


def _weights_a_token(network: nn.Module) -> float:
    """The weights that a token is multiplied by, without the embeddings at both ends."""
    config = getattr(network, "config", None)
    text = config.get_text_config() if config is not None else None
    per_token = getattr(text, "num_experts_per_tok", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    share = per_token / experts if per_token and experts else 1.0
    ends = {
        id(parameter)
        for end in ("get_input_embeddings", "get_output_embeddings")
        if (module := getattr(network, end, lambda: None)()) is not None
        for parameter in module.parameters()
    }
    return sum(
        parameter.numel() * (share if ".experts." in name else 1.0)
        for name, parameter in network.named_parameters()
        if id(parameter) not in ends
    )
