"""Which layers share a block table, and which share memory: the KV cache groups of hybrid models.

Layers that see the same part of the past form a kind: everything, a window, or chunks of one size.
The layers of a kind are divided into groups of equal depth. A block belongs to one group at a time
and holds a token's keys and values for every layer of that group; place `i` of every group is the
same memory, because two groups never hold one block. So the depth is what a block costs, and a kind
that does not fill its groups wastes the rest. (vLLM's hybrid cache manager introduced this.)

A layer may attend to compressed keys too (`model/attention/compressed.py`): entries of several
tokens each. These are a layer here that lies in a group of its own, whose blocks hold as many rows
as others and so more tokens, in the place of the layer; what its tokens contribute is some layers
with a window.

A layer may read the keys and values of an earlier layer instead of computing its own (Gemma 3n,
Gemma 4). It has that layer's group and place, stores nothing and costs no memory.

Recurrent layers keep a state per sequence in pages of the same pool
(`kvcore/adapters/recurrent`). Then all places of a block are one page, as a piece of a state is.

Decides: the depth: the fewest groups such that no kind wastes more than an eighth of its own size.

Invariants: every layer that stores has a group and a place of its own; the layers of a group see
the same; entries have the place of their layer; groups of full attention come first, then windows
from the smallest up, then chunks, then entries.

Does not know: memory, blocks, which network it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest

import torch

import backends
import kvcore
from kvcore.adapters.recurrent import (
    StateShape,
    aligned,
    fitting_block_size,
    layer_bytes,
    num_pieces,
)
from model.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class IndexShape:
    """What an index stores for a token: one key.

    Attributes:
        dim: numbers of it.
        dtype: of a number.
        count: tokens that it chooses for a query.
    """

    dim: int
    dtype: torch.dtype
    count: int

    @property
    def slot(self) -> backends.KVLayout:
        """What a slot of its cache holds. O(1)."""
        return backends.KVLayout(1, self.dim, self.dim, self.dtype, is_latent=True)


@dataclass(frozen=True, slots=True)
class EntriesShape:
    """The compressed keys of a layer.

    Attributes:
        rate: tokens per entry.
        num_parts: rows, as wide as a key, that a token contributes.
        reach: the tokens that an entry is made of: `rate`, or twice as many.
        index: that chooses entries; its own are made of as many parts. None: all are attended to.
    """

    rate: int
    num_parts: int
    reach: int
    index: IndexShape | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What an attention layer stores for a token, and how far it looks back.

    Attributes:
        num_kv_heads: heads of keys, and of values.
        head_dim: elements of each.
        dtype: of an element.
        window: the tokens that a query sees, its own included; None: all.
        chunk: it sees only those of its own chunk of `chunk` tokens; None: no chunks.
        value_dim: of a latent, one row per token whose first `value_dim` numbers are the value;
            None: it has keys and values.
        reads: an earlier layer of the network whose keys and values it reads, and which sees the
            same; None: it stores its own.
        index: that chooses the tokens a query attends to, with keys of its own; None: the layer has
            none, though it may share the choice of an earlier one.
        entries: compressed keys that a query attends to beside the window; None: there are none.
        rate: tokens per row: 1, but for a layer of entries.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    chunk: int | None = None
    value_dim: int | None = None
    reads: int | None = None
    index: IndexShape | None = None
    entries: EntriesShape | None = None
    rate: int = 1

    @property
    def slot(self) -> backends.KVLayout:
        """What a slot of its cache holds. O(1)."""
        value_dim, is_latent = self.value_dim or self.head_dim, self.value_dim is not None
        return backends.KVLayout(
            self.num_kv_heads, self.head_dim, value_dim, self.dtype, is_latent=is_latent
        )

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each tensor of the layer, index keys last. O(1)."""
        return self.slot.row_bytes + (() if self.index is None else self.index.slot.row_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one row: its key, value and index key. O(1)."""
        return sum(self.row_bytes)

    def beside(self) -> Iterator["LayerShape"]:
        """The layers that hold its parts, then the one that holds its entries. O(parts)."""
        if self.entries is None:
            return
        own = replace(self, index=self.entries.index, entries=None)
        part = replace(own, window=self.entries.reach)
        yield from (part for _ in range(self.entries.num_parts))
        yield replace(own, window=None, rate=self.entries.rate)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where the keys and values of each layer are.

    Attributes:
        layers: what each layer that attends stores.
        numbers: for the index of each of them in the network its index in `layers`.
        windows: for each group the window of its layers; None: no window.
        chunks: for each group the chunk of its layers; None: no chunks.
        rates: for each group the tokens per row of its layers.
        places: for each layer its group, and its place in the group: for one that stores nothing
            those of the layer that it reads.
        place_bytes: for each place the bytes of a token in each of its tensors (keys and values, or
            latents; then index keys), of the largest layer there.
        states: what recurrent layers keep of a sequence; empty: there are none.
        beside: for a layer with compressed keys the layers of its parts, then that of its entries.
    """

    layers: tuple[LayerShape, ...]
    numbers: dict[int, int]
    windows: tuple[int | None, ...]
    chunks: tuple[int | None, ...]
    rates: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    place_bytes: tuple[tuple[int, ...], ...]
    states: tuple[StateShape, ...] = ()
    beside: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def own_layers(self) -> tuple[LayerShape, ...]:
        """The layers of the network, in its order. O(num_layers)."""
        return tuple([self.layers[number] for number in self.numbers.values()])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token in one block: of every place. O(num_places)."""
        return sum(map(sum, self.place_bytes))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers that store, if each keeps it. O(num_layers)."""
        return sum(layer.token_bytes // layer.rate for layer in self.layers if layer.reads is None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence. O(states)."""
        return sum(layer_bytes(self.states))

    def kv_bytes(self, num_blocks: int, block_size: int) -> int:
        """Bytes of all caches of `num_blocks` blocks. O(num_places)."""
        if self.states:
            return num_blocks * self.page_bytes(block_size)
        return num_blocks * block_size * self.slot_bytes

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a block whose places lie together; of a layer's state if no layer attends.

        O(num_places + states).
        """
        if not self.layers:
            return max(layer_bytes(self.states))
        return sum(aligned(block_size * size) for sizes in self.place_bytes for size in sizes)

    def fitting_block_size(self, block_size: int) -> int:
        """The block size to use where this one is asked for: larger if states need it.

        O(recurrent layers ** 2).
        """
        if not self.states:
            return block_size
        return fitting_block_size(self.states, block_size, self.slot_bytes)

    def blocks_per_state(self, block_size: int) -> int:
        """Blocks that the state of a sequence takes; 0: there are no states. O(states)."""
        return num_pieces(self.states, self.page_bytes(block_size)) if self.states else 0

    def groups(self, block_size: int) -> tuple[kvcore.LayerGroup, ...]:
        """The KV cache groups for `kvcore`; that of the states is the last. O(num_groups).

        Raises:
            InvalidArgumentError: a block would hold tokens of two chunks.
        """
        for chunk in self.chunks:
            if chunk is not None and chunk % block_size:
                raise InvalidArgumentError(
                    f"block_size: wanted a divisor of {chunk}, the chunk size of layers of this "
                    f"network, got {block_size}"
                )
        groups: list[kvcore.LayerGroup] = [
            _group(window, chunk, block_size * rate)
            for window, chunk, rate in zip(self.windows, self.chunks, self.rates, strict=True)
        ]
        if self.states:
            groups.append(kvcore.RecurrentState(self.blocks_per_state(block_size)))
        return tuple(groups)


def _group(window: int | None, chunk: int | None, block_size: int) -> kvcore.LayerGroup:
    if window is not None:
        return kvcore.SlidingWindow(window, block_size)
    if chunk is not None:
        return kvcore.ChunkedLocal(chunk, block_size)
    return kvcore.FullAttention(block_size)


def plan_layout(
    layers: Sequence[LayerShape],
    indices: Sequence[int] | None = None,
    states: Sequence[StateShape] = (),
) -> CacheLayout:
    """Give every layer its group and place. O(num_layers ** 2).

    Args:
        layers: those that attend, in the order of the network; none only where there are states.
        indices: the index of each in the network; None: all layers attend.
        states: what recurrent layers keep of a sequence.
    """
    if not layers:  # a group for the tokens
        return CacheLayout((), {}, (None,), (None,), (1,), (), (), tuple(states))
    every, beside = _with_those_beside(layers)
    kinds: dict[_Kind, list[int]] = {}
    for number, layer in enumerate(every):
        if layer.reads is None:
            kind = (layer.rate, layer.chunk or 0, layer.window or 0)
            kinds.setdefault(kind, []).append(number)
    ordered = sorted(kinds.items())
    depth = _depth([len(numbers) for _, numbers in ordered])
    groups: list[_Kind] = []
    places = [(0, 0)] * len(every)
    owners = {numbers[-1]: number for number, numbers in beside.items()}
    for kind, numbers in ordered:
        wanted = [places[owners[number]][1] if number in owners else None for number in numbers]
        found = _in_groups(wanted, depth, len(groups))
        for number, at in zip(numbers, found, strict=True):
            places[number] = at
        groups += [kind] * (1 + max(group for group, _ in found) - len(groups))
    numbers_of = {index: number for number, index in enumerate(indices or range(len(layers)))}
    for number, layer in enumerate(layers):
        if layer.reads is not None:
            places[number] = places[numbers_of[layer.reads]]
    rates, *others = zip(*groups, strict=True)
    chunks, windows = ([size or None for size in sizes] for sizes in others)
    return CacheLayout(
        tuple(every),
        numbers_of,
        tuple(windows),
        tuple(chunks),
        rates,
        tuple(places),
        _place_bytes(every, places, depth),
        tuple(states),
        beside,
    )


def _with_those_beside(
    layers: Sequence[LayerShape],
) -> tuple[list[LayerShape], dict[int, tuple[int, ...]]]:
    """The layers, then those that hold parts and entries; and `CacheLayout.beside`."""
    every, beside = [*layers], dict[int, tuple[int, ...]]()
    for number, layer in enumerate(layers):
        begin = len(every)
        every += layer.beside()
        if len(every) > begin:
            beside[number] = tuple(range(begin, len(every)))
    return every, beside


def _place_bytes(
    layers: Sequence[LayerShape], places: Sequence[tuple[int, int]], depth: int
) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = [()] * depth
    for layer, (_, place) in zip(layers, places, strict=True):
        if layer.reads is None:
            sizes = zip_longest(found[place], layer.row_bytes, fillvalue=0)
            found[place] = tuple(max(pair) for pair in sizes)
    return tuple(found)


_Kind = tuple[int, int, int]
"""What the layers of a group have in common: rate, chunk and window; 0: none."""


def _in_groups(wanted: Sequence[int | None], depth: int, first: int) -> list[tuple[int, int]]:
    """Groups from `first` on, and places below `depth`, for layers of a kind.

    Args:
        wanted: of each layer the place; None: the next one.
        depth: places of a group.
        first: the number of the first group.
    """
    taken, found = set[tuple[int, int]](), list[tuple[int, int]]()
    for number, place in enumerate(wanted):
        at = (first + number // depth, number % depth)
        if place is not None:
            at = next((group, place) for group in count(first) if (group, place) not in taken)
        taken.add(at)
        found.append(at)
    return found


def _depth(sizes: Sequence[int]) -> int:
    """The layers per group, for kinds with these numbers of layers."""
    best = (sum(sizes), 0, 1)  # one layer per group wastes nothing
    for depth in range(2, max(sizes) + 1):
        counts = [-(-size // depth) for size in sizes]
        waste = [count * depth - size for count, size in zip(counts, sizes, strict=True)]
        if all(8 * lost <= size for lost, size in zip(waste, sizes, strict=True)):
            best = min(best, (sum(counts), sum(waste), depth))
    return best[2]
