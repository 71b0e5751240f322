"""A model of the GPU's memory: for each slot of each block, the prefix that it was computed from.

Every prefix (a tenant, an epoch, a layer group, and tokens up to some position) has a number; KV is
right for a request at a position if and only if the number in that slot is the request's own.
Nothing here calls an allocator.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcore.testing.protocol import Item

Tables = list[list[int]]
"""The block tables of a request, one a layer group."""

Root = tuple[str, int, int]


class Prefixes:
    """Numbers for prefixes: equal prefixes have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable] | Root, int] = {}
        self._made_of: list[tuple[int, Hashable] | Root] = []

    def root(self, tenant: str, epoch: int, group: int = 0) -> int:
        """Return the number of the empty prefix of a tenant in an epoch, for a layer group."""
        return self._number((tenant, epoch, group))

    def follow(self, root: int, tokens: Iterable[Hashable]) -> list[int]:
        """Return the numbers of the prefixes that end after each of the tokens."""
        path = []
        for token in tokens:
            root = self._number((root, token))
            path.append(root)
        return path

    def spell(self, number: int) -> tuple[str, int, list[Hashable]]:
        """Return the tenant, the epoch and the tokens of a prefix."""
        tokens: list[Hashable] = []
        made_of = self._made_of[number]
        while not isinstance(made_of[0], str):
            tokens.append(made_of[1])
            made_of = self._made_of[made_of[0]]
        return made_of[0], made_of[1], tokens[::-1]

    def _number(self, made_of: tuple[int, Hashable] | Root) -> int:
        if made_of not in self._numbers:
            self._numbers[made_of] = len(self._made_of)
            self._made_of.append(made_of)
        return self._numbers[made_of]


@dataclass(slots=True, eq=False)
class Request:
    """A request as the machines know it.

    Attributes:
        name: its name in a program.
        handle: the object that the adapter uses for it.
        tokens: all of them, computed or not, known to the allocator or not: the device has them.
        tenant: its tenant.
        epoch: the number of resets before it began.
        roots: the numbers of its empty prefix, one a layer group.
        paths: the numbers of its prefixes, for each layer group one a token.
        computed: the number of tokens whose KV is written.
        cached: the number of tokens that were found in the cache.
        tables: the block tables that the adapter returned last; [] before the first call to it.
        unknown: the number of its last tokens that the allocator does not know yet.
        items: the multimodal items over its positions.
        num_away: the number of its blocks that the host holds while it is swapped out.
        states: the blocks that the adapter named last: of the state that it reads, of the one that
            it writes, and others.
        boundary: the last whole block of its prompt ends there, without the last token.
    """

    name: str
    handle: object
    tokens: list[int]
    tenant: str
    epoch: int
    roots: list[int]
    paths: list[list[int]]
    computed: int = 0
    cached: int = 0
    tables: Tables = field(default_factory=list)
    unknown: int = 0
    items: tuple[Item, ...] = ()
    num_away: int = 0
    states: Tables = field(default_factory=list)
    boundary: int = 0

    @property
    def block_table(self) -> list[int]:
        """The block table of the first layer group; [] before there is one."""
        return self.tables[0] if self.tables else []

    @block_table.setter
    def block_table(self, table: list[int]) -> None:
        self.tables = [table]

    @property
    def blocks(self) -> list[int]:
        """The ids in all its tables, and each of its states' once."""
        named = [block_id for table in self.tables for block_id in table]
        return named + list(dict.fromkeys([b for state in self.states for b in state]))

    @property
    def num_known(self) -> int:
        """The number of its tokens that the allocator knows."""
        return len(self.tokens) - self.unknown


@dataclass(slots=True, eq=False)
class Lease:
    """A lease as the machines know it.

    Attributes:
        name: its name in a program.
        handle: the object that the adapter uses for it.
        blocks: the ids that it holds.
    """

    name: str
    handle: object
    blocks: list[int]


def marked(tokens: Sequence[int], items: Iterable[Item]) -> list[Hashable]:
    """Return what stands at each position: a token, and the place in an item if there is one."""
    marks: list[Hashable] = list(tokens)
    for name, start, length in items:
        for offset in range(length):
            marks[start + offset] = (tokens[start + offset], name, offset)
    return marks


