"""Attention to compressed keys: entries that are made of several tokens each (DeepSeek-V4).

Such a layer attends to a window of its latest keys, and to entries: one for every `rate` tokens,
which a module of Transformers, the compressor, makes from what each token contributes (its parts).
The compressor of CSA layers uses the tokens of the entry before too, and has an index that chooses
entries for each query; that of HCA layers has none (section 2.3 of the paper).

A compressor leaves to its cache which entries are complete. Here it gets a stand-in that stores
parts and entries in paged caches: parts as a sliding window, and entries in a layer group whose
blocks hold `rate` times as many tokens (`layout.py`). So both are found by prefix caching, and
written again where draft tokens were rejected. Window and entries lie in the same memory, so a
query attends to both at once, as to a list of slots.

Decides: which entries a step completes, from the positions of its tokens.

Invariants: outside our passes a network is unchanged; the numbers of an entry are computed by
Transformers' own code; a compressor that asks its cache for anything else is refused by name.

Does not know: requests, which backend runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

import backends
from kvcore.adapters.recurrent import CACHE_ARGUMENT, ReportedLength
from model.attention.indexer import Index, hook_layers
from model.caches.kv_caches import KVCaches
from model.caches.layout import CacheLayout
from model.errors import UnsupportedModelError


class Completed(NamedTuple):
    """The parts from which a compressor makes the entries that a step completes.

    Attributes:
        parts: [num_windows, rate, num_parts, dim], of all tokens of the entries that are complete
            now; each run of a sequence begins with the entry before it where entries overlap.
        positions: int64 [num_windows], of the first token of each.
        is_new: bool [num_windows], True for an entry that is to be stored.
    """

    parts: Tensor
    positions: Tensor
    is_new: Tensor


class Entries(Protocol):
    """The part of a pass that compressors call; `layer` is the index of the layer."""

    def complete(self, layer: int, parts: Tensor, rate: int, *, is_index: bool) -> Completed:
        """Store the parts of the step's tokens, and return those of the entries they complete.

        Args:
            layer: index of the layer.
            parts: [num_tokens, num_parts, dim], of keys or of gates; the second half are gates.
            rate: tokens per entry.
            is_index: True if they make entries of the index.
        """
        ...

    def store_entries(self, layer: int, rows: Tensor, *, is_index: bool) -> None:
        """Store the entries that the step completes.

        Args:
            layer: index of the layer.
            rows: [num_entries, dim], in the order of `complete`.
            is_index: True if they are entries of the index.
        """
        ...

    def choose_entries(self, layer: int, query: Tensor, weights: Tensor, count: int) -> None:
        """Choose the `count` entries that each token attends to; see `Attending.choose`."""
        ...


def none_complete(parts: Tensor, rate: int) -> Completed:
    """Return the answer of a pass without caches: no entry is complete. O(1)."""
    nothing = torch.zeros(0, dtype=torch.int64, device=parts.device)
    return Completed(parts.new_zeros((0, rate, *parts.shape[1:])), nothing, nothing.bool())


def follow_compressors(network: nn.Module) -> None:
    """Have layers with a compressor keep what it makes in the pass from now on. O(modules).

    Args:
        network: only passes with the keyword argument `paged` are changed.
    """
    hook_layers(network, "compressor", _stand_in)


def _stand_in(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a layer with a compressor a cache that stands for those of the pass; a hook."""
    paged = kwargs.get("paged")
    if paged is None:
        return None
    cache = _CompressorCache(module, getattr(paged, "entries", None))
    return args, kwargs | {CACHE_ARGUMENT: cache}


