"""What the GPU's memory would hold: behind each place of each block, the prefix it was made from.

Every prefix (a tenant, an epoch, and tokens up to some position) has a number; KV is right for a
request at a position if and only if the number behind that place is the request's own. Nothing here
calls an allocator.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcore.testing.protocol import Item

Root = tuple[str, int]


class Prefixes:
    """Numbers for prefixes: equal prefixes have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable] | Root, int] = {}
        self._made_of: list[tuple[int, Hashable] | Root] = []

    def root(self, tenant: str, epoch: int) -> int:
        """Return the number of the empty prefix of a tenant in an epoch."""
        return self._number((tenant, epoch))

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
        name: what it is called in a program.
        handle: what the adapter calls it.
        tokens: all of them, computed or not, told or not: the device knows them.
        tenant: whose it is.
        root: the number of its empty prefix.
        path: the numbers of its prefixes, one a token.
        computed: how many tokens have their KV written.
        cached: how many of them were found in the cache.
        told: the block table as the runner was told it.
        unknown: how many of its last tokens the allocator has not been told.
        items: what stands over its positions beside tokens.
        num_away: how many blocks of it the host holds, while it is swapped out.
    """

    name: str
    handle: object
    tokens: list[int]
    tenant: str
    root: int
    path: list[int]
    computed: int = 0
    cached: int = 0
    told: list[int] = field(default_factory=list)
    unknown: int = 0
    items: tuple[Item, ...] = ()
    num_away: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """A lease as the machines know it.

    Attributes:
        name: what it is called in a program.
        handle: what the adapter calls it.
        blocks: what it holds.
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
    """The blocks, what is behind their places, and which of them ought to be found.

    A block is *resident* from the moment at which all its tokens are committed until it is handed
    out again: that is how long it can be hit.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.places: dict[int, list[int | None]] = {}
        self.owners: dict[int, Request] = {}
        self.resident: dict[int, dict[int, int]] = {}  # last prefix -> block -> handed out by then
        self.ends: dict[int, int] = {}  # block -> its last prefix, for resident ones
        self.released: dict[int, tuple[int, int]] = {}  # block -> (when, -position in the table)
        self.used: dict[int, tuple[int, int]] = {}  # likewise, by a request that had used it
        self.num_handed_out = 0
        self.clock = 0

    def hand_out(self, block_id: int, request: Request) -> bool:
        """Give a block to a request; what it held is gone. Returns whether that was resident."""
        self.used.pop(block_id, None)
        evicted = self.doubt(block_id)
        self.places[block_id] = [None] * self.block_size
        self.owners[block_id] = request
        self.num_handed_out += 1
        return evicted

    def write(self, request: Request, start: int, stop: int, *, resident: bool) -> None:
        """Write the KV of some of a request's positions; blocks that fill become resident."""
        for position in range(start, stop):
            index, offset = divmod(position, self.block_size)
            block_id = request.told[index]
            cells = self.places.setdefault(block_id, [None] * self.block_size)
            if cells[offset] != request.path[position]:
                self.doubt(block_id)
                cells[offset] = request.path[position]
            first = index * self.block_size
            whole = request.path[first : first + self.block_size]
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

    def release(
        self, table: Sequence[int], held: Collection[int], *, was_used: bool = True
    ) -> None:
        """Record the release of those blocks of a table that have no holder any more."""
        self.clock += 1
        for position, block_id in enumerate(table):
            if block_id not in held:
                self.released[block_id] = (self.clock, -position)
                if was_used or block_id not in self.used:
                    self.used[block_id] = (self.clock, -position)

    def copies(self, path: Sequence[int], index: int) -> dict[int, int]:
        """Return the resident blocks that hold the block `index` of a path."""
        return self.resident.get(path[(index + 1) * self.block_size - 1], {})

    def expected(self, path: Sequence[int], *, at_once: bool) -> int:
        """Return how many tokens of a path ought to hit, all but the last token at most.

        With `at_once`, only blocks count since whose commit nothing was handed out.
        """
        whole = (len(path) - 1) // self.block_size
        for index in range(whole):
            found = self.copies(path, index).values()
            if not any(stamp == self.num_handed_out or not at_once for stamp in found):
                return index * self.block_size
        return whole * self.block_size

    def wrong_at(self, request: Request, stop: int) -> int | None:
        """Return the first position before `stop` behind which another prefix stands."""
        size = self.block_size
        for first in range(0, stop, size):
            last = min(first + size, stop)
            cells = self.places.get(request.told[first // size])
            wanted = request.path[first:last]
            if cells is None or cells[: last - first] != wanted:
                had = cells or [None] * size
                return next(first + i for i, node in enumerate(wanted) if had[i] != node)
        return None
