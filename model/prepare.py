"""What is done before the first request, so that none of them waits for it.

Decides: how a network runs. Kernels are compiled in any case. Then, unless it is to run as it is:

| | on a GPU | on a CPU |
|---|---|---|
| its operations without its modules (`capture.py`) | always | where it is small |
| in compiled pieces (`segments.py`) | where that was asked for | never |
| decode steps as CUDA graphs (`graphs.py`) | always | never |

A network that looks at values cannot be captured, and then nothing else is done, because a graph
would replay what it decided once.

Invariants: no block of the caches changes; what could not be done is told, and what is left runs.

Does not know: requests.
"""

from dataclasses import dataclass

import torch

from model.config import EngineConfig
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.graphs import DecodeGraphs
from model.network import PagedNetwork
from model.profile import largest_step

_SMALL_PARAMETERS = 32_000_000
_COMPILED_TOKENS = 512


def is_small(num_parameters: int) -> bool:
    """Whether a CPU takes longer for Python's way through a network than for its arithmetic."""
    return num_parameters <= _SMALL_PARAMETERS


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a network runs from now on.

    Attributes:
        how: in words.
        graphs: of decode steps, to be replayed; None: there are none.
    """

    how: str
    graphs: DecodeGraphs | None = None


def prepare_network(
    network: PagedNetwork, config: EngineConfig, drawn: torch.Tensor, max_model_len: int | None
) -> Prepared:
    """Capture, compile and record what can be; a few seconds, a minute where all is compiled anew.

    Args:
        network: its caches are allocated.
        config: of the engine.
        drawn: where the tokens of the step before are.
        max_model_len: the most tokens of a request; None: as many as fit into the cache.

    Raises:
        InvalidArgumentError: there is no memory left for it.
    """
    network.warm_up(config.max_num_seqs, config.max_num_batched_tokens)
    is_on_gpu = network.device.type == "cuda"
    if config.eager or not (is_on_gpu or is_small(network.num_parameters)):
        return Prepared("eager")
    try:
        network.capture()
    except UnsupportedModelError as error:
        return Prepared(f"eager ({error})")
    how, num_groups = "captured", len(network.layout.windows)
    if not is_on_gpu:
        return Prepared(how)
    if config.compile:
        count = min(config.max_num_batched_tokens, _COMPILED_TOKENS)
        rows = max(1, min(count - 1, config.max_num_seqs))
        step = largest_step(count, rows, config.block_size, num_groups, network.device)
        try:
            network.compile(step)
            how = "compiled"
        except UnsupportedModelError as error:
            how = f"captured ({error})"
    num_slots = (network.num_blocks - 1) * config.block_size
    longest = min(max_model_len or num_slots, num_slots)
    graphs = DecodeGraphs(
        network,
        drawn,
        [-(-longest // config.block_size)] * num_groups,
        config.block_size,
        config.max_num_seqs,
    )
    try:
        num_graphs = graphs.record()
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidArgumentError(
            "kv_memory_fraction: the cache leaves no memory for the graphs of decode steps: give "
            "it less, or run the network as it is"
        ) from error
    return Prepared(f"{how}, {num_graphs} graphs", graphs)