class _CompressorCache(ReportedLength):
    """The cache of a layer with a compressor, and that layer's part of it."""

    def __init__(self, module: Any, entries: Entries | None) -> None:  # noqa: ANN401
        super().__init__(0)
        self._module = module
        self._entries = entries
        self._layer: int = module.layer_idx
        self._completed: dict[str, Completed] = {}
        self._overlapping: set[str] = set()

    @property
    def layers(self) -> "_CompressorCache":
        """By index those of all layers; each layer asks for its own. O(1)."""
        return self

    def __getitem__(self, _: int) -> "_CompressorCache":
        return self

    def _owner(self, name: str) -> Any:  # noqa: ANN401
        compressor = self._module.compressor
        owners = {"compressor": compressor, "indexer": getattr(compressor, "indexer", None)}
        if owners.get(name) is None:
            self._refuse(f"keeps {name}")
        return owners[name]

    def store_compression_weights(
        self, name: str, keys: Tensor, gates: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the parts of tokens; return those of the completed entries. `complete`'s cost.

        Returns:
            Keys and gates [1, num_windows * rate, width], and int64 [num_windows]: added to
            multiples of the rate it gives the position of each window.
        """
        owner = self._owner(name)
        dim, rate, width = owner.head_dim, owner.compress_rate, keys.shape[-1]
        if keys.shape != gates.shape or keys.shape[0] != 1 or width not in (dim, 2 * dim):
            self._refuse(f"compresses {list(keys.shape)} with gates of {list(gates.shape)}")
        parts = torch.cat([keys[0], gates[0].to(keys.dtype)], -1).view(keys.shape[1], -1, dim)
        if self._entries is None:
            completed = none_complete(parts, rate)
        else:
            is_index = name == "indexer"
            completed = self._entries.complete(self._layer, parts, rate, is_index=is_index)
        self._completed[name] = completed
        count = len(completed.positions)
        both = completed.parts.reshape(1, count * rate, 2, width)
        begins = rate * torch.arange(count, device=keys.device)
        return both[:, :, 0], both[:, :, 1], completed.positions - begins

    def update_overlap_state(self, name: str, *_: object) -> tuple[None, None]:
        """Keep nothing: the window before the first one is among those given. O(1)."""
        self._overlapping.add(name)
        return None, None

    def update_compressor_states(self, name: str, rows: Tensor) -> "Tensor | Index":
        """Store the entries; return a stand-in for those of the whole text. `store_entries`'s cost.

        Args:
            name: their name in the compressor.
            rows: [1, num_windows, dim].
        """
        owner, completed = self._owner(name), self._completed[name]
        overlaps = completed.parts.shape[2] > 2
        if len(completed.positions) and overlaps != (name in self._overlapping):
            self._refuse("compresses in another way than by single or by overlapping windows")
        is_index = name == "indexer"
        if self._entries is not None:
            self._entries.store_entries(self._layer, rows[0][completed.is_new], is_index=is_index)
        none = rows[:, :0]
        if not is_index:
            return none
        return Index(self._module.compressor, none, self._choose(owner.index_topk))

    def _choose(self, count: int) -> Any:  # noqa: ANN401
        def choose(query: Tensor, weights: Tensor, _: int) -> Tensor:
            if count < 1:
                raise UnsupportedModelError(f"index_topk: wanted at least 1, got {count}")
            if self._entries is not None:
                self._entries.choose_entries(self._layer, query, weights, count)
            return torch.empty((1, len(query), 0), dtype=torch.int64, device=query.device)

        return choose

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asks its cache for {name}")

    def _refuse(self, what: str) -> NoReturn:
        compressor = type(self._module.compressor).__name__
        raise UnsupportedModelError(
            f"wanted a compressor that makes an entry of the parts of as many tokens each, "
            f"{compressor} is another kind: it {what}"
        )


class _Tokens(NamedTuple):
    """The places of a step's tokens, both int64 [num_tokens]."""

    sequences: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class PagedEntries:
    """`Entries` of a pass on paged caches.

    Attributes:
        backend: stores, scores and attends.
        caches: of every layer.
        layout: the group of each layer, of its parts and of its entries.
        batches: for each group the places of the step's tokens.
        kept: results for several layers of the step, and the entries that were chosen for one.
    """

    backend: backends.Backend
    caches: KVCaches
    layout: CacheLayout
    batches: Sequence[backends.PagedBatch]
    kept: dict[object, Any] = field(default_factory=dict)

    def complete(self, layer: int, parts: Tensor, rate: int, *, is_index: bool) -> Completed:
        """Store the parts of the step's tokens, and return those of the entries they complete.

        O(tokens of the completed entries); waits for a GPU.
        """
        *numbers, entries = self.layout.beside[self.layout.numbers[layer]]
        caches: Mapping[int, backends.KVCache] | Sequence[backends.KVCache]
        caches = self.caches.indexes if is_index else self.caches.layers
        for number, rows in zip(numbers, parts.unbind(1), strict=True):
            slots = self._batch(number).slot_mapping
            self.backend.store_kv(rows.unsqueeze(1), None, caches[number], slots)
        sequences, ends, is_new = self._windows(entries, overlaps=parts.shape[1] > 2)
        positions = ends[:, None] - torch.arange(rate - 1, -1, -1, device=ends.device)
        is_there = (positions >= 0)[..., None]
        found = []
        for place, number in enumerate(numbers):
            rows = caches[number].k
            blocks, offsets = positions.clamp(min=0) // rows.shape[1], positions % rows.shape[1]
            of_tokens = rows[self._batch(number).block_table[sequences[:, None], blocks], offsets]
            missing = 0.0 if 2 * place < len(numbers) else float("-inf")  # a gate that is closed
            found.append(torch.where(is_there, of_tokens[:, :, 0], missing))
        return Completed(torch.stack(found, 2), positions[:, 0], is_new)

    def store_entries(self, layer: int, rows: Tensor, *, is_index: bool) -> None:
        """Store the entries that the step completes."""
        *_, entries = self.layout.beside[self.layout.numbers[layer]]
        cache = self.caches.indexes[entries] if is_index else self.caches.layers[entries]
        if len(rows):
            *_, slots = self._completed(entries)
            self.backend.store_kv(rows.unsqueeze(1), None, cache, slots)

    def choose_entries(self, layer: int, query: Tensor, weights: Tensor, count: int) -> None:
        """Choose the entries that each token attends to; all if no token sees more than `count`."""
        number = self.layout.numbers[layer]
        *_, entries = self.layout.beside[number]
        batch, rate = self._batch(entries), self.layout.layers[entries].rate
        most = batch.max_seq_len // rate
        if most <= count:
            return
        sequences, positions = self._tokens()
        # A token before the first entry scores that one all the same: it is not attended to.
        lengths = ((positions + 1) // rate).clamp(min=1).int()
        starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device)
        table = batch.block_table[sequences]
        rows = backends.PagedBatch(starts, lengths, table, batch.slot_mapping, 1, most)
        cache, sparse = self.caches.indexes[entries], self.backend
        self.kept["chosen", number] = backends.choose(
            sparse,  # type: ignore[arg-type]  # `network.py` has checked it
            query.to(cache.k.dtype),
            weights,
            cache,
            rows,
            count,
        )

    def attend(self, number: int, query: Tensor, terms: backends.AttentionTerms) -> Tensor:
        """Attend to a stored window and to entries. O(tokens * slots that each sees).

        Args:
            number: of the layer in the layout.
            query: as `paged_attention` takes it.
            terms: of the layer.
        """
        cache, batch = self.caches.layers[number], self._batch(number)
        seen, first, second = backends.by_slot(cache)
        *_, entries = self.layout.beside[number]
        shape, size = self.layout.layers[entries], cache.k.shape[1]
        positions = self._tokens().positions
        recent, num_recent = self._recent(number, size)
        chosen = self.kept.pop(("chosen", number), None)
        if chosen is None:
            most = batch.max_seq_len // shape.rate
            chosen = torch.arange(most, device=query.device).expand(len(positions), most)
        num_old = ((positions + 1) // shape.rate).clamp(max=chosen.shape[1])
        table = self._batch(entries).block_table
        old = self._slots(table, chosen.clamp(min=0).long(), size)
        # Both lists begin with what there is; the second one joins the end of the first.
        width, at = recent.shape[2], torch.arange(recent.shape[2] + old.shape[2], device=old.device)
        behind = at - num_recent[:, None]
        at = torch.where(behind < 0, at, behind + width).clamp(max=len(at) - 1)
        blocks, offsets = torch.cat([recent, old], 2).gather(2, at.expand(2, -1, -1))
        starts = torch.arange(len(positions) + 1, dtype=torch.int32, device=old.device)
        rows = backends.PagedBatch(
            starts,
            (num_recent + num_old).int(),
            (blocks * first + offsets * second).int(),
            batch.slot_mapping,
            1,
            at.shape[1],
        )
        terms = replace(terms, window=None)
        return self.backend.paged_attention(query, seen, rows, terms)

    def _batch(self, number: int) -> backends.PagedBatch:
        return self.batches[self.layout.places[number][0]]

    def _tokens(self) -> _Tokens:
        """Return the sequence of each token of the step, and its position there."""
        if "tokens" not in self.kept:
            batch = self.batches[0]
            rows = torch.arange(batch.num_tokens, device=batch.device)
            ends = batch.query_start_loc[1:].long()
            sequences = torch.bucketize(rows, ends, right=True)
            positions = rows - ends[sequences] + batch.seq_lens[sequences]
            self.kept["tokens"] = _Tokens(sequences, positions)
        found: _Tokens = self.kept["tokens"]
        return found

    def _completed(self, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the entries that the step completes: sequence, last position, and slot of each."""
        key = ("completed", self.layout.places[entries][0])
        if key not in self.kept:
            batch, rate = self._batch(entries), self.layout.layers[entries].rate
            sequences, positions = self._tokens()
            is_last = (positions % rate == rate - 1) & (batch.slot_mapping >= 0)
            (places,) = is_last.nonzero(as_tuple=True)
            slots = batch.slot_mapping[places] // rate
            self.kept[key] = (sequences[places], positions[places], slots)
        found: tuple[Tensor, Tensor, Tensor] = self.kept[key]
        return found

    def _windows(self, entries: int, *, overlaps: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return a compressor's windows: sequence, last position, and True if one is new.

        Where windows overlap, a new one whose predecessor is not new comes behind that one.
        """
        whose, ends, _ = self._completed(entries)
        is_new = torch.ones_like(whose, dtype=torch.bool)
        if not overlaps or not len(whose):
            return whose, ends, is_new
        key = ("windows", self.layout.places[entries][0])
        if key not in self.kept:
            rate = self.layout.layers[entries].rate
            follows = (whose[1:] == whose[:-1]) & (ends[1:] == ends[:-1] + rate)
            begins = torch.cat([is_new[:1], ~follows])
            counts = 1 + begins.long()
            is_new = torch.ones(int(counts.sum()), dtype=torch.bool, device=ends.device)
            is_new[(counts.cumsum(0) - 2)[begins]] = False
            whose, ends = whose.repeat_interleave(counts), ends.repeat_interleave(counts)
            self.kept[key] = (whose, torch.where(is_new, ends, ends - rate), is_new)
        found: tuple[Tensor, Tensor, Tensor] = self.kept[key]
        return found

    def _recent(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Return each token's window: [2, num_tokens, width] blocks and offsets, their number."""
        group, window = self.layout.places[number][0], self.layout.layers[number].window
        key = ("recent", group)
        if key not in self.kept:
            batch, positions = self.batches[group], self._tokens().positions
            width = min(window or batch.max_seq_len, batch.max_seq_len)
            before = torch.arange(width, device=positions.device)
            seen = (positions[:, None] - before).clamp(min=0)
            slots = self._slots(batch.block_table, seen, size)
            self.kept[key] = slots, (positions + 1).clamp(max=width)
        found: tuple[Tensor, Tensor] = self.kept[key]
        return found

    def _slots(self, table: Tensor, rows: Tensor, size: int) -> Tensor:
        """Return blocks and offsets of rows of each token's sequence: int64 [2, *rows.shape]."""
        sequences = self._tokens().sequences[:, None]
        return torch.stack([table[sequences, rows // size].long(), rows % size])
