"""The architectures that can run with a paged cache.

Layers have to attend to all tokens, a window or a chunk, or to keep a state in the cache that
Transformers passes on (`recurrence.py`).

Decides: from a configuration, and from a pass through the network without weights (on PyTorch's
meta device), whether a network may run, before any weight is read. The probes of the real network
(`probes.py`) decide in the end.

Invariants: an error is one line with the name of the architecture, the layers that are unsupported,
and what they are.

Does not know: where a model comes from, backends, caches, requests.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from model.attention.attention import IMPLEMENTATION
from model.attention.own_code import OWN_CODE, follow_own_code
from model.errors import UnsupportedModelError
from model.load.probes import probe_layers
from model.load.recurrence import find_states

Once = Callable[[PreTrainedModel, Callable[[], None]], None]
"""Runs a check of a network, unless an equal network has passed it."""

_SERVED = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
_SERVED |= {"compressed_sparse_attention", "heavily_compressed_attention"}
_STATE = "a recurrent state outside Transformers' cache"
_KINDS = (  # a part of the name of a layer's type or class, and what it is
    *((part, _STATE) for part in ("mamba", "mixer", "rwkv", "lstm", "recurrent", "delta")),
    *((part, _STATE) for part in ("linear_attention", "linearattention", "lightning")),
    ("conv", "a convolution whose last inputs are outside Transformers' cache"),
    ("hybrid", "attention beside a state"),
    ("index", "an index over groups of tokens, whose keys are not paged"),
    ("sparse_attention", "sparse attention over what is not paged"),
    ("sparseattention", "sparse attention over what is not paged"),
    ("hashing", "attention over buckets of hashes"),
)


def auto_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return Transformers' auto class that makes the network of a configuration. O(1).

    A class that reads images beside text counts as a decoder of text: where there are both, the
    configuration's `architectures` decides, and else the one for text alone is taken.
    """
    named = (config.architectures or [""])[0]
    pairs = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    )
    found = [(_mapped(mapping, config), auto) for mapping, auto in pairs]
    known = [(name, auto) for name, auto in found if name is not None]
    return next(
        (auto for kind, auto in known if kind.__name__ == named),
        known[0][1] if known else AutoModelForCausalLM,
    )


