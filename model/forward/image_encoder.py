"""Runs vision towers, and puts what they give into the steps that compute the tokens of images.

A step that computes tokens of an image runs the network's modules with `mm_encoder_outputs`, by
which Transformers' classes take the output of a tower that ran before: they put its rows in the
place of the embeddings of placeholder tokens, and add what later layers want of them (deepstack).
The rows of a chunk are those of its tokens, so a chunk may begin and end inside an image.

Decides: when a tower runs: when the first token of an image is computed that is not in the prefix
cache, and whose output is not kept here; which outputs are kept: those used last, as far as they
fit into `encoder_cache_bytes`. And the position ids of requests with images: those that the class
computes for the prompt, and for later tokens their place in the text plus a constant.

Invariants: a step without images is built as before, and a step of tokens that were generated
differs only in its position ids, so it runs from CUDA graphs; a tower sees one image at a time, so
its output does not depend on other requests.

Does not know: files, processors (`load/images.py`), how a step is scheduled.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from model.attention.ahead import Ahead, AheadRun
from model.attention.batch import StepTensors
from model.control.request import Request
from model.control.step import Chunk
from model.errors import ModelError, UnsupportedModelError
from model.load.checkpoint import reason
from model.load.images import (
    POOLED,
    ImageCodec,
    ImagePrompt,
    flat_rows,
    pooled,
    rows_of,
    run_tower,
)
from model.ranks.ranks import Ranks

_UNREAD = {*POOLED, "deepstack_features", "hidden_states", "attentions"}


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The output of a vision tower for one image.

    Attributes:
        rows: [num_rows, hidden_size], one for each placeholder token.
        deeper: the same for each further layer that adds them.
        layers: the number of each such layer, None where the class does not say it; None: the class
            knows no such layers.
        kind: the class of the object in which the network's class expects them.
        is_tensor: True if it expects one tensor there, and not one for each image.
    """

    rows: Tensor
    deeper: tuple[Tensor, ...]
    layers: tuple[int | None, ...] | None
    kind: type[ModelOutput]
    is_tensor: bool

    @property
    def num_bytes(self) -> int:
        """The size of its tensors. O(layers)."""
        return sum([each.nbytes for each in (self.rows, *self.deeper)])


class ImageEncoder:
    """The vision tower of a network and its outputs.

    Args:
        network: the network, with paged attention.
        codec: knows the attention of its tower.
        max_bytes: of the outputs that are kept.
        windows: of each KV cache group.
        ranks: the processes that share the network, each with the whole tower; None: it is whole.

    Attributes:
        num_runs: the number of runs of a tower.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        codec: ImageCodec,
        max_bytes: int,
        windows: Sequence[int | None],
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._network = network
        self._codec = codec
        self._max_bytes = max_bytes
        self._windows = windows
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._num_bytes = 0
        self._now: dict[bytes, EncodedImage] = {}  # of the step that comes
        self.num_runs = 0

    def encode(self, chunks: Sequence[Chunk]) -> dict[Request, ModelError]:
        """Have the outputs of a step's images at hand. A pass for each that is not kept.

        Returns:
            The requests that it failed for, and why: no memory, or an image that the tower of this
            network cannot compute; on all ranks those of any.
        """
        failed: dict[Request, ModelError] = {}
        self._now = {}
        for chunk in chunks:
            try:
                for span in _spans(chunk, 0):
                    if span.content not in self._now:
                        self._now[span.content] = self._encoded(span)
            except Exception as error:  # noqa: BLE001  # a tower may raise any error
                known = error if isinstance(error, ModelError) else None
                failed[chunk.request] = known or ModelError(
                    f"image: the vision tower failed: {reason(error)}"
                )
        asking = [one.request for one in chunks if isinstance(one.request.images, ImagePrompt)]
        if self._ranks is not None and asking:  # all ranks go on with the same requests
            own = bytes([request in failed for request in asking])
            found = zip(*self._ranks.all_gather(own), strict=True)
            for request, told in zip(asking, found, strict=True):
                if any(told) and request not in failed:
                    failed[request] = ModelError("image: the vision tower failed on another rank")
        return failed

    def prepared(self, chunks: Sequence[Chunk], tensors: StepTensors) -> StepTensors:
        """Return a step with the images of its chunks, already encoded. O(num_chunks + rows).

        Args:
            chunks: in the order of the step's tokens.
            tensors: on the host; their position ids are changed in place.
        """
        begin, position_ids = 0, tensors.position_ids
        runs: list[AheadRun] = []
        parts: list[EncodedImage] = []
        places: list[Tensor] = []
        for number, chunk in enumerate(chunks):
            if isinstance(images := chunk.request.images, ImagePrompt):
                position_ids = _positioned(position_ids, begin, chunk, images)
                for span in _spans(chunk, begin):
                    parts.append(_cut(self._now[span.content], span.first, span.last))
                    places.append(span.places)
                    if images.is_whole:
                        runs += _runs(span, number, begin, chunk.start)
            begin += chunk.num_tokens
        if not parts and position_ids is tensors.position_ids:
            return tensors
        arguments = partial(self._arguments, _merged(parts), torch.cat(places)) if parts else _none
        device, ahead = self._network.device, None
        if runs:
            ahead = Ahead.of(runs, tensors.paged, self._windows, self._codec.ahead, device)
        return replace(tensors, position_ids=position_ids, images=arguments, ahead=ahead)

    def _encoded(self, span: "_Span") -> EncodedImage:
        """Return the tower's output for an image, kept or new."""
        if (known := self._kept.get(span.content)) is not None:
            self._kept.move_to_end(span.content)
            return known
        encoded = self._run(span.inputs)
        if len(encoded.rows) != span.num_rows:
            raise UnsupportedModelError(
                f"image: wanted {span.num_rows} rows of the vision tower, got {len(encoded.rows)}"
            )
        self._kept[span.content] = encoded
        self._num_bytes += encoded.num_bytes
        while self._num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.num_bytes
        return encoded

    def _run(self, inputs: Mapping[str, Tensor]) -> EncodedImage:
        """Run the tower. One pass through it."""
        network, name = self._network, type(self._network).__name__
        self.num_runs += 1
        with self._codec.own_attention(), torch.inference_mode():
            output = run_tower(network, inputs)
        unread = [key for key, value in output.items() if value is not None and key not in _UNREAD]
        if unread:
            raise UnsupportedModelError(
                f"image: {name} takes {unread[0]} of its vision tower, which is not served"
            )
        found = output.get("deepstack_features")
        deeper = found or ()
        return EncodedImage(
            flat_rows(pooled(output)),
            tuple(flat_rows(each[1] if isinstance(each[0], int) else each) for each in deeper),
            None
            if found is None
            else tuple(each[0] if isinstance(each[0], int) else None for each in deeper),
            type(output),
            isinstance(pooled(output), Tensor),
        )

    def _arguments(
        self, encoded: EncodedImage, places: Tensor, input_ids: Tensor
    ) -> dict[str, object]:
        """Return the rows of a step's images as an argument. O(num_tokens * hidden_size).

        A placeholder token that belongs to no image keeps its own embedding, as it has in a step
        without images.

        Args:
            encoded: the rows.
            places: int64 [num_rows], the tokens of the step that they are for.
            input_ids: int64 [1, num_tokens] of the step.
        """
        network, places = self._network, places.to(input_ids.device)
        mask = input_ids[0] == network.config.image_token_id
        own = network.get_input_embeddings()(input_ids[0])
        if own.shape[-1] != encoded.rows.shape[-1]:  # the class projects them in the pass
            own = encoded.rows.new_zeros(len(own), encoded.rows.shape[-1])

        def spread(rows: Tensor, under: Tensor) -> Tensor | list[Tensor]:
            chosen = under.to(rows.dtype).index_copy(0, places, rows)[mask]
            return chosen[None] if encoded.is_tensor else [chosen]

        found: dict[str, Any] = dict.fromkeys(POOLED, spread(encoded.rows, own))
        if encoded.layers is not None:
            layers = [spread(rows, torch.zeros_like(own)) for rows in encoded.deeper]
            found["deepstack_features"] = [
                rows if layer is None else (layer, rows)
                for layer, rows in zip(encoded.layers, layers, strict=True)
            ]
        return {"mm_encoder_outputs": {"image": encoded.kind(**found)}}


