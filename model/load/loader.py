"""Loads a model from a folder or a hub id: its network, its tokenizer, its limits.

Decides: where a model is found, and the order of checks: what cannot run with a paged cache
is refused (`architectures.py`) before any weight is read, and so are files that are broken or do
not belong together (`checkpoint.py`).

Invariants: what loads is exactly what the files say; whatever Transformers raises while it reads
files is an error about those files, in one line; nothing is downloaded for a path; a hub that does
not answer is tried once; no code from a checkpoint is run.

Does not know: backends, caches, requests.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)
from transformers import __version__ as transformers_version
from transformers.utils.hub import has_file

from model.control.params import SamplingParams
from model.errors import (
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    shown,
)
from model.host import uncollected
from model.load.architectures import (
    Once,
    always,
    auto_class,
    check_architecture,
    check_layers,
)
from model.load.checkpoint import (
    StoredTensor,
    check_files,
    check_loaded,
    check_pulled,
    check_stored,
    check_token_ids,
    read_object,
    reason,
)
from model.load.codec import NO_PANIC, HuggingFaceCodec, TextCodec
from model.load.images import (
    ImageCodec,
    NoImages,
    load_images,
)
from model.load.quantised import (
    UNUSED_SCALES,
    Format,
    add_modelopt,
    check_scales,
    choose_dequantised,
    find_format,
    finish,
    freeing_at_once,
    reading_scales,
)
from model.load.text import TextStream
from model.ranks.parallel import Cut, Sums, check_cut, shard_network
from model.ranks.ranks import Ranks

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_TIMEOUT_S = 5.0
_SAMPLE_TEXT = "a text"
_TOKENIZER = "tokenizer.json"
_LAYERS = re.compile(r"(^|_)layers?$")  # num_hidden_layers, n_layer
_MAX_LAYERS = 10_000
_MAX_POSITIONS = 2**31 - 1  # a batch numbers them in int32
_NAMED_SHAPES = 3
_UNBLAMED = {"model_type", "architectures", "transformers_version"}
_LoadingInfo = Mapping[str, Collection[object]]
_BLAME_S = 5.0  # the most time to spend on finding the wrong field


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network with all that a request needs to know about it.

    Attributes:
        name: the given path or id.
        network: a decoder of Transformers, in evaluation mode, on its device.
        codec: its tokenizer.
        eos_token_ids: tokens that end a text.
        max_positions: the most tokens of a text; None: unknown.
        dense_implementation: its original attention, or an exact one if that is not; the reference
            for the paged one.
        ranks: the processes that share the network; None: it is whole.
        draft: a smaller model of the same vocabulary for speculative decoding.
        images: makes tokens and tensors of prompts with images.
        cuts: how the ranks split each linear layer, by its path; the others are whole.
    """

    name: str
    network: PreTrainedModel
    codec: TextCodec
    eos_token_ids: frozenset[int]
    max_positions: int | None
    dense_implementation: str
    ranks: Ranks | None = None
    draft: "LoadedModel | None" = None
    images: ImageCodec | NoImages = NoImages("this model reads text alone")  # noqa: RUF009
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def open_text(self, params: SamplingParams) -> TextStream:
        """Start a text that this model writes. O(1)."""
        codec = self.codec
        if params.skip_special_tokens:
            return TextStream(codec.decode, params.stop, codec.open_step())
        decode = partial(codec.decode, skip_special_tokens=False)
        return TextStream(decode, params.stop, codec.open_step(skip_special_tokens=False))


