"""Which architectures can run with a paged cache.

Decides: from a configuration, and from a pass through the same network without weights (PyTorch's
meta device), whether a network may run, before any weight is read. The first real pass
(`attention.probe_layers`) has the last word.

Invariants: what is refused is refused with the name of the architecture and the reason.

Does not know: where a model comes from, backends, caches, requests.
"""

import copy

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from model.attention import IMPLEMENTATION, probe_layers
from model.errors import UnsupportedModelError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse what a paged cache of full or sliding attention cannot serve. O(num_layers).

    Raises:
        UnsupportedModelError: with the architecture's name and the reason.
    """
    architecture = (config.architectures or [type(config).__name__])[0]
    text_config = config.get_text_config()
    network_type = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_other = architecture not in (type(config).__name__, getattr(network_type, "__name__", ""))
    if network_type is None or config.is_encoder_decoder or is_other:
        raise UnsupportedModelError(f"{architecture}: wanted a decoder-only language model")
    if not getattr(network_type, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{architecture}: its Transformers class does not take attention backends"
        )
    other = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise UnsupportedModelError(
            f"{architecture}: wanted layers of full or sliding attention, "
            f"got {', '.join(sorted(other))}"
        )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{architecture}: wanted causal attention, got bidirectional")
    if getattr(text_config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"{architecture}: wanted layers with keys and values of their own, "
            f"got {text_config.num_kv_shared_layers} that read those of others"
        )


def network_without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The network of a configuration on PyTorch's meta device: tensors of shapes and no content.

    Raises:
        Exception: of any kind: what Transformers makes of values that describe no network.
    """
    with torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION
        )
    network.train(mode=False)
    return network


def check_layers(network: PreTrainedModel) -> None:
    """Refuse a network whose layers do not attend as a paged cache needs. One pass, no weights.

    A few networks cannot run without weights; about them this says nothing.

    Args:
        network: of `network_without_weights`.

    Raises:
        UnsupportedModelError: with the architecture's name and the reason.
    """
    try:
        probe_layers(network, torch.device("meta"))
    except (RuntimeError, NotImplementedError):  # the meta device's; ours are no RuntimeErrors
        return
