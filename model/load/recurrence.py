"""The modules of a network that keep states: the probe of `kvcore.adapters.recurrent`, for us.

Decides: that a network attends with our attention while it is probed, and afterwards; that no
module calls kernels of other packages without a GPU.

Does not know: how states are found, requests.
"""

import torch
from transformers import PreTrainedModel

import backends
from kvcore.adapters import recurrent
from kvcore.adapters.recurrent import BackendOperations, use_pytorch
from model.attention.attention import IMPLEMENTATION, follow_layers
from model.attention.compressed import follow_compressors
from model.attention.indexer import follow_indexers
from model.attention.own_code import follow_own_code
from model.errors import UnsupportedModelError


def find_states(network: PreTrainedModel, device: torch.device) -> tuple[recurrent.StateShape, ...]:
    """Return the shapes of a network's states; empty: it has none. One pass of one token.

    Args:
        network: has our attention afterwards; modules with states are wrapped for its whole life.
        device: of the network; the meta device works for a network without weights.

    Raises:
        UnsupportedModelError: a state is unsupported, as `recurrent.find_states` says.
    """
    _attend(network, device)
    return recurrent.find_states(network, device, UnsupportedModelError).shapes


def probe_recurrence(network: PreTrainedModel, backend: backends.Backend) -> recurrent.Recurrence:
    """Return how a network's states are computed, as `recurrent.probe_recurrence`. A few passes.

    Args:
        network: see `find_states`; it has weights.
        backend: steps the states if it gives the network's results.

    Raises:
        UnsupportedModelError: as for `find_states`.
    """
    _attend(network, backend.device)
    operations = BackendOperations.of(backend)
    return recurrent.probe_recurrence(network, backend.device, UnsupportedModelError, operations)


def _attend(network: PreTrainedModel, device: torch.device) -> None:
    follow_own_code(network)
    network.set_attn_implementation(IMPLEMENTATION)
    follow_layers(network)
    follow_indexers(network)
    follow_compressors(network)
    if device.type != "cuda":
        for module in network.modules():
            use_pytorch(module)
