"""Images in prompts: files to what a vision tower takes, and the tokens that stand for them.

Transformers' processor of the model does both. It gets each image alone, so what an image becomes
does not depend on the others of its prompt; a processor that treats several images differently is
found by a trial at the start, and takes one image a prompt.

Decides: which files are images, and how large they may be; the identity of an image, which is a
digest of what the vision tower takes (with its names, shapes and types); the position ids of a
prompt with images, as the network's class computes them.

Invariants: nothing is decoded before its size is known and allowed; no file runs a program (only
formats that Pillow reads itself); torchvision is not needed, because processors use Pillow.

Does not know: requests, caches, when a vision tower runs (`forward/image_encoder.py`).
"""

import copy
import hashlib
import inspect
import io
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor
from transformers import (
    PROCESSOR_MAPPING,
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils.generic import ModelOutput

import kvcore
from model.control.config import EngineConfig
from model.control.images import check_count
from model.errors import InvalidArgumentError, UnsupportedModelError
from model.load.chat_template import Message
from model.load.checkpoint import read_object, reason
from model.load.codec import HuggingFaceCodec, TextCodec
from model.load.probes import seen_pairs

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_TEXT = ("input_ids", "attention_mask")
_TYPES = ("mm_token_type_ids", "token_type_ids")
_KNOWN_BYTES = 256 << 20  # of files that were read lately, as the tower takes them
_TOLERANCE = 0.02  # of rows that are computed together and alone
_TRIAL_SIZES = ((61, 40), (43, 95))  # width and height of two images that a processor is tried with


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """The images of a prompt.

    Attributes:
        items: content and place of each; the mask of an item says which of its tokens are rows of
            the vision tower's output.
        inputs: the arguments of the vision tower for each, by name.
        positions: int64 [num_axes, num_tokens], the position ids of the prompt's tokens; None: each
            token's place in the prompt.
        delta: position id minus place of the tokens after the prompt.
        is_whole: True if the tokens of an image see each other, so that one step computes them all.
        given: for `generate`: the names and tensors of the whole prompt.
    """

    items: tuple[kvcore.MultimodalItem, ...]
    inputs: tuple[Mapping[str, Tensor], ...]
    positions: Tensor | None
    delta: int
    is_whole: bool
    given: Mapping[str, Tensor] = field(default_factory=dict)

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments of `generate`, on a device. O(its bytes)."""
        return {name: moved(tensor, device, dtype) for name, tensor in self.given.items()}


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a vision tower's input on a device; numbers but integers in the dtype. O(bytes)."""
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def rows_of(item: kvcore.MultimodalItem) -> NDArray[np.int64]:
    """Return the places in the prompt of the rows of an item, in order. O(length)."""
    mask = np.ones(item.length, dtype=bool) if item.mask is None else np.frombuffer(item.mask, "?")
    return np.flatnonzero(mask) + item.start


def open_image(given: object, limits: EngineConfig) -> Image.Image:
    """Return an image in RGB, turned as its file says. O(pixels); of one that is too large O(1).

    Args:
        given: an image of Pillow, the bytes of a file, or its path.
        limits: of an engine.

    Raises:
        InvalidArgumentError: it cannot be read, is no image of a known format, or is too large.
    """
    if isinstance(given, str | Path):
        given = _file_bytes(Path(given), limits.max_image_bytes)
    if isinstance(given, bytes):
        if len(given) > limits.max_image_bytes:
            raise InvalidArgumentError(
                f"image: wanted at most {limits.max_image_bytes:,} bytes (--max-image-bytes), got "
                f"{len(given):,}"
            )
        try:
            with warnings.catch_warnings(action="ignore"):  # of sizes that are checked below
                given = Image.open(io.BytesIO(given), formats=_FORMATS)
        except Exception as error:  # a broken file may raise any error of Pillow
            is_none = isinstance(error, OSError)  # as is UnidentifiedImageError
            why = f"wanted one of {', '.join(_FORMATS)}, got none" if is_none else reason(error)
            raise InvalidArgumentError(f"image: {why}") from error
    if not isinstance(given, Image.Image):
        raise InvalidArgumentError(
            f"image: wanted a path, bytes or an image of Pillow, got {type(given).__name__}"
        )
    width, height = given.size
    if width * height > limits.max_image_pixels:
        raise InvalidArgumentError(
            f"image: wanted at most {limits.max_image_pixels:,} pixels (--max-image-pixels), got "
            f"{width} x {height}"
        )
    try:
        return ImageOps.exif_transpose(given).convert("RGB")
    except Exception as error:  # a broken file may raise any error of Pillow
        raise InvalidArgumentError(f"image: its file is broken: {reason(error)}") from error


def _file_bytes(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(f"image: cannot read {str(path)!r}: {why}") from error


class NoImages:
    """Stands where a model takes no images."""

    def __init__(self, why: str) -> None:
        self.why = why

    def encode(self, *asked: object, **how: object) -> tuple[list[int], ImagePrompt]:
        """Refuse them.

        Raises:
            InvalidArgumentError: always.
        """
        del asked, how
        raise InvalidArgumentError(f"image: {self.why}")

    encode_chat = encode


class ImageCodec:
    """Prompts with images to tokens and tensors, for one model.

    Args:
        network: its class says what its vision tower takes, and computes position ids.
        processor: of the same model.
        codec: its tokenizer.
        ahead: the layers in which the tokens of an image see each other.

    Attributes:
        ahead: as above.
        mark: the text that stands for an image in a prompt, such as `<|image_pad|>`.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        processor: ProcessorMixin,
        codec: TextCodec,
        ahead: frozenset[int],
    ) -> None:
        self._network = network
        self._processor = processor
        self._codec = codec
        self.ahead = ahead
        self.mark = str(getattr(processor, "image_token"))  # noqa: B009  # not every class has it
        tower: Callable[..., object] = network.base_model.get_image_features  # type: ignore[assignment]
        self._takes = tuple(inspect.signature(tower).parameters)
        self._passes = inspect.signature(network.forward).parameters
        self._token = int(network.config.image_token_id)
        self._attention = _attention_of(network)
        self._is_apart = False
        self._known = OrderedDict[bytes, _Read]()  # by digest of a file, the last used at the end
        self._lock = Lock()

    def own_attention(self) -> AbstractContextManager[None]:
        """Return a context in which the network has the attention it came with. O(parts)."""
        return _attending(self._attention)

    def encode_chat(
        self,
        messages: Sequence[Message],
        images: Sequence[object],
        limits: EngineConfig,
        *,
        opens_answer: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> tuple[list[int], ImagePrompt]:
        """Return the tokens and images of a conversation. O(pixels).

        Raises:
            InvalidArgumentError: as `encode`, or the chat template refuses the messages.
        """
        text, adds = self._codec.render_chat(
            messages, opens_answer=opens_answer, options=options, image_mark=self.mark
        )
        return self.encode(text, images, limits, adds_special_tokens=adds)

    def encode(
        self,
        text: str,
        images: Sequence[object],
        limits: EngineConfig,
        *,
        adds_special_tokens: bool = True,
    ) -> tuple[list[int], ImagePrompt]:
        """Return the tokens of a prompt, and its images. O(pixels).

        Args:
            text: `mark` stands in it for each image; without any, each image stands
                on a line before it.
            images: in their order.
            limits: of an engine.
            adds_special_tokens: True: add the tokens that the model wants at its start.

        Raises:
            InvalidArgumentError: an image cannot be read or is too large, there are too many for
                the limits or the processor, or the text has not as many marks.
        """
        check_count(len(images), limits.max_images)
        if self.mark not in text:
            text = len(images) * f"{self.mark}\n" + text
        pieces = text.split(self.mark)
        if len(pieces) != len(images) + 1:
            raise InvalidArgumentError(
                f"prompt: wanted {self.mark!r} once for each image, where it stands: "
                f"{len(images)}, got {len(pieces) - 1}"
            )
        if len(images) > 1 and not self._is_apart:
            raise InvalidArgumentError(
                f"image: wanted one, this model's processor treats one of several differently, "
                f"got {len(images)}"
            )
        read = [self._read_once(image, limits) for image in images]
        whole = pieces[0] + "".join(
            one.text + piece for one, piece in zip(read, pieces[1:], strict=True)
        )
        tokens = self._codec.encode(whole, adds_special_tokens=adds_special_tokens)
        places = np.flatnonzero(np.array(tokens) == self._token)
        counts = [one.num_rows for one in read]
        if len(places) != sum(counts):
            raise InvalidArgumentError(
                f"prompt: wanted {sum(counts)} tokens {self._token} of images, got {len(places)}"
            )
        ends = np.cumsum(counts)
        items = tuple(
            _item(one.content, places[end - one.num_rows : end])
            for one, end in zip(read, ends, strict=True)
        )
        inputs = tuple(one.inputs for one in read)
        return tokens, self._prompt(tokens, items, inputs)

    def _prompt(
        self,
        tokens: Sequence[int],
        items: tuple[kvcore.MultimodalItem, ...],
        inputs: tuple[Mapping[str, Tensor], ...],
    ) -> ImagePrompt:
        """Return the prompt with position ids and the arguments of `generate`. O(tokens)."""
        ids = torch.tensor([tokens])
        types = (ids == self._token).to(torch.int64)
        given = {name: _joined([one[name] for one in inputs]) for name in inputs[0]}
        given |= {name: types for name in _TYPES if name in self._passes}
        compute = getattr(self._network.base_model, "get_rope_index", None)
        positions, delta = None, 0
        if compute is not None:
            known = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | given
            known |= dict.fromkeys(_TYPES, types)
            names = inspect.signature(compute).parameters
            try:
                found, deltas = compute(**{name: known[name] for name in names if name in known})
            except Exception as error:  # a class may want text between two images
                raise InvalidArgumentError(
                    f"prompt: wanted images where {type(self._network).__name__} finds their "
                    f"positions, such as with text between them: {reason(error)}"
                ) from error
            positions, delta = found[:, 0], int(deltas.flatten()[0])
        return ImagePrompt(items, inputs, positions, delta, bool(self.ahead), given)

    def _read_once(self, given: object, limits: EngineConfig) -> "_Read":
        """Return the processor's result for one image, from the cache if its file was read lately.

        One image at a time: a processor and its tokenizer are not made for several threads.
        """
        with self._lock:
            if not isinstance(given, bytes):
                return self._read(open_image(given, limits))
            name = hashlib.sha256(given).digest()
            read = self._known.pop(name, None) or self._read(open_image(given, limits))
            self._known[name] = read
            while sum(one.num_bytes for one in self._known.values()) > _KNOWN_BYTES:
                self._known.popitem(last=False)
        return read

    def _read(self, image: Image.Image) -> "_Read":
        """Return the processor's result for a prompt of this image alone. O(pixels)."""
        try:
            found = self._processor(
                text=[self.mark],
                images=[image],
                return_tensors="pt",
                return_text_replacement_offsets=True,
            )
            text = str(found["text_replacement_offsets"][0][0]["replacement"])
        except Exception as error:  # a processor may raise any error
            raise InvalidArgumentError(
                f"image: wanted one that the model's processor takes: {reason(error)}"
            ) from error
        inputs = {name: torch.as_tensor(found[name]) for name in self._takes if name in found}
        if beside := sorted({*found} & {*self._passes} - {*inputs, *_TYPES, *_TEXT}):
            raise InvalidArgumentError(
                f"image: {type(self._network).__name__} wants {beside[0]} beside it, which is not "
                "served"
            )
        num_rows = int((found["input_ids"] == self._token).sum())
        return _Read(text, num_rows, inputs, digest(inputs))

    def try_several(self) -> None:
        """Find out whether several images of a prompt become what each becomes alone.

        With two small ones; where their tensors differ (they may be padded), the tower says it.

        Raises:
            InvalidArgumentError: the processor does not take an image.
        """
        drawn = np.random.default_rng(0)
        trial = [
            Image.fromarray(drawn.integers(0, 255, (height, width, 3), dtype=np.uint8))
            for width, height in _TRIAL_SIZES
        ]
        alone = [self._read(image) for image in trial]
        try:
            both = self._processor(text=[2 * self.mark], images=trial, return_tensors="pt")
            inputs = {name: both[name] for name in alone[0].inputs}
            num_rows = int((both["input_ids"] == self._token).sum())
            self._is_apart = num_rows == sum(one.num_rows for one in alone) and (
                all(
                    torch.equal(inputs[name], _joined([one.inputs[name] for one in alone]))
                    for name in inputs
                )
                or self._same_rows(inputs, [one.inputs for one in alone])
            )
        except Exception:  # noqa: BLE001  # a class of Transformers may raise any error
            self._is_apart = False

    def _same_rows(self, both: Mapping[str, Tensor], alone: Sequence[Mapping[str, Tensor]]) -> bool:
        """Return True if the tower gives the same rows for images together and alone.

        Three passes.
        """
        with torch.inference_mode():
            together = flat_rows(pooled(run_tower(self._network, both)))
            each = torch.cat([flat_rows(pooled(run_tower(self._network, one))) for one in alone])
        difference = (together - each).norm() if together.shape == each.shape else each.norm()
        return bool(difference <= _TOLERANCE * each.norm())


POOLED = ("pooler_output", "last_hidden_state")
"""The fields of a vision tower's output that may have its rows: the first of these that is set."""


def run_tower(network: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ModelOutput:
    """Return the output of a vision tower, which attends as it does now. One pass through it."""
    tower: Callable[..., ModelOutput] = network.base_model.get_image_features  # type: ignore[assignment]
    given = {name: moved(one, network.device, network.dtype) for name, one in inputs.items()}
    return tower(**given, return_dict=True)


def pooled(output: ModelOutput) -> Sequence[Tensor] | Tensor:
    """Return the rows of a tower's output: one tensor, or one for each part. O(1)."""
    found: Sequence[Tensor] | Tensor = next(
        output[name] for name in POOLED if output.get(name) is not None
    )
    return found


def flat_rows(features: Sequence[Tensor] | Tensor) -> Tensor:
    """Return rows that are one tensor, or one for each part, one after another. O(their bytes)."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """The processor's result for an image.

    Attributes:
        text: the text that stands for the image in the prompt, before it becomes tokens.
        num_rows: rows of the vision tower's output.
        inputs: the arguments of the vision tower, by name.
        content: its digest.
    """

    text: str
    num_rows: int
    inputs: Mapping[str, Tensor]
    content: bytes

    @property
    def num_bytes(self) -> int:
        """The size of its tensors. O(inputs)."""
        return sum([tensor.nbytes for tensor in self.inputs.values()])


def digest(inputs: Mapping[str, Tensor]) -> bytes:
    """Return the identity of an image: all that its vision tower takes. O(bytes)."""
    found = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        found.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.digest()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the inputs of several images as one, padded with zeros where their sizes differ."""
    if any(one.shape[1:] != parts[0].shape[1:] for one in parts):
        most = torch.tensor([one.shape[1:] for one in parts]).amax(0).tolist()
        parts = [
            torch.nn.functional.pad(
                one,
                [
                    number
                    for size, own in zip(reversed(most), reversed(one.shape[1:]), strict=True)
                    for number in (0, size - own)
                ],
            )
            for one in parts
        ]
    return torch.cat(list(parts))


def _item(content: bytes, places: NDArray[np.int64]) -> kvcore.MultimodalItem:
    """Return an item over the places of an image's rows; tokens between them are text."""
    start, length = int(places[0]), int(places[-1] - places[0]) + 1
    mask = None
    if length > len(places):
        rows = np.zeros(length, dtype=np.uint8)
        rows[places - start] = 1
        mask = rows.tobytes()
    return kvcore.MultimodalItem(content, start, length, mask)


def load_images(
    name: str,
    options: Mapping[str, Any],
    network: PreTrainedModel,
    codec: HuggingFaceCodec,
) -> ImageCodec | NoImages:
    """Return the codec of a model's prompts with images, or the reason why there is none.

    Reads a few files, and runs one short pass.

    Args:
        name: a folder or an id on the hub.
        options: for Transformers' classes to read from there.
        network: with the attention that it came with.
        codec: its tokenizer.
    """
    tokenizer = codec.tokenizer
    if not _reads_images(network):
        return NoImages(f"{name!r} reads text alone")
    try:
        processor = _load_processor(name, options, network.config, tokenizer)
    except Exception as error:  # noqa: BLE001  # any error of Transformers
        return NoImages(f"the processor of {name!r} does not load: {reason(error)}")
    processor.tokenizer = copy.deepcopy(tokenizer)  # one for this thread alone
    if tokenizer.chat_template is None:  # older checkpoints keep it in a file of the processor
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    return codec_of(network, processor, codec)


def codec_of(
    network: PreTrainedModel, processor: ProcessorMixin, codec: TextCodec
) -> ImageCodec | NoImages:
    """Return the codec of a network's prompts with images, or the reason why there is none.

    One short pass, and at most three of the tower.
    """
    what = type(network).__name__
    if not _reads_images(network):
        return NoImages(f"{what} reads text alone")
    token = getattr(network.config, "image_token_id", None)
    if getattr(processor, "image_token", None) is None or not isinstance(token, int):
        return NoImages(f"{what} and its processor have no token that stands for images")
    if token >= network.config.get_text_config().vocab_size:
        return NoImages(f"{what}: token {token} of images is outside the vocabulary")
    try:
        with _attending(_attention_of(network)):
            ahead = _layers_ahead(network, token)
        images = ImageCodec(network, processor, codec, ahead)
        images.try_several()
    except Exception as error:  # noqa: BLE001  # a class of Transformers may raise any error
        return NoImages(f"{what}: {reason(error).removeprefix('image: ')}")
    return images


def _reads_images(network: PreTrainedModel) -> bool:
    """Return True if a vision tower can run apart from the pass that takes its output."""
    passes = inspect.signature(network.forward).parameters
    return "mm_encoder_outputs" in passes and hasattr(network.base_model, "get_image_features")


def _layers_ahead(network: PreTrainedModel, token: int) -> frozenset[int]:
    """Return the layers in which an image's tokens see each other; the others are causal.

    Raises:
        UnsupportedModelError: something else is.
    """
    passes = inspect.signature(network.forward).parameters
    ids = torch.tensor([[1, token, token, 2]], device=network.device)
    types = (ids == token).to(torch.int64)
    named = {name: types for name in _TYPES if name in passes}
    if not named:
        return frozenset()
    plain, seen = seen_pairs(network, ids), seen_pairs(network, ids, **named)
    for layer, rows in seen.items():
        ahead = [row.copy() for row in plain[layer]]
        ahead[1][2] = True
        if rows not in (plain[layer], ahead):
            raise UnsupportedModelError(
                f"layer {layer}: wanted a mask in which text is causal and the tokens of an image "
                "see each other at most"
            )
    return frozenset(layer for layer, rows in seen.items() if rows != plain[layer])


def _attention_of(network: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
    """Return the attention of each part of a network. O(modules)."""
    parts = [one.config for one in network.modules() if isinstance(one, PreTrainedModel)]
    every = {id(config): config for config in parts}.values()
    return [(config, config._attn_implementation) for config in every]  # noqa: SLF001


@contextmanager
def _attending(wanted: Sequence[tuple[PreTrainedConfig, str]]) -> Iterator[None]:
    """Set the attention of parts of a network, and restore it afterwards. O(parts)."""
    before = [(config, config._attn_implementation) for config, _ in wanted]  # noqa: SLF001
    try:
        for config, implementation in wanted:
            config._attn_implementation_internal = implementation  # noqa: SLF001
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation  # noqa: SLF001


def _load_processor(
    name: str,
    options: Mapping[str, Any],
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> ProcessorMixin:
    """Return the processor of a model, whose image processor is the one that uses Pillow.

    Transformers' own loader wants torchvision for the video processor, which is not needed here.
    """
    settings, _ = ProcessorMixin.get_processor_dict(name, **options)
    named = settings.get("processor_class") or _named_class(name)
    found = None if named is None else processor_class_from_name(named)
    kind = processor_class(found or PROCESSOR_MAPPING[type(config)])
    parts: list[object] = []
    for part in kind.get_attributes():
        if part == "tokenizer":
            parts.append(tokenizer)
        elif part == "image_processor":
            own = AutoImageProcessor.from_pretrained(name, backend="pil", **options)  # type: ignore[no-untyped-call]
            parts.append(own)
        else:
            parts.append(None)  # of videos or sound
    processor: ProcessorMixin = kind.from_args_and_dict(parts, settings)
    return processor


def processor_class(found: Any) -> Any:  # noqa: ANN401  # a class of Transformers
    """Return a processor's class that takes what stands for its other parts. O(1).

    Pixtral's, the only one for images that wants torchvision, uses one function of an image
    processor, which the one for Pillow has too.
    """
    if getattr(found, "is_dummy", False) and found.__name__ == "PixtralProcessor":
        module = "transformers.models.pixtral.image_processing"
        sys.modules[f"{module}_pixtral"] = import_module(f"{module}_pil_pixtral")
        try:
            own = import_module("transformers.models.pixtral.processing_pixtral")
        finally:
            del sys.modules[f"{module}_pixtral"]
        found = own.PixtralProcessor
    return type("Processor", (found,), {"check_argument_for_proper_class": lambda *_: None})


def _named_class(name: str) -> str | None:
    """Return the class of a processor that an older checkpoint names."""
    for file in _PROCESSOR_FILES:
        if (path := Path(name) / file).is_file():
            found = read_object(path).get("processor_class")
            if isinstance(found, str):
                return found
    return None
