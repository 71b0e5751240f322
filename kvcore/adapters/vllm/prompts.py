"""The requests and layers of vLLM in kvcore's words.

Decides what a request's KV depends on: its tokens, its tenant and adapter (a `Namespace`), and what
is not tokens (`MultimodalItem`s). Decides too which layer groups kvcore keeps. Imports nothing of
vLLM: it reads the attributes that vLLM's objects have.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import lcm
from typing import Any, Final, Protocol

from kvcore import (
    DEFAULT_NAMESPACE,
    ChunkedLocal,
    FullAttention,
    InvalidArgumentError,
    LayerGroup,
    MultimodalItem,
    Namespace,
    RecurrentState,
    SlidingWindow,
    pack,
)

BytesOf = Callable[[Any], memoryview | bytes]
"""How a tensor's rows become bytes."""

MAX_TOKEN: Final = 2**32 - 1

_FULL: Final = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec"})


class Request(Protocol):
    """The part of `vllm.v1.request.Request` that is read."""

    request_id: str
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    cache_salt: str | None
    status: Any
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    block_hashes: Sequence[bytes]
    resumable: bool

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The known tokens."""

    @property
    def num_tokens(self) -> int:
        """How many those are."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The arguments of `open` for a request.

    Attributes:
        packed: its known tokens.
        namespace: it shares blocks within it; None: it shares none.
        items: what is not tokens.
    """

    packed: array[int]
    namespace: Namespace | None
    items: tuple[MultimodalItem, ...]


def describe(request: Request, block_size: int, bytes_of: BytesOf) -> Prompt:
    """Return what a request's KV depends on. O(tokens + rows of embeddings).

    A request whose items overlap (sound within a film) cannot be described, and is not cached.
    """
    packed = packed_of(request.all_token_ids[:])
    namespace = namespace_of(request)
    if not request.mm_features and request.prompt_embeds is None:
        return Prompt(packed, namespace, ())
    items = feature_items(request.mm_features, 0)
    if request.prompt_embeds is not None:
        items += embedding_items(
            request.prompt_embeds,
            getattr(request, "prompt_is_token_ids", None),  # not in 0.22
            block_size,
            bytes_of,
        )
        items = tuple(sorted(items, key=lambda item: item.start))
    end = 0
    for item in items:
        if item.start < end or item.start + item.length > len(packed):
            return Prompt(packed, None, ())
        end = item.start + item.length
    return Prompt(packed, namespace, items)


def packed_of(tokens: Sequence[int]) -> array[int]:
    """Return token ids, packed; a negative one, where an image is to stand, wraps around."""
    try:
        return pack(tokens)
    except InvalidArgumentError:
        return pack([token & MAX_TOKEN for token in tokens])


def namespace_of(request: Request) -> Namespace:
    """Return with whom a request shares: an adapter is its name and its number, a salt a salt."""
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and not salt:
        return DEFAULT_NAMESPACE
    return Namespace(
        salt=(salt or "").encode("utf-8", "surrogatepass"),
        lora_name=None if lora is None else lora.lora_name,
        lora_version=0 if lora is None else lora.lora_int_id,
    )


def feature_items(features: Sequence[Any], start: int) -> tuple[MultimodalItem, ...]:
    """Return the images, sounds and films that begin at position `start` or later."""
    found: list[MultimodalItem] = []
    for feature in features:
        place = feature.mm_position
        if place.offset < start:
            continue
        mask = getattr(place, "is_embed", None)
        found.append(
            MultimodalItem(
                feature.identifier.encode("utf-8", "surrogatepass"),
                place.offset,
                place.length,
                None if mask is None else bytes(map(bool, mask.tolist())),
            )
        )
    found.sort(key=lambda item: item.start)
    return tuple(found)


def embedding_items(
    embeds: Any,  # noqa: ANN401  # a tensor of a library that is not imported here
    is_token: Sequence[bool] | None,
    block_size: int,
    bytes_of: BytesOf,
) -> tuple[MultimodalItem, ...]:
    """Return a prompt's embeddings, cut where blocks end, so that prompts share their beginnings.

    Args:
        embeds: [num_tokens, hidden_size].
        is_token: for each position whether a token stands there after all; None: nowhere.
        block_size: tokens of the smallest block.
        bytes_of: how rows become bytes.
    """
    found: list[MultimodalItem] = []
    kind = f"{embeds.dtype} {tuple(embeds.shape[1:])} ".encode()
    for start in range(0, len(embeds), block_size):
        rows = embeds[start : start + block_size]
        mask = None
        if is_token is not None:
            mask = bytes([not one for one in is_token[start : start + block_size]])
            if not any(mask):
                continue
        content = sha256(kind)
        content.update(bytes_of(rows))
        found.append(MultimodalItem(content.digest(), start, len(rows), mask))
    return tuple(found)


def groups_of(
    specs: Sequence[Any], *, are_dense: bool
) -> tuple[tuple[LayerGroup, ...], tuple[int, ...]] | str:
    """Return the groups of kvcore that stand for vLLM's, or why kvcore does not keep them.

    All groups of recurrent states together are one of kvcore's, and each of them is a piece.

    Args:
        specs: vLLM's groups, in its order.
        are_dense: whether a state is kept wherever a chunk ends, instead of at ends of prompts.

    Returns:
        The groups, and for each of vLLM's its place among the groups and pieces.
    """
    groups: list[LayerGroup] = []
    states: list[int] = []
    attention: list[int] = []
    for place, spec in enumerate(specs):
        if is_state(spec):
            states.append(place)
            continue
        group = group_of(spec)
        if isinstance(group, str):
            return group
        attention.append(place)
        groups.append(group)
    if states:
        why = _left_states([specs[place] for place in states], groups)
        if why:
            return why
        common = lcm(*[group.block_size for group in groups])
        groups.append(RecurrentState(len(states), common if are_dense else 0, common))
    order = attention + states
    return tuple(groups), tuple([order.index(place) for place in range(len(order))])


def is_state(spec: Any) -> bool:  # noqa: ANN401  # vLLM's class of a layer
    """Say whether the layers of a group keep recurrent states."""
    inner = getattr(spec, "kv_cache_specs", None)
    layers = [spec] if inner is None else list(inner.values())
    return all(type(one).__name__ == "MambaSpec" for one in layers)


def _left_states(specs: Sequence[Any], groups: Sequence[LayerGroup]) -> str | None:
    """Return why kvcore does not keep these states; None: it does."""
    layers = [one for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    common = lcm(*[group.block_size for group in groups])
    if not groups:
        return "recurrent states without a layer of attention"
    if any(one.num_speculative_blocks for one in layers):
        return "drafts in a network with recurrent states: a state for each draft token"
    if any(one.num_prefill_checkpoint_blocks for one in layers):
        return "recurrent states that a kernel writes within a chunk"
    modes = {one.mamba_cache_mode for one in layers}
    if not modes <= {"none", "align"}:
        return f"recurrent states in the mode {', '.join(sorted(modes))}"
    sizes = {one.block_size for one in layers if one.mamba_cache_mode == "align"}
    if sizes - {common}:
        return f"recurrent states at other positions ({sizes}) than blocks end at ({common})"
    return None


def group_of(spec: Any) -> LayerGroup | str:  # noqa: ANN401  # vLLM's class of a layer
    """Return what a group of layers sees, or why kvcore does not keep it."""
    name = type(spec).__name__
    if name == "UniformTypeKVCacheSpecs":
        inner = {type(one).__name__ for one in spec.kv_cache_specs.values()}
        if inner <= _FULL:
            return FullAttention(spec.block_size)
        return f"layers of several kinds in a group ({', '.join(sorted(inner))})"
    if name in _FULL:
        return FullAttention(spec.block_size)
    if getattr(spec, "extra_retained_tokens", 0):
        return "windows that keep more for drafts"
    if name == "SlidingWindowSpec":
        if spec.sliding_window <= spec.block_size:
            return f"a window of {spec.sliding_window} in blocks of {spec.block_size} tokens"
        return SlidingWindow(spec.sliding_window, spec.block_size)
    if name == "ChunkedLocalAttentionSpec":
        return ChunkedLocal(spec.attention_chunk_size, spec.block_size)
    return f"layers of the kind {name}"