def load_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    once: Once = always,
) -> LoadedModel:
    """Load a causal language model. Reads every weight once.

    Args:
        name: a folder, or `owner/name` on the hub; the hub is used if there is no such folder.
        device: of the weights.
        dtype: None: float32 on a CPU, bfloat16 on a GPU.
        ranks: the processes that share it, each of which calls this; they read it one after
            another, so that host memory holds only one whole copy.
        once: see `check_layers`.

    Raises:
        ModelNotFoundError: there is no such model, or it is broken.
        UnsupportedModelError: the architecture cannot run with a paged cache, or cannot be split
            over that many ranks.
    """
    source = _resolve(name)
    config = _load_config(source)
    check_architecture(config)
    found = find_format(f"model: {name!r}", config, is_gguf=source.gguf is not None)
    if found is not None and device.type in found.stays and ranks is not None:
        raise UnsupportedModelError(
            f"tp: wanted weights that can be cut for ranks, those of {name!r} stay in {found.name}"
        )
    stored, shapes = _check_network(source, config, found, once)
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cuts: Mapping[str, Cut] = {}
    if ranks is None:
        network = _load_network(source, config, dtype, device, stored, shapes, found)
    else:
        sums = Sums(device, ranks)  # all ranks at once, so before they take turns
        ranks.wait_turn()
        network = _load_network(source, config, dtype, device, stored, shapes, found)
        cuts = shard_network(network, ranks, sums)
    nn.Module.to(network, device)
    if ranks is not None:
        ranks.end_turn()
        check_cut(network, ranks)
    codec = _load_codec(source, config)
    images: ImageCodec | NoImages = NoImages(f"{name!r} is one file of text alone")
    if source.gguf is None:  # each rank has the whole vision tower
        images = load_images(source.name, source.options, network, codec)
    return replace(wrap_network(name, network, codec, ranks, images), cuts=cuts)


def with_draft(model: LoadedModel, draft: LoadedModel) -> LoadedModel:
    """Return a model with a draft model for speculative decoding. O(vocabulary).

    Raises:
        UnsupportedModelError: the vocabularies differ.
    """
    sizes = [one.network.config.get_text_config().vocab_size for one in (model, draft)]
    if sizes[0] != sizes[1]:
        raise UnsupportedModelError(
            f"draft_model: wanted the vocabulary of {model.name!r}, {sizes[0]:,} tokens, "
            f"{draft.name!r} has {sizes[1]:,}"
        )
    spelled, other = (_vocabulary(one.codec) for one in (model, draft))
    for token in sorted(spelled.keys() & other.keys()):
        if spelled[token] != other[token]:
            raise UnsupportedModelError(
                f"draft_model: wanted the vocabulary of {model.name!r}, where token {token} is "
                f"{shown(spelled[token])}: {draft.name!r} has {shown(other[token])} there"
            )
    return replace(model, draft=draft)


def _vocabulary(codec: TextCodec) -> Mapping[int, str]:
    """Return the spelling of each token; empty if the tokenizer has none."""
    described = codec.describe()
    if described is None:
        return {}
    return {token: word for word, token in Tokenizer.from_str(described).get_vocab().items()}


def load_codec(name: str) -> HuggingFaceCodec:
    """Return the tokenizer of a model alone. Reads a few files.

    Args:
        name: see `load_model`.

    Raises:
        ModelNotFoundError: there is no such model, or its tokenizer does not load.
    """
    source = _resolve(name)
    return _load_codec(source, _load_config(source))


