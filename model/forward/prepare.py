"""What is done before the first request, so that none of them waits for it.

Decides: which steps are recorded. What comes before that, and how a network runs, is `begin.py`'s,
and may have been done already.

Invariants: no block of the caches changes; what could not be done is told, and what is left runs.

Does not know: requests.
"""

from dataclasses import dataclass

import torch

from model.control.config import EngineConfig
from model.errors import InvalidArgumentError
from model.forward.begin import begin
from model.forward.cuda_graphs import StepGraphs
from model.forward.network import PagedNetwork
from model.sample.draw_graphs import DrawGraphs

_LAUNCH_S = 5e-4  # what a host takes for the launches of a layer
_FLOPS = 6e14  # of a GPU, in products
_LEAST_TOKENS = 256
_MOST_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Prepared:
    """How a network runs from now on.

    Attributes:
        how: in words.
        graphs: of steps, to be replayed; None: there are none.
    """

    how: str
    graphs: StepGraphs | None = None


def prepare_network(
    network: PagedNetwork, config: EngineConfig, drawn: torch.Tensor, max_model_len: int | None
) -> Prepared:
    """Capture, compile and record what can be; seconds, half a minute where all is compiled anew.

    Args:
        network: its caches are allocated.
        config: of the engine.
        drawn: where the tokens of the step before are.
        max_model_len: the most tokens of a request; None: as many as fit into the cache.

    Raises:
        InvalidArgumentError: there is no memory left for it.
    """
    how = begin(network, config)
    network.begun = None  # once more would be from the beginning
    if how.startswith("eager") or network.device.type != "cuda":
        return Prepared(how)
    if any(network.layout.chunks):  # a step has other tables then, of other lengths
        return Prepared(f"{how}, no graphs of attention in chunks")
    num_slots = (network.num_blocks - 1) * config.block_size
    longest = min(max_model_len or num_slots, num_slots)
    graphs = StepGraphs(
        network,
        drawn,
        [-(-longest // config.block_size)] * len(network.layout.windows),
        config.block_size,
        config.max_num_seqs,
        recorded_tokens(network.num_parameters, len(network.layout.layers), config),
        DrawGraphs(max(2, config.max_num_seqs, config.max_rows), network.device),
        config.max_rows,
    )
    try:
        num_graphs = graphs.record()
    except torch.cuda.OutOfMemoryError as error:
        raise InvalidArgumentError(
            "kv_memory_fraction: the cache leaves no memory for the graphs of steps: give "
            "it less, or run the network as it is"
        ) from error
    return Prepared(f"{how}, {num_graphs} graphs", graphs)


def recorded_tokens(num_parameters: int, num_layers: int, config: EngineConfig) -> int:
    """The most tokens of a step that is recorded: with more the host launches while the GPU works.

    O(1). Launching takes a time a layer, computing a time a weight and token.
    """
    launching = num_layers * _LAUNCH_S * _FLOPS / (2 * num_parameters)
    return min(config.max_num_batched_tokens, max(_LEAST_TOKENS, int(launching)), _MOST_TOKENS)
