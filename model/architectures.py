"""Which architectures can run with a paged cache.

Decides: from a configuration, and from a pass through the same network without weights (PyTorch's
meta device), whether a network may run, before any weight is read. The first real pass
(`probes.py`) has the last word.

Invariants: what is refused is refused with the name of the architecture and the reason.

Does not know: where a model comes from, backends, caches, requests.
"""

import copy

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from model.attention import IMPLEMENTATION
from model.errors import UnsupportedModelError
from model.probes import probe_layers

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


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
            f"{architecture}: wanted layers of full, sliding or chunked attention, "
            f"got {', '.join(sorted(other))}"
        )
    if getattr(text_config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(f"{architecture}: wanted causal attention, got bidirectional")
    if getattr(text_config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"{architecture}: wanted layers with keys and values of their own, "
            f"got {text_config.num_kv_shared_layers} that read those of others"
        )


def check_layers(config: PreTrainedConfig) -> None:
    """Refuse a network whose layers do not attend as a paged cache needs. One pass, no weights.

    The network is built on PyTorch's meta device, where tensors have shapes and no content. A few
    networks cannot run there; about them this says nothing.

    Raises:
        UnsupportedModelError: with the architecture's name and the reason.
    """
    meta = torch.device("meta")
    try:
        with meta:
            network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                copy.deepcopy(config), dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION
            )
        probe_layers(network.train(mode=False), meta)
    except (RuntimeError, NotImplementedError):  # the meta device's; ours are no RuntimeErrors
        return