def wrap_network(
    name: str,
    network: PreTrainedModel,
    codec: TextCodec,
    ranks: Ranks | None = None,
    images: ImageCodec | NoImages | None = None,
) -> LoadedModel:
    """Describe a network that is already in memory. O(1).

    Raises:
        UnsupportedModelError: the architecture cannot run with a paged cache.
    """
    check_architecture(network.config, type(network))
    text_config = network.config.get_text_config()
    eos = getattr(network.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    eos_token_ids = check_token_ids("eos_token_id", eos)
    # Only the eager form has a soft cap in every version of Transformers.
    is_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    own = str(getattr(network.config, "_attn_implementation", "eager"))
    return LoadedModel(
        name=name,
        network=network.train(mode=False),
        codec=codec,
        eos_token_ids=eos_token_ids,
        max_positions=_max_positions(network.config),
        dense_implementation="eager" if is_capped else own,
        ranks=ranks,
        images=images or NoImages(f"{name!r} was loaded without a processor"),
    )


def _max_positions(config: PreTrainedConfig) -> int | None:
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions


@dataclass(frozen=True, slots=True)
class _Source:
    """The place of a model: a folder, or an id on the hub.

    Attributes:
        name: the folder or the id.
        is_local: True if the hub must not be used.
        gguf: the file in the folder that holds everything, if it is one in GGUF.
    """

    name: str
    is_local: bool
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments with which Transformers' classes read from this place."""
        found: dict[str, Any] = {"local_files_only": self.is_local}
        return found if self.gguf is None else found | {"gguf_file": self.gguf}

    @property
    def is_folder(self) -> bool:
        return self.gguf is None and Path(self.name).is_dir()

    def path(self, file: str) -> Path:
        return Path(self.name) / file

    def has(self, file: str) -> bool:
        """Return True if the folder or the repository has this file."""
        return bool(has_file(self.name, file, local_files_only=self.is_local))


def _resolve(name: str) -> _Source:
    try:
        name.encode()
    except UnicodeEncodeError as error:  # safetensors and tokenizers accept only UTF-8
        raise ModelNotFoundError(
            f"model: wanted a path or id that UTF-8 can encode, got {name!r}"
        ) from error
    path = Path(name).expanduser()
    try:
        is_folder, is_other = path.is_dir(), path.exists()
    except OSError as error:  # the name is too long
        raise ModelNotFoundError(f"model: {shown(name)}: {error.strerror}") from error
    if is_folder:
        config = path / "config.json"
        if not config.is_file():
            there = "is not a file" if os.path.lexists(config) else _what_is_missing(path)
            raise ModelNotFoundError(f"model: {config} {there}")
        return _Source(str(path), is_local=True)
    if is_other and path.suffix == ".gguf":
        check_pulled(path)
        return _Source(str(path.parent), is_local=True, gguf=path.name)
    if is_other:
        raise ModelNotFoundError(f"model: wanted a folder or a .gguf file, got the file {name!r}")
    if not _HUB_ID.fullmatch(name):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise ModelNotFoundError(
            f"model: there is no {kind} {name!r}, and an id on the hub has the form owner/name"
        )
    silence = "" if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    if silence and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ModelNotFoundError(
            f"model: there is no folder {name!r}, the hub's model of that id is not cached here, "
            f"and {constants.ENDPOINT} cannot be reached: {silence}"
        )
    return _Source(name, is_local=bool(silence))


def _what_is_missing(folder: Path) -> str:
    """Return in words the contents of a folder without config.json, and the remedy."""
    if (folder / "adapter_config.json").is_file():
        return (
            f"is missing: this folder holds a LoRA adapter, not a model. Give its base model, and "
            f"--lora NAME={folder}"
        )
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        return f"is missing: the folder holds {files[0]}, give that file: {folder / files[0]}"
    return "is missing: this is no model"


def _why_unreachable(endpoint: str) -> str:
    """Ask a hub once; return why it does not answer, empty if it does.

    Transformers would ask again and again, for half a minute.
    """
    try:
        request = Request(endpoint, method="HEAD")  # noqa: S310  # the user's own setting
        with urlopen(request, timeout=_HUB_TIMEOUT_S):  # noqa: S310
            return ""
    except HTTPError:
        return ""  # an answer, if an error
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a model alone, from a folder or an id. Reads one small file.

    Raises:
        ModelNotFoundError: there is no such model, or it is broken.
        UnsupportedModelError: Transformers does not know this kind of model.
    """
    return _load_config(_resolve(name))


def _load_config(source: _Source) -> PreTrainedConfig:
    path, content = source.path("config.json"), {}
    if source.is_folder:
        content = read_object(path)
        _check_fields(path, content)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.name, trust_remote_code=False, **source.options
        )
    except Exception as error:
        if source.gguf is not None:
            raise ModelNotFoundError(
                f"model: {source.path(source.gguf)}: Transformers cannot read this GGUF file: "
                f"{reason(error)}"
            ) from error
        if source.is_folder:
            field = ""
            if not isinstance(error, StrictDataclassError):  # it names its field
                field = _field_without_which(content, AutoConfig.for_model)
            where = f"{path}: {field}" if field else str(path)
            raise ModelNotFoundError(f"model: {where}: {reason(error)}") from error
        if isinstance(error, OSError):
            raise ModelNotFoundError(
                f"model: there is no folder {source.name!r}, and the hub's model of that id is "
                f"neither cached here nor available: {reason(error)}"
            ) from error
        raise UnsupportedModelError(f"model: {source.name!r}: {reason(error)}") from error
    if source.is_folder:
        add_modelopt(config, source.path("hf_quant_config.json"))
    return config


def _check_fields(path: Path, content: Mapping[str, object]) -> None:
    """Check the fields of config.json that say what kind of model it is."""
    kind = content.get("model_type")
    if not isinstance(kind, str):
        raise ModelNotFoundError(
            f"model: {path}: model_type: wanted the name of one, got {shown(kind)}"
        )
    if kind not in CONFIG_MAPPING:
        code = ". The checkpoint brings code of its own, which is never run here"
        raise UnsupportedModelError(
            f"model: {path}: model_type: Transformers {transformers_version} knows no "
            f"{shown(kind)}{code if 'auto_map' in content else ''}"
        )
    settings = content.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise ModelNotFoundError(
            f"model: {path}: quantization_config: wanted an object, got {shown(settings)}"
        )
    if content.get("quantization") is not None and settings is None:
        raise UnsupportedModelError(
            f"model: {path}: quantization: these are weights for Apple's MLX, which nothing here "
            f"reads. Give the checkpoint that they were made from"
        )
    names = content.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise ModelNotFoundError(f"model: {path}: architectures: wanted names, got {shown(names)}")
    for name, value in content.items():  # each layer is an object, even without weights
        if _LAYERS.search(name) and isinstance(value, int) and value > _MAX_LAYERS:
            raise ModelNotFoundError(
                f"model: {path}: {name}: wanted at most {_MAX_LAYERS:,}, got {shown(value)}"
            )
    positions = content.get("max_position_embeddings")
    if isinstance(positions, int) and not 1 <= positions <= _MAX_POSITIONS:
        raise ModelNotFoundError(
            f"model: {path}: max_position_embeddings: wanted at least 1 and at most "
            f"{_MAX_POSITIONS:,}, got {shown(positions)}"
        )


@uncollected()
def _check_network(
    source: _Source, config: PreTrainedConfig, found: Format | None, once: Once
) -> tuple[Mapping[str, StoredTensor], list[str]]:
    """Refuse what cannot run, or does not match its files, before memory is allocated.

    Returns:
        The stored tensors, if the files are known, and in words those with another shape in the
        network.
    """
    path = source.path("config.json")
    try:
        network = check_layers(config, once)
    except UnsupportedModelError as error:
        cause = error.__cause__
        if source.is_folder and isinstance(cause, Exception) and not isinstance(cause, ModelError):
            field = _field_without_which(read_object(path), _network_of)
            if field:
                raise ModelNotFoundError(f"model: {path}: {field}: {reason(cause)}") from error
        raise
    if not source.is_folder:
        return {}, []
    stored = check_files(Path(source.name))
    if found is not None:  # its package knows names and shapes
        check_scales(path, config, stored)
        return {}, []
    return stored, check_stored(path, stored, network)


def _network_of(**fields: object) -> PreTrainedModel:
    return check_layers(AutoConfig.for_model(**fields))  # type: ignore[arg-type]


def _field_without_which(content: Mapping[str, object], build: Callable[..., object]) -> str:
    """Return the field without which config.json builds a network, with its value, or "".

    Found by leaving out one field at a time.
    """

    def builds(fields: Mapping[str, object]) -> bool:
        try:
            build(**fields)
        except Exception:  # noqa: BLE001  # any error of Transformers
            return False
        return True

    started = time.monotonic()
    if not builds(content):  # otherwise the error is not in a field
        for field in [name for name in content if name not in _UNBLAMED]:
            rest = {name: value for name, value in content.items() if name != field}
            if builds(rest):
                return f"{field}: no network can be made with {shown(content[field])}"
            if time.monotonic() - started > _BLAME_S:
                break
    return ""


def _load_network(
    source: _Source,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    stored: Mapping[str, StoredTensor],
    shapes: Sequence[str],
    found: Format | None,
) -> PreTrainedModel:
    if found is not None:
        with freeing_at_once(), reading_scales(config):
            settings = choose_dequantised(config, found)
            network = _read_network(source, config, dtype, stored, shapes, settings, UNUSED_SCALES)
            return finish(network, found, dtype, device)
    return _read_network(source, config, dtype, stored, shapes, {}, None)


def _read_network(
    source: _Source,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    stored: Mapping[str, StoredTensor],
    shapes: Sequence[str],
    settings: Mapping[str, object],
    unused: re.Pattern[str] | None,
) -> PreTrainedModel:
    try:
        loaded: tuple[PreTrainedModel, _LoadingInfo] = auto_class(config).from_pretrained(  # type: ignore[assignment]
            source.name,
            config=config,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
            **settings,
            **source.options,
        )
    except Exception as error:  # any error of Transformers
        why = "; ".join(shapes[:_NAMED_SHAPES]) or reason(error)
        raise ModelNotFoundError(f"model: {source.name!r} does not load: {why}") from error
    network, info = loaded
    check_loaded(source.name, info, stored, unused)
    return network


@uncollected()
def _load_codec(source: _Source, config: PreTrainedConfig) -> HuggingFaceCodec:
    what = f"model: the tokenizer of {source.name!r}"
    try:
        with NO_PANIC:
            tokenizer = _read_tokenizer(source)
        codec = HuggingFaceCodec(tokenizer, config.model_type, _max_positions(config))
        tokens = codec.encode(_SAMPLE_TEXT)
        codec.decode(tokens)
    except Exception as error:
        raise ModelNotFoundError(f"{what} does not load: {reason(error)}") from error
    if not tokens:  # Transformers makes an empty one if there are no files
        raise ModelNotFoundError(f"{what} gives no tokens for {_SAMPLE_TEXT!r}: is its file there?")
    return codec


def _read_tokenizer(source: _Source) -> PreTrainedTokenizerBase:
    """Return the tokenizer that tokenizer.json describes, or the named class's without that file.

    Many classes take only the vocabulary from tokenizer.json and replace its pre-tokenizer,
    normalizer and decoder by those of the class's family, which gives other tokens
    (https://github.com/huggingface/transformers/issues/45920).
    """
    tokenizer: PreTrainedTokenizerBase
    if source.gguf is not None or not source.has(_TOKENIZER) or _is_tekken(source):
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options)
        return tokenizer
    tokenizer = TokenizersBackend.from_pretrained(source.name, **source.options)
    if tokenizer.eos_token is None:
        _name_special_tokens(tokenizer, source)
    return tokenizer


def _is_tekken(source: _Source) -> bool:
    """Return True if Mistral's package is there to read its file, the source of tokenizer.json."""
    return find_spec("mistral_common") is not None and source.has("tekken.json")


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, source: _Source) -> None:
    """Take the names of special tokens from the class; older checkpoints leave them to it."""
    try:
        named = AutoTokenizer.from_pretrained(source.name, **source.options).special_tokens_map
    except Exception:  # noqa: BLE001  # the class cannot read the file, so its names mean nothing
        return
    known = tokenizer.get_vocab()
    for name, token in named.items():
        if str(token) in known and getattr(tokenizer, name, None) is None:
            setattr(tokenizer, name, str(token))
