"""A model from a folder or an id: its network, its text codec, what it allows.

Decides: where a model is, and in which order it is looked at: what cannot run with a paged cache
is refused (`architectures.py`) before any weight is read.

Invariants: nothing is fetched for a path; a hub that does not answer is asked once; no code that
comes with a checkpoint is run.

Does not know: backends, caches, requests.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from model.architectures import check_architecture, check_layers
from model.errors import ModelNotFoundError, UnsupportedModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_TIMEOUT_S = 5.0


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
    config = _load_config(source)
    check_architecture(config)
    check_layers(config)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        network = AutoModelForCausalLM.from_pretrained(
            source.name, config=config, dtype=dtype, local_files_only=source.is_local
        )
        tokenizer = AutoTokenizer.from_pretrained(source.name, local_files_only=source.is_local)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"model: {name!r} does not load: {_first_line(error)}") from error
    return wrap_network(name, nn.Module.to(network, device), _HuggingFaceCodec(tokenizer))


def wrap_network(name: str, network: PreTrainedModel, codec: TextCodec) -> LoadedModel:
    """Describe a network that is in memory already. O(1).

    Raises:
        UnsupportedModelError: the architecture cannot run with a paged cache.
    """
    check_architecture(network.config, type(network))
    text_config = network.config.get_text_config()
    eos = getattr(network.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
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


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a model is: a folder or an id; `is_local`: nothing may be asked of the hub."""

    name: str
    is_local: bool


def _resolve(name: str) -> _Source:
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
        return _Source(str(path), is_local=True)
    if path.exists():
        raise ModelNotFoundError(f"model: wanted a folder, {name!r} is a file")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"model: there is no folder {name!r}, and an id on the hub has the form owner/name"
        )
    reason = "" if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    if reason and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ModelNotFoundError(
            f"model: there is no folder {name!r}, the hub's model of that id is not cached here, "
            f"and {constants.ENDPOINT} cannot be reached: {reason}"
        )
    return _Source(name, is_local=bool(reason))


def _why_unreachable(endpoint: str) -> str:
    """Ask a hub once; why there is no answer, empty if there is one.

    Transformers would ask again and again, for half a minute.
    """
    try:
        request = Request(endpoint, method="HEAD")  # noqa: S310  # the user's own setting
        with urlopen(request, timeout=_HUB_TIMEOUT_S):  # noqa: S310
            return ""
    except HTTPError:
        return ""  # an answer, if not a friendly one
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def load_config(name: str) -> PreTrainedConfig:
    """Load a model's configuration alone, from a folder or an id. Reads one small file.

    Raises:
        ModelNotFoundError: there is nothing of that name, or it is no model.
        UnsupportedModelError: Transformers does not know this kind of model.
    """
    return _load_config(_resolve(name))


def _load_config(source: _Source) -> PreTrainedConfig:
    path = Path(source.name)
    if path.is_dir():
        try:
            json.loads((path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            broken = path / "config.json"
            raise ModelNotFoundError(f"model: {broken} is not JSON: {error}") from error
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.name, trust_remote_code=False, local_files_only=source.is_local
        )
    except ValueError as error:
        raise UnsupportedModelError(f"model: {source.name!r}: {_first_line(error)}") from error
    except OSError as error:
        raise ModelNotFoundError(
            f"model: there is no folder {source.name!r}, and the hub's model of that id is neither "
            f"cached here nor to be had: {_first_line(error)}"
        ) from error
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