class Memory:
    """The blocks, the contents of their slots, and which of them must be found.

    A block is *resident* from the moment at which all its tokens are committed until it is handed
    out again: that is how long it can be hit.

    Args:
        block_size: tokens a block.
        windows: for each layer group the number of tokens that a query sees; None: all.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.places: dict[int, list[int | None]] = {}
        self.owners: dict[int, tuple[str, list[int]]] = {}  # block -> request's name, its path
        self.resident: dict[int, dict[int, int]] = {}  # last prefix -> block -> handed out by then
        self.ends: dict[int, int] = {}  # block -> its last prefix, for resident ones
        self.released: dict[int, tuple[int, int]] = {}  # block -> (when, -position in the table)
        self.used: dict[int, tuple[int, int]] = {}  # likewise, by a request that had used it
        self.states: dict[int, tuple[int, int]] = {}  # block -> which piece, of which prefix
        self.kept: dict[int, list[int]] = {}  # prefix -> the blocks of its state
        self.num_pieces = 0  # of a state
        self.num_handed_out = 0
        self.clock = 0

    def advance(self, request: Request, stop: int, writes: list[int]) -> None:
        """Write the state after a request's first `stop` tokens; at its boundary it is kept."""
        prefix = request.paths[0][stop - 1]
        self.num_pieces = len(writes)
        for piece, block_id in enumerate(writes):
            self.doubt(block_id)
            self._doubt_state(block_id)
            self.places.pop(block_id, None)
            self.states[block_id] = (piece, prefix)
        if stop == request.boundary:
            self.kept[prefix] = writes

    def _doubt_state(self, block_id: int) -> None:
        """Expect to find no state in this block any more."""
        self.states.pop(block_id, None)
        self.kept = {prefix: held for prefix, held in self.kept.items() if block_id not in held}

    def has_state(self, prefix: int, blocks: Sequence[int]) -> bool:
        """Return whether blocks hold the state after a prefix, in order."""
        held = [self.states.get(block_id) for block_id in blocks]
        return held == [(piece, prefix) for piece in range(self.num_pieces)]

    def hand_out(self, block_id: int, request: Request, group: int = 0) -> bool:
        """Give a block to a request; what it held is gone. Returns whether that was resident."""
        self.used.pop(block_id, None)
        self._doubt_state(block_id)
        evicted = self.doubt(block_id)
        self.places[block_id] = [None] * self.block_size
        self.owners[block_id] = (request.name, request.paths[group])
        self.num_handed_out += 1
        return evicted

    def write(self, request: Request, start: int, stop: int, *, resident: bool) -> None:
        """Write the KV of some of a request's positions; blocks that fill become resident."""
        for path, table in zip(request.paths, request.tables, strict=True):
            for position in range(start, stop):
                index, offset = divmod(position, self.block_size)
                block_id = table[index]
                cells = self.places.setdefault(block_id, [None] * self.block_size)
                if cells[offset] != path[position]:
                    self.doubt(block_id)
                    cells[offset] = path[position]
                first = index * self.block_size
                whole = path[first : first + self.block_size]
                if resident and offset == self.block_size - 1 and cells == whole:
                    self.resident.setdefault(whole[-1], {})[block_id] = self.num_handed_out
                    self.ends[block_id] = whole[-1]

    def copy(self, src: int, dst: int) -> None:
        """Copy all that a block holds."""
        self.places[dst] = list(self.places.get(src, [None] * self.block_size))

    def doubt(self, block_id: int) -> bool:
        """Expect no hit on this block any more. Returns whether one was expected."""
        end = self.ends.pop(block_id, None)
        if end is None:
            return False
        del self.resident[end][block_id]
        return True

    def forget(self) -> None:
        """Expect no hit on anything."""
        self.resident.clear()
        self.ends.clear()
        self.kept.clear()

    def release(
        self, blocks: Sequence[int], held: Collection[int], *, was_used: bool = True
    ) -> None:
        """Record the release of those blocks of a table that have no holder any more."""
        self.clock += 1
        for position, block_id in enumerate(blocks):
            if block_id not in held:
                self.released[block_id] = (self.clock, -position)
                if was_used or block_id not in self.used:
                    self.used[block_id] = (self.clock, -position)

    def copies(self, path: Sequence[int], index: int) -> dict[int, int]:
        """Return the resident blocks that hold the block `index` of a path."""
        return self.resident.get(path[(index + 1) * self.block_size - 1], {})

    def first_seen(self, group: int, position: int) -> int:
        """Return the first position that a query at `position` sees in a layer group."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def expected(
        self, paths: Sequence[Sequence[int]], *, at_once: bool, needs_state: bool = False
    ) -> int:
        """Return how many tokens ought to hit in all layer groups, all but the last at most.

        With `at_once`, only blocks count since whose commit nothing was handed out.
        """
        size = self.block_size
        for count in range((len(paths[0]) - 1) // size, 0, -1):
            prefix = paths[0][count * size - 1]
            if needs_state and prefix not in self.kept:
                continue
            if all(
                any(
                    stamp == self.num_handed_out or not at_once
                    for stamp in self.copies(path, index).values()
                )
                for group, path in enumerate(paths)
                for index in range(self.first_seen(group, count * size) // size, count)
            ):
                return count * size
        return 0

    def wrong_at(self, request: Request, stop: int) -> tuple[int, int] | None:
        """Return a group and a position where a query at `stop` sees another prefix, or None."""
        size = self.block_size
        for group, (path, table) in enumerate(zip(request.paths, request.tables, strict=True)):
            seen = self.first_seen(group, stop)
            for index in range(seen // size, -(-stop // size)):
                start, end = max(index * size, seen), min((index + 1) * size, stop)
                cells = self.places.get(table[index], []) if index < len(table) else []
                if cells[start - index * size : end - index * size] != path[start:end]:
                    had = dict(enumerate(cells, index * size))
                    return group, next(p for p in range(start, end) if had.get(p) != path[p])
        return None