class _Span(NamedTuple):
    """The rows of an image that a chunk computes.

    Attributes:
        content: digest of the image.
        inputs: the arguments of its tower.
        num_rows: of the whole image.
        first: the first of its rows.
        last: one past the last.
        places: int64 [last - first], their tokens in the step.
    """

    content: bytes
    inputs: Mapping[str, Tensor]
    num_rows: int
    first: int
    last: int
    places: Tensor


def _spans(chunk: Chunk, begin: int) -> Iterator[_Span]:
    """Yield the images of a chunk, whose first token is token `begin` of the step. O(rows)."""
    images = chunk.request.images
    if not isinstance(images, ImagePrompt) or chunk.start >= chunk.request.num_prompt_tokens:
        return
    for item, inputs in zip(images.items, images.inputs, strict=True):
        rows = rows_of(item)
        first, last = np.searchsorted(rows, (chunk.start, chunk.start + chunk.num_tokens)).tolist()
        if first < last:
            places = torch.from_numpy(rows[first:last] - chunk.start + begin)
            yield _Span(item.content, inputs, len(rows), first, last, places)


def _runs(span: _Span, sequence: int, begin: int, start: int) -> Iterator[AheadRun]:
    """Yield the runs of consecutive tokens of an image in a chunk. O(rows)."""
    places = span.places.numpy()
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        first = int(run[0])
        yield AheadRun(sequence, first, first - begin + start, int(run[-1]) - begin + start + 1)


def _positioned(position_ids: Tensor, begin: int, chunk: Chunk, images: ImagePrompt) -> Tensor:
    """Return a step's position ids with those of a chunk, in place while one axis is enough."""
    position_ids[..., begin : begin + chunk.num_tokens] += images.delta
    if images.positions is None or chunk.start >= images.positions.shape[1]:
        return position_ids
    known = images.positions[:, chunk.start : chunk.start + chunk.num_tokens]
    if position_ids.dim() == 2 and bool((known != known[:1]).any()):
        position_ids = position_ids.expand(len(known), 1, -1).clone()
    span = slice(begin, begin + known.shape[1])
    position_ids[..., span] = known[:, None] if position_ids.dim() == 3 else known[:1]
    return position_ids


def _none(input_ids: Tensor) -> dict[str, object]:
    """Return the arguments of a pass in which only position ids have several axes."""
    del input_ids
    return {}


def _cut(encoded: EncodedImage, first: int, last: int) -> EncodedImage:
    """Return some rows of an image. O(1)."""
    deeper = tuple(rows[first:last] for rows in encoded.deeper)
    return replace(encoded, rows=encoded.rows[first:last], deeper=deeper)


def _merged(parts: Sequence[EncodedImage]) -> EncodedImage:
    """Return rows of several images, one after another. O(their bytes)."""
    rows, *deeper = (
        torch.cat(each) for each in zip(*[(part.rows, *part.deeper) for part in parts], strict=True)
    )
    return replace(parts[0], rows=rows, deeper=tuple(deeper))
