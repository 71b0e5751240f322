"""What a step takes beside the network and its caches, measured.

Decides: what the largest step is: every token of the budget in one prompt, and as many rows sampled
as requests may run, with the drafts that each may bring.

Invariants: nothing of the profile stays allocated; no cache has more than one block meanwhile.

Does not know: how many blocks there will be (`memory.py`).
"""

from collections.abc import Sequence

import torch

from model.attention.batch import prompt_step
from model.caches.memory import host_free_bytes
from model.control.config import EngineConfig
from model.control.params import SamplingParams
from model.errors import InvalidArgumentError
from model.forward.begin import begin
from model.forward.network import PagedNetwork
from model.sample.sampler import Draw, sample


def free_bytes(networks: Sequence[PagedNetwork], config: EngineConfig) -> int | None:
    """Memory that caches may take on the networks' device; None where nobody says.

    On a GPU: what is free once the largest step's tensors are counted, which costs that step and
    that the preparation of all networks begins; where the size is given anyhow, what is free now.

    Args:
        networks: those that each need caches; they have none.
        config: of the engine.

    Raises:
        InvalidArgumentError: not even the largest step fits.
    """
    device = networks[0].device
    if device.type != "cuda":
        return host_free_bytes()
    peak_bytes = 0
    if config.num_blocks is None and config.kv_memory_bytes is None:
        try:
            for each in networks:  # first all: kernels and compiled networks stay
                each.allocate(1, config.block_size)
                begin(each, config)
            peak_bytes = max([_peak_bytes(each, config) for each in networks])
        except torch.cuda.OutOfMemoryError as error:
            raise InvalidArgumentError(
                f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens does "
                f"not fit into the memory of {device}"
            ) from error
        finally:
            for each in networks:
                each.free()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, int(free) - peak_bytes)


def _peak_bytes(network: PagedNetwork, config: EngineConfig) -> int:
    """The most memory that a step allocates beside what is allocated already."""
    device = network.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    count, num_groups = config.max_num_batched_tokens, len(network.layout.windows)
    step = prompt_step(count, config.max_rows, config.block_size, num_groups, device)
    logits = network.logits(step)
    drawn = Draw(SamplingParams(temperature=1.0, top_p=0.5), stream=0, index=0)  # takes most
    sample(torch.zeros_like(logits), [drawn] * len(logits))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