def _mapped(mapping: Mapping[Any, Any], config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    found = mapping.get(type(config), None)
    kind: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return kind


def _network_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that `auto_class` makes; None: Transformers has none."""
    return _mapped(auto_class(config)._model_mapping, config)  # noqa: SLF001


def check_architecture(
    config: PreTrainedConfig, network_type: type[PreTrainedModel] | None = None
) -> None:
    """Refuse what a paged cache of keys, values and states cannot serve. O(num_layers).

    A network with unsupported layers is built without weights, to describe them.

    Args:
        config: of the network, or of its text part.
        network_type: its class; None: Transformers' class for the configuration.

    Raises:
        UnsupportedModelError: with the architecture's name and the reason.
    """
    if network_type is None:
        network_type = _network_class(config)
    own_name = getattr(network_type, "__name__", type(config).__name__)
    architecture = (config.architectures or [own_name])[0]
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{architecture}: wanted a decoder-only language model, it is an encoder and a decoder"
        )
    if network_type is None or architecture not in (type(config).__name__, own_name):
        known = "" if network_type is None else f"; of model_type {config.model_type}: {own_name}"
        raise UnsupportedModelError(f"{architecture}: wanted a decoder-only language model{known}")
    try:
        text_config = config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(
            f"{architecture}: wanted a decoder-only language model, it has several text models"
        ) from error
    kinds: Sequence[str] = getattr(text_config, "layer_types", None) or ()
    takes_backends = getattr(network_type, "_supports_attention_backend", False)
    takes_backends |= config.model_type in OWN_CODE
    served = takes_backends and _SERVED.issuperset(kinds)
    if not served and not _has_states(config):
        raise UnsupportedModelError(f"{architecture}: {_layers(config, own_name, kinds)}")
    _check_attention(architecture, text_config)


def _has_states(config: PreTrainedConfig) -> bool:
    """Return True if a network has recurrent states that a cache here can hold.

    One pass, no weights.
    """
    try:
        network = _network_without_weights(config)
    except Exception:  # noqa: BLE001  # a class of Transformers may raise any error
        return False
    return bool(find_states(network, torch.device("meta")))


def _check_attention(architecture: str, config: PreTrainedConfig) -> None:
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # "vision": of images
        raise UnsupportedModelError(f"{architecture}: wanted causal attention, got bidirectional")
    readers: int = getattr(config, "num_kv_shared_layers", None) or 0
    if readers and not 0 < readers < config.num_hidden_layers:
        raise UnsupportedModelError(
            f"{architecture}: num_kv_shared_layers: wanted fewer than all "
            f"{config.num_hidden_layers} layers, got {readers}: a network whose layers all read "
            f"the keys and values of another network (an assistant model) cannot run alone"
        )
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    if unread := sorted(set(types) - set(types[: len(types) - readers])):
        raise UnsupportedModelError(
            f"{architecture}: layer_types: wanted a layer of each type before the last {readers} "
            f"(num_kv_shared_layers), which read its keys and values, got none of {unread[0]}"
        )
    crossing: Sequence[int] = getattr(config, "cross_attention_layers", None) or ()
    if crossing:
        raise UnsupportedModelError(
            f"{architecture}: wanted layers that attend to the text, "
            f"{_numbers(crossing)} attend to images"
        )


def _layers(config: PreTrainedConfig, own_name: str, kinds: Sequence[str]) -> str:
    """Describe the unsupported layers of a network."""
    names: dict[str, list[int]] = {}
    failure = ""
    try:
        for path, module in _network_without_weights(config, None).named_modules():
            place = re.search(r"\.(\d+)\.", f".{path}.")
            if place is not None:
                names.setdefault(type(module).__name__, []).append(int(place[1]))
    except Exception as error:  # noqa: BLE001  # a class of Transformers may raise any error
        failure = f" (nor builds: {_line(error)})"
    types: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        types.setdefault(kind, []).append(number)
    # The prefix that all classes of an architecture share says least.
    prefix = re.sub(r"(For\w+|LMHeadModel|ModelWithLMHead)$", "", own_name)
    for found in (
        [(name, places) for name, places in names.items() if _kind(name.removeprefix(prefix))],
        [(kind, places) for kind, places in types.items() if kind not in _SERVED],
        [(name, places) for name, places in names.items() if _kind(name)],
    ):
        if found:
            return (
                f"wanted layers of full, sliding or chunked attention, or with states in "
                f"Transformers' cache, {_listed(found)}{failure}"
            )
    attending = [
        (name, places) for name, places in names.items() if re.search(r"Att(ention|n)$", name)
    ]
    if not attending:
        return f"its Transformers class takes no attention backend{failure}"
    whose = "; ".join(f"{_numbers(places)}: {name}" for name, places in attending)
    own = f"code of their own{_own_code(config)}"
    return f"its layers attend by {own}, which takes no attention backend ({whose})"


def _own_code(config: PreTrainedConfig) -> str:
    """Return the words to add to "code of their own" if its file names rotary embeddings, or ""."""
    network_type = _network_class(config)
    module = None if network_type is None else sys.modules.get(network_type.__module__)
    is_rotary = module is not None and "rotary" in " ".join(vars(module)).lower()
    return " with rotations of their own" if is_rotary else ""


def _kind(name: str) -> str:
    if name.startswith(("Conv", "LSTM")):  # a part of PyTorch's
        return ""
    return next((what for part, what in _KINDS if part in name.lower()), "")


def _listed(found: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Return names with layers, similar ones once: `layers 0-3 are MambaMixer (a state space)`."""
    by_kind: dict[str, tuple[str, set[int]]] = {}
    for name, places in found:
        first, known = by_kind.setdefault(_kind(name), (name, set()))
        by_kind[_kind(name)] = first, known | set(places)
    return "; ".join(
        f"{_numbers(sorted(places))} {'is' if len(places) == 1 else 'are'} {name}"
        + (f" ({what})" if what else "")
        for what, (name, places) in by_kind.items()
    )


def _numbers(places: Sequence[int]) -> str:
    """Return layers by number: `layer 3`, `layers 0-4`, `layers 0, 2, 4 and 12 more`."""
    numbers = sorted(set(places))
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]}-{numbers[-1]}"
    shown = ", ".join(map(str, numbers[:4]))
    return f"layers {shown}" + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _network_without_weights(
    config: PreTrainedConfig, attention: str | None = IMPLEMENTATION
) -> PreTrainedModel:
    """Return a configuration's network on PyTorch's meta device: tensors without content.

    Args:
        config: of the network.
        attention: the implementation that its layers call; None: Transformers' choice.
    """
    with torch.device("meta"):
        network: PreTrainedModel = auto_class(config).from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=torch.bfloat16
        )
    if attention is not None:  # not before: some classes choose their modules by it
        follow_own_code(network)
        network.set_attn_implementation(attention)
    network.train(mode=False)
    return network


def always(_: PreTrainedModel, check: Callable[[], None]) -> None:
    """Run a check."""
    check()


def check_layers(config: PreTrainedConfig, once: Once = always) -> PreTrainedModel:
    """Refuse a network whose layers do not attend as a paged cache needs. One pass, no weights.

    The few networks that cannot run without weights pass.

    Args:
        config: of the network.
        once: runs the pass, unless an equal network has passed before.

    Returns:
        The network on PyTorch's meta device: tensors with shapes and no content.

    Raises:
        UnsupportedModelError: with the architecture's name and the reason; its cause is set if a
            class of Transformers failed itself.
    """
    try:
        network = _network_without_weights(config)
    except Exception as error:
        raise _own_failure(config, error) from error
    once(network, partial(_probe_without_weights, network))
    return network


def _probe_without_weights(network: PreTrainedModel) -> None:
    try:
        states = find_states(network, torch.device("meta"))
        probe_layers(network, torch.device("meta"), keeps_states=bool(states))
    except (RuntimeError, NotImplementedError):  # of the meta device; ours are no RuntimeErrors
        pass
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _own_failure(network.config, error) from error


def _own_failure(config: PreTrainedConfig, error: Exception) -> UnsupportedModelError:
    """Return the error for a configuration that a class of Transformers cannot run."""
    name = (config.architectures or [type(config).__name__])[0]
    return UnsupportedModelError(
        f"{name}: Transformers' own class fails on this configuration: {_line(error)}"
    )


def _line(error: Exception) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
