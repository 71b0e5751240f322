"""What is done before the first request, so that none of them waits for it.

Decides: how a network runs. Kernels are compiled in any case. Then, unless it is to run as it is:

| | on a GPU | on a CPU |
|---|---|---|
| its operations without its modules (`begin.py`) | always | where asked for, and it is small |
| in compiled pieces (`piecewise.py`) | where asked for | never |
| steps as CUDA graphs (`cuda_graphs.py`), up to some thousand tokens | always | never |

A network that looks at values cannot be captured, and then nothing else is done, because a graph
would replay what it decided once.

Invariants: no block of the caches changes; what could not be done is told, and what is left runs.

Does not know: requests.
"""

from dataclasses import dataclass, replace

import torch

from model.control.config import EngineConfig
from model.device.begin import begin
from model.device.cuda_graphs import StepGraphs
from model.device.draw_graphs import DrawGraphs
from model.device.few_rows import FEW
from model.device.network import PagedNetwork
from model.device.profile import largest_step
from model.errors import InvalidArgumentError, UnsupportedModelError

_COMPILED_TOKENS = 512
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
    """Capture, compile and record what can be; a few seconds, a minute where all is compiled anew.

    Args:
        network: its caches are allocated.
        config: of the engine.
        drawn: where the tokens of the step before are.
        max_model_len: the most tokens of a request; None: as many as fit into the cache.

    Raises:
        InvalidArgumentError: there is no memory left for it.
    """
    prepared = Prepared(begin(network, config))
    network.begun = None  # once more would be from the beginning
    if prepared.how.startswith("eager") or network.device.type != "cuda":
        return prepared
    if config.compile:
        prepared = _compiled(network, config)
    if any(network.layout.chunks):  # a step has other tables then, of other lengths
        return replace(prepared, how=f"{prepared.how}, no graphs of attention in chunks")
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
    how = f"{prepared.how}, {num_graphs} graphs"
    return Prepared(how, graphs)


def recorded_tokens(num_parameters: int, num_layers: int, config: EngineConfig) -> int:
    """The most tokens of a step that is recorded: with more the host launches while the GPU works.

    O(1). Launching takes a time a layer, computing a time a weight and token.
    """
    launching = num_layers * _LAUNCH_S * _FLOPS / (2 * num_parameters)
    return min(config.max_num_batched_tokens, max(_LEAST_TOKENS, int(launching)), _MOST_TOKENS)


def compiled_tokens(max_num_batched_tokens: int) -> int:
    """Tokens of the step that pieces are compiled with; they serve any number then. O(1).

    Never as few as have pieces of their own: what all others run in would be compiled by a request.
    """
    return max(max(FEW) + 1, min(max_num_batched_tokens, _COMPILED_TOKENS))


def _compiled(network: PagedNetwork, config: EngineConfig) -> Prepared:
    """Compile a captured network, if that can be."""
    count = compiled_tokens(config.max_num_batched_tokens)
    rows = max(1, min(count - 1, config.max_num_seqs))
    num_groups = len(network.layout.windows)
    steps = [
        largest_step(tokens, its_rows, config.block_size, num_groups, network.device)
        for tokens, its_rows in ((count, rows), (max(FEW), min(rows, max(FEW) - 1)))
    ]
    try:
        network.compile(*steps)
    except UnsupportedModelError as error:
        return Prepared(f"captured ({error})")
    return Prepared("compiled")
