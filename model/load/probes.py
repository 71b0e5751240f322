"""Probes: find out what a network does by running it, before any request and any cache.

Decides: what each layer stores and sees, from one pass in which the network builds its masks; and
that the queries, keys and values of a token depend only on the token and its position, from two
passes in which each token is alone. This is what allows a step to compute tokens of many requests
side by side and in chunks. Rotary factors that follow the longest text of a batch, positions that a
layer counts itself, convolutions and recurrent states all fail it.

A layer that passes the very tensors of an earlier layer to its attention, and sees the same, reads
that layer's keys and values: it stores nothing.

Transformers passes masks to its mask interface as functions of two positions. Evaluated at a few
places, such a function shows what it is: full causal attention, a sliding window or chunks. The
mask counts, not what the configuration says.

Invariants: a network that passes both probes gives the same result with a paged cache as alone; an
error names the class of the network, the layer and the reason; any other mask is refused, and one
that looks into the future is called bidirectional.

Does not know: caches, requests, which backend will run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

import backends
from kvcore.adapters.recurrent import RecurrentPass, cache_argument, is_divided
from model.attention.attention import IMPLEMENTATION, attend
from model.attention.compressed import Completed, none_complete
from model.attention.positions import RowsElsewhere, report_positions
from model.attention.rope import RopeSwitch
from model.caches.layout import EntriesShape, IndexShape, LayerShape
from model.errors import UnsupportedModelError

_PROBING = "kvcore_probing"
"""An attention implementation whose layers get masks and show them to the pass."""

_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From batch, head, query and key (int64 tensors of one shape): whether the query sees the key."""

_FAR = 1 << 22  # farther than any window or chunk reaches


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """The keys at or before its position that a query sees: all, or some of them.

    Attributes:
        window: the last `window` keys, the one at its position included; None: no window.
        chunk: the keys of the query's chunk of `chunk` tokens; None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window}"
        return "full attention" if self.chunk is None else f"chunks of {self.chunk}"

    def first(self, position: int) -> int:
        """Return the lowest position that a query at `position` sees. O(1)."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


def find_mask_pattern(mask: _MaskFunction, device: torch.device) -> MaskPattern:
    """Return the pattern of a mask: the keys that each query sees. A few dozen calls of the mask.

    Args:
        mask: as Transformers passes it to a mask interface.
        device: of the mask's own tensors.

    Raises:
        UnsupportedModelError: it is not causal, or not a pattern that a paged cache supports.
    """
    probe = _MaskProbe(mask, device)
    if any(probe.sees([0, 5, _FAR], [1, 6, _FAR + 1])):
        raise UnsupportedModelError("wanted causal attention, its mask is bidirectional")
    count = probe.count(_FAR)
    if count == _FAR + 1:
        pattern = MaskPattern()
    elif probe.count(_FAR - 1) == count > 0:
        pattern = MaskPattern(window=count)
    else:  # the query before the first one of this chunk is the last one of its own chunk
        pattern = MaskPattern(chunk=max(1, probe.count(_FAR - count)))
    size = pattern.window or pattern.chunk or 64
    queries, keys = _places(pattern, size)
    wanted = [pattern.first(q) <= key <= q for q, key in zip(queries, keys, strict=True)]
    if probe.sees(queries, keys) != wanted:
        raise UnsupportedModelError(
            "wanted full attention, a sliding window or chunks, its mask is none of them"
        )
    return pattern


class _MaskProbe:
    """Evaluates a mask at single places."""

    def __init__(self, mask: _MaskFunction, device: torch.device) -> None:
        self._mask = mask
        self._device = device

    def sees(self, queries: Sequence[int], keys: Sequence[int]) -> list[bool]:
        places = torch.tensor([queries, keys], dtype=torch.int64, device=self._device)
        zeros = torch.zeros_like(places[0])
        try:
            seen: list[bool] = self._mask(zeros, zeros, *places).expand(len(queries)).tolist()
        except IndexError as error:  # of a tensor with an element for each token of the pass
            raise UnsupportedModelError(
                "wanted a mask that follows from positions alone, it reads a value of each token"
            ) from error
        return seen

    def count(self, query: int) -> int:
        """Return the number of keys that a query sees, if they are the last ones."""
        seen, unseen = 0, query + 2  # at a distance of seen - 1, and of unseen - 1
        while unseen - seen > 1:
            middle = (seen + unseen) // 2
            if middle <= query + 1 and self.sees([query], [query - middle + 1])[0]:
                seen = middle
            else:
                unseen = middle
        return seen


