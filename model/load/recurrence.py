"""Which modules of a network keep states: the probe of `kvcore.adapters.recurrent`, in our passes.

Decides: that a network attends with our attention while it is probed, and afterwards.

Does not know: how states are found, requests.
"""

import torch
from transformers import PreTrainedModel

from kvcore.adapters import recurrent
from model.attention.attention import IMPLEMENTATION, follow_layers
from model.errors import UnsupportedModelError


def find_states(network: PreTrainedModel, device: torch.device) -> tuple[recurrent.StateShape, ...]:
    """As `recurrent.find_states`; empty: there are none. One pass of one token.

    Args:
        network: has our attention afterwards; modules with states are wrapped for its whole life.
        device: of the network; the meta device works for a network without weights.

    Raises:
        UnsupportedModelError: as there.
    """
    _attend(network)
    return recurrent.find_states(network, device, UnsupportedModelError).shapes


def probe_recurrence(network: PreTrainedModel, device: torch.device) -> recurrent.Recurrence:
    """As `recurrent.probe_recurrence`. A few passes.

    Args:
        network: see `find_states`.
        device: of the network, which has weights.

    Raises:
        UnsupportedModelError: as there.
    """
    _attend(network)
    return recurrent.probe_recurrence(network, device, UnsupportedModelError)


def _attend(network: PreTrainedModel) -> None:
    network.set_attn_implementation(IMPLEMENTATION)
    follow_layers(network)
