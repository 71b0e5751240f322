"""A model from a folder or an id: its network, its text codec, what it allows.

Decides: whether an architecture can run with a paged cache, as far as its configuration tells,
before any weight is read. The rest is told by the first pass (`attention.probe_layers`).

Invariants: what is refused is refused with the name of the architecture and the reason; nothing is
fetched for a path; no code that comes with a checkpoint is run.

Does not know: backends, caches, requests.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from model.errors import ModelNotFoundError, UnsupportedModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class TextCodec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with those that the model wants in front of it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of generated tokens; special tokens give none."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network with all that a request needs to know of it.

    Attributes:
        name: the path or id it was asked for by.
        network: a decoder of Transformers, in evaluation mode, on its device.
        codec: its tokenizer.
        eos_token_ids: tokens that end a text.
        max_positions: the most tokens that it has positions for; None: unknown.
        dense_implementation: the attention it came with, or an exact one where that leaves
            something out; what the paged one is compared with.
    """

    name: str
    network: PreTrainedModel
    codec: TextCodec
    eos_token_ids: frozenset[int]
    max_positions: int | None
    dense_implementation: str


class _HuggingFaceCodec:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_model(name: str, device: torch.device, dtype: torch.dtype | None = None) -> LoadedModel:
    """Load a causal language model. Reads every weight once.

    Args:
        name: a folder, or `owner/name` on the hub; the hub is asked only if no such folder exists.
        device: where the weights go.
        dtype: None: float32 on a CPU, bfloat16 on a GPU.

    Raises:
        ModelNotFoundError: there is nothing of that name, or it is no model.
        UnsupportedModelError: the architecture cannot run with a paged cache.
    """
    source = _resolve(name)
    config = load_config(name)
    check_architecture(config)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        network = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"model: {name!r} does not load: {_first_line(error)}") from error
    return wrap_network(name, nn.Module.to(network, device), _HuggingFaceCodec(tokenizer))


def wrap_network(name: str, network: PreTrainedModel, codec: TextCodec) -> LoadedModel:
    """Describe a network that is in memory already. O(1).

    Raises:
        UnsupportedModelError: the architecture cannot run with a paged cache.
    """
    check_architecture(network.config)
    text_config = network.config.get_text_config()
    eos = getattr(network.generation_config, "eos_token_id", None)
    if eos is None:
        eos = text_config.eos_token_id
    eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
    # Only the eager form has a soft cap in every version of Transformers.
    is_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    own = str(getattr(network.config, "_attn_implementation", "eager"))
    return LoadedModel(
        name=name,
        network=network.train(mode=False),
        codec=codec,
        eos_token_ids=eos_token_ids,
        max_positions=getattr(text_config, "max_position_embeddings", None),
        dense_implementation="eager" if is_capped else own,
    )


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


def _resolve(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # safetensors and tokenizers take nothing else
        raise ModelNotFoundError(
            f"model: wanted a path or id that UTF-8 can encode, got {name!r}"
        ) from error
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"model: {name!r} has no config.json: it is no model")
        return str(path)
    if path.exists():
        raise ModelNotFoundError(f"model: wanted a folder, {name!r} is a file")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"model: there is no folder {name!r}, and an id on the hub has the form owner/name"
        )
    return name


def load_config(name: str) -> PreTrainedConfig:
    """Load a model's configuration alone, from a folder or an id. Reads one small file.

    Raises:
        ModelNotFoundError: there is nothing of that name, or it is no model.
        UnsupportedModelError: Transformers does not know this kind of model.
    """
    source = _resolve(name)
    path = Path(source)
    if path.is_dir():
        try:
            json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            broken = path / "config.json"
            raise ModelNotFoundError(f"model: {broken} is not JSON: {error}") from error
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModelError(f"model: {source!r}: {_first_line(error)}") from error
    except OSError as error:
        raise ModelNotFoundError(
            f"model: there is no folder {source!r}, and the hub's model of that id is neither "
            f"cached here nor to be had: {_first_line(error)}"
        ) from error
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