def _places(pattern: MaskPattern, size: int) -> tuple[list[int], list[int]]:
    """Return queries and keys at which a mask of another pattern would differ."""
    around = [0, 1, 2, 3, size // 2, size - 2, size - 1, size, size + 1, 2 * size - 1, 2 * size]
    around += [2 * size + 1, 3 * size + size // 2, 7 * size - 1, 7 * size, _FAR]
    queries, keys = [], []
    for query in (query for query in around if query >= 0):
        first = pattern.first(query)
        places = {0, 1, first - 1, first, first + 1, (first + query) // 2, query - 1, query}
        places |= {query + 1, query + 2, query + size}
        for key in sorted(place for place in places if place >= 0):
            queries.append(query)
            keys.append(key)
    return queries, keys


@dataclass(slots=True)
class Probe:
    """A pass that stores nothing and notes what each layer would store and see."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    soft_caps: dict[int, float | None] = field(default_factory=dict)
    patterns: dict[int, MaskPattern] = field(default_factory=dict)
    known: dict[object, MaskPattern] = field(default_factory=dict)  # by mask function
    makers: dict[object, int] = field(default_factory=dict)  # the first layer with these tensors
    kept: list[Tensor] = field(default_factory=list)  # so that no later tensor has their memory
    indexes: dict[int, IndexShape] = field(default_factory=dict)
    compressed: dict[int, EntriesShape] = field(default_factory=dict)
    index_dtypes: dict[int, torch.dtype] = field(default_factory=dict)  # of compressed keys

    def see(self, layer: int, mask: Tensor | None) -> None:
        """Note what the mask of a layer lets it see.

        Raises:
            UnsupportedModelError: a paged cache cannot replace the mask.
        """
        if mask is None:
            raise UnsupportedModelError(f"layer {layer} has no mask: what it sees is unknown")
        made = getattr(mask, "made_by", None)
        if made is None:
            raise UnsupportedModelError(f"layer {layer} makes a mask of its own")
        if made not in self.known:
            try:
                self.known[made] = find_mask_pattern(made, mask.device)
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"layer {layer}: {error}") from error
        self.patterns[layer] = self.known[made]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Note the shape of the layer; return zeros."""
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} attends twice in one pass")
        pattern = self.patterns.get(layer, MaskPattern())
        if terms.window not in (None, pattern.window):
            raise UnsupportedModelError(
                f"layer {layer} asks for a window of {terms.window}, and its mask is {pattern}"
            )
        if chosen is not None and pattern != MaskPattern():
            raise UnsupportedModelError(
                f"layer {layer} attends to tokens that an index chooses, wanted them chosen from "
                f"all that come before, its mask is {pattern}"
            )
        is_latent = value.shape[2] < key.shape[2] or (
            key.shape[1] == 1 and _memory(key) == _memory(value)
        )
        maker = self.makers.setdefault((_memory(key), _memory(value), pattern), layer)
        self.kept += key, value
        self.shapes[layer] = LayerShape(
            key.shape[1],
            key.shape[2],
            key.dtype,
            pattern.window,
            pattern.chunk,
            value_dim=value.shape[2] if is_latent else None,
            reads=None if maker == layer else maker,
            index=self.indexes.get(layer),
            entries=self.compressed.get(layer),
        )
        self.soft_caps[layer] = terms.soft_cap
        return query.new_zeros(*query.shape[:2], value.shape[2])

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Note the shape of the index; return zeros."""
        del query, weights
        self.indexes[layer] = IndexShape(key.shape[2], key.dtype, count)
        return key.new_zeros((len(key), count), dtype=torch.int32)

    @property
    def entries(self) -> "Probe":
        """Itself, which notes what is compressed. O(1)."""
        return self

    def complete(self, layer: int, parts: Tensor, rate: int, *, is_index: bool) -> Completed:
        """Note the parts; nothing is complete."""
        if is_index:
            self.index_dtypes[layer] = parts.dtype
        else:
            count = parts.shape[1]
            self.compressed[layer] = EntriesShape(rate, count, reach=rate * count // 2)
        return none_complete(parts, rate)

    def store_entries(self, layer: int, rows: Tensor, *, is_index: bool) -> None:
        """Do nothing: no entry is complete."""

    def choose_entries(self, layer: int, query: Tensor, weights: Tensor, count: int) -> None:
        """Note the shape of the index of compressed keys."""
        del weights
        index = IndexShape(query.shape[2], self.index_dtypes[layer], count)
        self.compressed[layer] = replace(self.compressed[layer], index=index)


def _memory(tensor: Tensor) -> object:
    """Return a key, equal for tensors that are the same numbers in memory, unchanged between."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001  # the meta device has no addresses
    place = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return (*place, tensor._version)  # noqa: SLF001  # counts changes in place


class _Mask(Tensor):
    """A mask that keeps its function when it is sliced or cast."""

    made_by: _MaskFunction | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Call an operator; a mask that is sliced, cast or moved keeps its function."""
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and getattr(func, "__name__", "") in _KEEPING:
            result.made_by = getattr(args[0], "made_by", None)
        return result


_KEEPING = {"__getitem__", "to", "contiguous", "clone", "unsqueeze", "expand", "narrow"}


def _build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *_: object,
    mask_function: _MaskFunction,
    device: torch.device | str = "cpu",
    **__: object,
) -> Tensor:
    """Build a mask that notes its pattern; Transformers calls this for each kind of mask."""
    shape = (batch_size, 1, q_length, kv_length)
    mask = torch.ones(shape, dtype=torch.bool, device=device).as_subclass(_Mask)
    mask.made_by = mask_function
    return mask


def _attend_probing(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: Probe | None = None,
    **asked: Any,  # noqa: ANN401  # as `attend` takes them
) -> tuple[Tensor, None]:
    """Note the mask, then compute attention as `attend` does."""
    layer = getattr(module, "layer_idx", None)
    if paged is not None and layer is not None:
        paged.see(layer, attention_mask)
        attention_mask = None
    return attend(module, query, key, value, attention_mask, paged=paged, **asked)


AttentionInterface.register(_PROBING, _attend_probing)
AttentionMaskInterface.register(_PROBING, _build_mask)


@contextmanager
def _probing_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch a model to the attention that probes; afterwards it has our paged attention."""
    model.set_attn_implementation(_PROBING)
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def probe_layers(
    model: PreTrainedModel, device: torch.device, *, keeps_states: bool = False
) -> dict[int, LayerShape]:
    """Run a token through the model and note what every layer stores, reads and sees. One pass.

    This also proves that every layer attends through our function. If some keep states, others need
    not attend; `check_tokens_alone` finds those with states that we do not know of. A layer reads
    the keys and values of another one only if a second pass, of two tokens, shows it too; otherwise
    it stores its own.

    Args:
        model: left with our attention.
        device: of the model; the meta device works for a model without weights.
        keeps_states: True if some layers keep states (`recurrence.py`).

    Returns:
        For the index of each layer that attends what it stores.

    Raises:
        UnsupportedModelError: the model cannot run with a paged cache, and why.
    """
    name, probe = type(model).__name__, run_probe(model, device, 1)
    config = model.config.get_text_config()
    num_layers: int = config.num_hidden_layers
    missing = sorted(set(range(num_layers)) - set(probe.shapes))
    if (missing and not keeps_states) or max(probe.shapes, default=0) >= num_layers:
        raise UnsupportedModelError(
            f"{name}: wanted every one of {num_layers} layers to attend through "
            f"Transformers' AttentionInterface with a cache of its own, layers {missing} do not"
        )
    _check_declared(name, config, probe)
    shapes = {layer: probe.shapes[layer] for layer in sorted(probe.shapes)}
    if any(shape.reads is not None for shape in shapes.values()):
        again = run_probe(model, device, 2).shapes
        for layer, shape in shapes.items():
            if again[layer].reads != shape.reads:
                shapes[layer] = replace(shape, reads=None)
    return shapes


def run_probe(model: PreTrainedModel, device: torch.device, num_tokens: int) -> Probe:
    """Run tokens through the model, as a step does. One pass; it has our attention afterwards."""
    name = type(model).__name__
    probe = Probe()
    tokens = torch.arange(num_tokens, device=device)[None]
    # On the meta device no value can be read: a padding mask keeps Transformers from trying to.
    mask = torch.ones_like(tokens) if device.type == "meta" else None
    try:
        with _probing_attention(model), torch.no_grad():
            model(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=mask,
                use_cache=False,
                logits_to_keep=tokens[0],
                paged=probe,
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error
    except Exception as error:
        if device.type == "meta":  # not every network runs on it
            raise
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise UnsupportedModelError(
            f"{name}: Transformers' own class fails on this configuration: {reason}"
        ) from error
    return probe


@dataclass(slots=True)
class _Pairs(Probe):
    """A pass that notes for each layer which pairs of its tokens see each other."""

    num_tokens: int = 0
    seen: dict[int, list[list[bool]]] = field(default_factory=dict)

    def see(self, layer: int, mask: Tensor | None) -> None:
        """Evaluate the mask of a layer for all pairs."""
        made = getattr(mask, "made_by", None)
        if mask is None or made is None:
            raise UnsupportedModelError(f"layer {layer} makes a mask of its own")
        probe, places = _MaskProbe(made, mask.device), range(self.num_tokens)
        self.seen[layer] = [probe.sees([query] * len(places), places) for query in places]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Return zeros: the shape of the layer is known."""
        del layer, key, terms, chosen
        return query.new_zeros(*query.shape[:2], value.shape[2])


def seen_pairs(
    model: PreTrainedModel, tokens: Tensor, **more: object
) -> dict[int, list[list[bool]]]:
    """Return for each layer the tokens that each token sees. One pass, with our attention after it.

    Args:
        model: computes it.
        tokens: int64 [1, num_tokens].
        more: further arguments of the pass.

    Raises:
        UnsupportedModelError: a mask does not show it.
    """
    probe = _Pairs(num_tokens=tokens.shape[1])
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    with _probing_attention(model), torch.no_grad():
        model(input_ids=tokens, position_ids=positions, use_cache=False, paged=probe, **more)
    return probe.seen


def _check_declared(name: str, config: PreTrainedConfig, probe: Probe) -> None:
    """Refuse layers that do not do what their configuration says.

    Transformers' own cache keeps what the configuration declares: if a mask lets a query see more,
    `generate` gives other tokens with its cache than without, and ours can equal only one of them.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    for layer, shape in probe.shapes.items():
        if kinds is not None and kinds[layer] != "sliding_attention":
            continue
        if window is not None and shape.window != window:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for a window of {window}, and its mask is "
                f"{probe.patterns[layer]}"
            )
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    for layer, asked in probe.soft_caps.items():
        if asked != soft_cap:
            raise UnsupportedModelError(
                f"{name}: layer {layer} is configured for a soft cap of {soft_cap} and "
                f"asks its attention for {asked}"
            )


_Rows = dict[tuple[int, tuple[str, ...]], tuple[Tensor, ...]]
"""The tensors that a pass has noted, by layer and the names of its parts."""


class _Alone:
    """A pass in which no token sees another; notes query, key and value of one row.

    With `elsewhere` it also notes what they would be in a row far behind.
    """

    def __init__(self, row: int, elsewhere: RowsElsewhere | None = None) -> None:
        self._row = row
        self._elsewhere = elsewhere
        self.noted: _Rows = {}
        self.noted_elsewhere: _Rows = {}
        self.entries = self

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        terms: backends.AttentionTerms,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Note a row; return something different for every row."""
        del chosen
        self._note(layer, _PARTS, query, key, value)
        group = query.shape[1] // key.shape[1]
        size = value.shape[2]
        own = (key[..., :size] + value).repeat_interleave(group, 1)
        return query[..., :size] * min(terms.scale, 1.0) + own

    def choose(self, layer: int, query: Tensor, weights: Tensor, key: Tensor, count: int) -> Tensor:
        """Note a row of an index; choose anything."""
        self._note(layer, _INDEX_PARTS, query, weights, key)
        return key.new_zeros((len(key), count), dtype=torch.int32)

    def complete(self, layer: int, parts: Tensor, rate: int, *, is_index: bool) -> Completed:
        """Note a row of what compressed keys are made of; nothing is complete."""
        self._note(layer, _INDEX_ENTRY_PARTS if is_index else _ENTRY_PARTS, parts)
        return none_complete(parts, rate)

    def store_entries(self, layer: int, rows: Tensor, *, is_index: bool) -> None:
        """Do nothing: no entry is complete."""

    def choose_entries(self, layer: int, query: Tensor, weights: Tensor, count: int) -> None:
        """Note a row of an index."""
        del count
        self._note(layer, _INDEX_PARTS[:2], query, weights)

    def _note(self, layer: int, names: tuple[str, ...], *parts: Tensor) -> None:
        """Note a row of what a layer passes on."""
        self.noted[layer, names] = tuple(part[self._row].float() for part in parts)
        if self._elsewhere is not None:
            twins = (self._elsewhere.twin(part) for part in parts)
            self.noted_elsewhere[layer, names] = tuple(part[self._row].float() for part in twins)


_TOLERANCES = {torch.float32: 0.02, torch.float64: 0.02}
"""The relative error allowed between two passes; other dtypes round more."""
_SAME_SHAPE_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The same for two passes of one token each, which round alike; 0.02 in other dtypes."""
_TOKENS = ((11, 5, 7), (2, 9, 3), (13, 1, 8))
_PARTS = ("queries", "keys", "values")
_INDEX_PARTS = ("index queries", "index weights", "index keys")
_ENTRY_PARTS, _INDEX_ENTRY_PARTS = ("parts of entries",), ("parts of index entries",)


def check_tokens_alone(
    model: PreTrainedModel,
    device: torch.device,
    num_positions: int,
    rope: RopeSwitch | None = None,
) -> None:
    """Check that the result of a token depends only on the token and its position. A few passes.

    A token is run beside a distant one, and beside a near one in the other order. Where rounding
    sends it to other experts it may differ once, so a network fails only if every token differs.

    The position has to come from `position_ids`: at the last position a token is run as `generate`
    runs it, with a cache that reports how many tokens came before, and in another row. A network
    that computes positions from cache and row gets such a cache in every later pass.

    Args:
        model: has our attention.
        device: of the model.
        num_positions: the most that a request can have.
        rope: chooses its rotary factors; a distant token belongs to a long text.

    Raises:
        UnsupportedModelError: names the layer and what differs.
    """
    last = num_positions - 1
    reason = _misplaced(model, device, last, rope)
    if reason:
        report_positions(model)
        reason = _misplaced(model, device, last, rope)
    edge = last if rope is None else rope.num_tokens - 1
    # Near the beginning no text is long yet; at later positions a rotation differs more.
    for near in sorted({min(3, last), min(500, last // 2, edge)}):
        reasons = _reasons(model, device, near, last, rope)
        if all(reasons):
            raise UnsupportedModelError(
                f"{type(model).__name__}: wanted layers that compute each token from itself and "
                f"its position, {reasons[0]}: a batch of other requests would change its result"
            )
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__}: wanted layers that take a token's position from "
            f"position_ids, {reason}: its result would change with the step that computes it"
        )


def _misplaced(
    model: PreTrainedModel, device: torch.device, position: int, rope: RopeSwitch | None
) -> str:
    """Return "" if only `position_ids` gives layers their positions, or else a phrase.

    The phrase names a layer, and the other input that its result depends on.
    """
    vocab_size = model.config.get_text_config().vocab_size
    is_long = torch.ones((1, 1), dtype=torch.bool, device=device)
    tolerance = _SAME_SHAPE_TOLERANCES.get(model.dtype, 0.02)
    reason = ""
    for numbers in _TOKENS:
        token = [numbers[0] % vocab_size]
        cached, alone = _Alone(row=0), _Alone(row=0, elsewhere=(rows := RowsElsewhere(1, position)))
        with nullcontext() if rope is None else rope.choosing(is_long):
            length = RecurrentPass.of_fresh([1], position)
            _run(model, device, token, [position], cached, **{cache_argument(model): length})
            with rows:
                _run(model, device, token, [position], alone)
        reason = _difference(
            cached.noted, alone.noted, tolerance, "the length that a cache reports"
        ) or _difference(alone.noted, alone.noted_elsewhere, tolerance, "its row in a step")
        if not reason:
            break
    return reason


def _reasons(
    model: PreTrainedModel, device: torch.device, near: int, far: int, rope: RopeSwitch | None
) -> list[str]:
    """Return for each tried token the other inputs of its result; "" for the last one: none."""
    vocab_size = model.config.get_text_config().vocab_size
    is_long = torch.tensor([[False, True]], device=device)
    reasons: list[str] = []
    for numbers in _TOKENS:
        token, first, second = (number % vocab_size for number in numbers)
        with nullcontext() if rope is None else rope.choosing(is_long):
            one = _noted(model, device, [token, first], [near, far], row=0)
        two = _noted(model, device, [second, token], [0, near], row=1)
        tolerance = _TOLERANCES.get(model.dtype, 0.25)
        reasons.append(_difference(one, two, tolerance, "other tokens"))
        if not reasons[-1]:
            break
    return reasons


def _noted(
    model: PreTrainedModel,
    device: torch.device,
    tokens: list[int],
    positions: list[int],
    row: int,
) -> _Rows:
    alone = _Alone(row)
    _run(model, device, tokens, positions, alone)
    return alone.noted


def _run(
    model: PreTrainedModel,
    device: torch.device,
    tokens: list[int],
    positions: list[int],
    alone: _Alone,
    **more: object,
) -> None:
    if is_divided(model):  # each token is a sequence
        more = {cache_argument(model): RecurrentPass.of_fresh([1] * len(tokens))} | more
    with torch.inference_mode():
        model(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.arange(len(tokens), device=device),
            paged=alone,
            **more,
        )


def _difference(one: _Rows, two: _Rows, tolerance: float, cause: str) -> str:
    for layer, names in sorted(one):
        parts = zip(names, one[layer, names], two[layer, names], strict=True)
        for name, left, right in parts:
            if float((left - right).norm()) > tolerance * float(left.norm()):
                return f"the {name} of layer {layer} follow {cause} too"
    return ""
