"""A sequence: the handle that an engine holds between `open` and `close`.

Each length is stored and none is derived from another:
`num_cached_tokens <= num_computed_tokens <= num_tokens`. The block tables cover the computed and
the reserved tokens. The last tokens may be *expected*: they count and may be computed, but their
ids are unknown until `resolve`. *Settled* tokens are both computed and known; only they are shared
with other sequences. Only the manager changes a sequence; after `close` every call with it raises a
typed error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn, SupportsIndex, final

from kvcore.arguments import as_int
from kvcore.block import BlockId
from kvcore.errors import (
    InvalidArgumentError,
    MisuseError,
    NotExpectedError,
    NotReservedError,
    SequenceTooLongError,
    StaleSequenceError,
    UnknownTokensError,
)
from kvcore.eviction.retention import Retention
from kvcore.identity.block_hash import BlockHash, HashAlgorithm, HashChain
from kvcore.identity.multimodal import MultimodalItem
from kvcore.tables.block_table import BlockTable
from kvcore.tables.ends import Ends
from kvcore.tables.groups import NEVER, LayerGroup
from kvcore.tables.slots import check_width, int_view, put_ints, slots_of
from kvcore.tables.state_table import StateTable


@final
class KVSequence:
    """The tokens of one request and the blocks that hold their KV.

    Attributes:
        seq_id: counts the sequences of its manager from 0.
        num_computed_tokens: tokens whose KV is written; the next step computes from here.
        num_cached_tokens: the number of them that were found in the cache when it was opened.
        packed: its known tokens, as `array("I")`. Read it, do not write it.
        num_unknown_tokens: the number of expected tokens after the known ones.
        items: its multimodal items, in order.
        tables: its block table for each layer group with attention. Read them, do not write them.
        state: its recurrent states; None without a group that keeps them. Read it.
        namespace_key: the encoded namespace; None: the sequence is not cached.
        ends: the lengths at which later prompts are expected to hit its prefix; None: it is not
            cached, or no layer group has a window, chunks or states.
        retention: the ranges of tokens to keep longer than others.
        opened_at: the step at which it was opened.
        chain: its block hashes; None until they are computed.
        num_reserved_tokens: a lower bound of the tokens that all tables have blocks for.
        next_boundary: the least number of settled tokens at which a block becomes full or leaves
            a window. It is at most one more than `num_reserved_tokens`. Both are 0 while they are
            unknown; a function that removes blocks from the tables sets them to 0.
        fast_decode_limit: while fewer tokens are computed, a decode step only counts; 0: unknown,
            or another number of tokens than one is not computed.
        owner: the manager that it is open in; None once it is closed.
        tag: free for the caller; None at first and never read here. Compiled handles cannot be
            weakly referenced, so the caller can attach data to this attribute instead.
    """

    __slots__ = (
        "chain",
        "ends",
        "fast_decode_limit",
        "items",
        "namespace_key",
        "next_boundary",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_reserved_tokens",
        "num_unknown_tokens",
        "opened_at",
        "owner",
        "packed",
        "retention",
        "seq_id",
        "state",
        "tables",
        "tag",
    )

    def __init__(
        self,
        owner: object,
        seq_id: int,
        packed: array[int],
        namespace_key: bytes | None,
        groups: Sequence[LayerGroup],
        items: tuple[MultimodalItem, ...],
    ) -> None:
        self.owner = owner
        self.tag: object = None
        self.items = items
        self.seq_id = seq_id
        self.packed = packed
        self.namespace_key = namespace_key
        self.tables: tuple[BlockTable, ...] = (BlockTable(groups[0]),)
        if len(groups) > 1:
            self.tables = tuple([BlockTable(group) for group in groups])
        self.state: StateTable | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_unknown_tokens = 0
        self.ends: Ends | None = None
        self.retention: tuple[Retention, ...] = ()
        self.opened_at = 0
        self.chain: HashChain | None = None
        self.num_reserved_tokens = self.next_boundary = self.fast_decode_limit = 0

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same object. Steps are compared by this."""
        return self is other

    def __hash__(self) -> int:
        """Return its number."""
        return self.seq_id

    @property
    def is_open(self) -> bool:
        """True if the sequence is open. O(1)."""
        return self.owner is not None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, computed or not, known or not. O(1)."""
        return len(self.packed) + self.num_unknown_tokens

    @property
    def num_settled_tokens(self) -> int:
        """The number of tokens that are both computed and known. O(1)."""
        return min(self.num_computed_tokens, len(self.packed))

    @property
    def num_blocks(self) -> int:
        """The number of blocks held in all groups, without null entries. O(groups)."""
        held = sum([len(table.blocks) - table.num_null for table in self.tables])
        return held if self.state is None else held + len(self.state.blocks())

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of the known tokens. O(num_tokens)."""
        return tuple(self.packed)

    @property
    def block_table(self) -> tuple[BlockId, ...]:
        """A copy of the block table of the first group. O(num_blocks)."""
        return tuple([BlockId(block_id) for block_id in self.tables[0].block_ids])

    @property
    def block_tables(self) -> tuple[tuple[BlockId, ...], ...]:
        """A copy of the block table of every group, null entries included. O(num_blocks)."""
        return tuple([tuple(map(BlockId, table.block_ids)) for table in self.tables])

    @property
    def state_blocks(self) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
        """The blocks of the recurrent state that the next step reads, and of the one it writes.

        The first are empty where the step starts from zeros, before the first computed token. Both
        are the same where the state may be replaced. O(blocks of a state).

        Raises:
            StaleSequenceError: the sequence is closed.
            NotReservedError: no blocks are reserved for the next state: call `reserve` first.
            InvalidArgumentError: no group keeps recurrent states.
        """
        if not self.is_open:
            raise StaleSequenceError(f"{self!r} is closed")
        state = self.state
        if state is None:
            raise InvalidArgumentError("groups: wanted a RecurrentState, got attention only")
        if not state.write:
            raise NotReservedError(f"{self!r} has no blocks for its next state: call reserve first")
        read = tuple([block.block_id for block in state.read])
        return read, tuple([block.block_id for block in state.write])

    def write_block_table(self, out: object, group: SupportsIndex = 0) -> int:
        """Write a group's block ids to the beginning of `out`. O(num_blocks).

        Args:
            out: a writable, contiguous buffer of int32: [at least as many as the table has].
            group: the layer group.

        Returns:
            The number of entries written; later entries are untouched.

        Raises:
            StaleSequenceError: the sequence is closed.
            InvalidArgumentError: no such group, or `out` is another kind of buffer or too short.
        """
        table = self._table(group)
        put_ints(int_view("out", out, (4,), len(table.block_ids)), 0, table.block_ids)
        return len(table.block_ids)

    def write_slot_mapping(
        self, start: SupportsIndex, stop: SupportsIndex, out: object, group: SupportsIndex = 0
    ) -> int:
        """Write the slots of the positions `start` to `stop - 1` to the beginning of `out`.

        O(stop - start). `out` is a writable, contiguous buffer of int64, or of int32 where the
        cache has fewer than 2**31 slots: [at least stop - start].

        Returns:
            The number of entries written.

        Raises:
            StaleSequenceError: the sequence is closed.
            NotReservedError: the group has no block for one of the positions, or gave it back.
            InvalidArgumentError: `stop < start`, no such group, or `out` does not fit.
        """
        table = self._table(group)
        start = as_int("start", start, 0)
        stop = as_int("stop", stop, start)
        first, room = table.num_null * table.block_size, len(table.blocks) * table.block_size
        if stop > start and not first <= start <= stop <= room:
            raise NotReservedError(
                f"wanted the slots of positions {start} to {stop - 1}, "
                f"the table has blocks for {first} to {room - 1}"
            )
        view = int_view("out", out, (4, 8), stop - start)
        slots = slots_of(table.block_ids, start, stop, table.block_size)
        check_width("out", view, slots)
        put_ints(view, 0, slots)
        return stop - start

    def block_hashes(
        self, algorithm: HashAlgorithm = "xxh3-128", *, group: SupportsIndex = 0
    ) -> tuple[BlockHash, ...]:
        """Return the hashes of a group's published blocks. O(blocks not hashed before).

        Blocks that a window has released are included. A sequence that is not cached has none.
        Calls that alternate between groups of different block sizes compute all hashes again.

        Args:
            algorithm: "xxh3-128", or "sha256" for hashes that leave the trust domain.
            group: the layer group.

        Raises:
            StaleSequenceError: the sequence is closed.
            InvalidArgumentError: an unknown algorithm, or no such group.
        """
        table = self._table(group)
        chain, size = self.chain, table.block_size
        if chain is None or chain.algorithm != algorithm or chain.block_size != size:
            chain = self.chain = HashChain(self.namespace_key or b"", size, algorithm)
        return chain.hashes(self.packed, table.num_published, self.items)

    def cut_hashes(self, num_tokens: int) -> None:
        """Forget the hashes of blocks that the first `num_tokens` tokens do not fill. O(1)."""
        if self.chain is not None:
            self.chain.cut(num_tokens // self.chain.block_size)

    def forget_identity(self) -> None:
        """Stop publishing its blocks, and forget those that were published. O(groups)."""
        self.namespace_key = None
        self.chain = self.ends = None
        self.num_reserved_tokens = self.next_boundary = self.fast_decode_limit = 0
        for table in self.tables:
            table.num_published = 0

    def find_limits(self, longest: int | None) -> None:
        """Set the lengths below which a step only counts. Cannot fail. O(groups).

        The caller has just published the settled blocks and released those outside the windows.
        """
        room = NEVER if longest is None else longest
        due = NEVER
        state = self.state
        is_cached = self.namespace_key is not None
        for table in self.tables:
            size = table.block_size
            here = len(table.blocks) * size
            if here < room:  # noqa: PLR1730  # a call of `min` costs more, twice for each block
                room = here
            if is_cached:
                full = (table.num_published + 1) * size
                if full < due:  # noqa: PLR1730
                    due = full
            if table.forgets:
                due = min(due, table.next_pass(table.num_null))
        if state is not None:
            room = min(room, state.room(self.num_computed_tokens))
            due = min(due, state.next_due(self.num_computed_tokens, len(self.packed)))
        self.num_reserved_tokens = room
        self.next_boundary = due if due <= room else room + 1

    def __copy__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is a handle: use the original, not a copy")

    def __reduce__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is a handle: it cannot be pickled")

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        unknown = f" ({self.num_unknown_tokens} unknown)" if self.num_unknown_tokens else ""
        return (
            f"KVSequence({self.seq_id}, {state}, {self.num_tokens} tokens{unknown}, "
            f"{self.num_computed_tokens} computed, {self.num_blocks} blocks)"
        )

    def _table(self, group: SupportsIndex) -> BlockTable:
        if not self.is_open:
            raise StaleSequenceError(f"{self!r} is closed")
        return self.tables[as_int("group", group, 0, len(self.tables) - 1)]


def check_length(num_tokens: int, longest: int | None) -> None:
    """Raise if `num_tokens` is more than a sequence may have."""
    if longest is not None and num_tokens > longest:
        raise SequenceTooLongError(f"{num_tokens} tokens, max_model_len is {longest}")


def check_all_known(seq: KVSequence) -> None:
    """Raise if a sequence has expected tokens, which known tokens cannot follow."""
    if seq.num_unknown_tokens:
        raise UnknownTokensError(
            f"{seq!r}: wanted all token ids known before known tokens join, "
            f"{seq.num_unknown_tokens} are not: call resolve first"
        )


def check_expected(seq: KVSequence, num_tokens: int, start: int | None) -> None:
    """Raise if a sequence does not expect `num_tokens` tokens at position `start`."""
    length = len(seq.packed)
    if num_tokens > seq.num_unknown_tokens or (start is not None and start != length):
        raise NotExpectedError(
            f"{seq!r}: wanted at most {seq.num_unknown_tokens} tokens from position {length} "
            f"on, got {num_tokens}" + ("" if start is None else f" from {start} on")
        )


def check_computed(seq: KVSequence, num_computed: int, num_tokens: int) -> None:
    """Raise unless `num_computed` tokens of a sequence can be computed. O(groups).

    Args:
        seq: the sequence.
        num_computed: the number of its first tokens.
        num_tokens: the number of tokens that it has then.

    Raises:
        InvalidArgumentError: more than the sequence has.
        NotReservedError: more than it has reserved blocks for.
    """
    before = seq.num_computed_tokens
    if num_computed > num_tokens:
        raise InvalidArgumentError(
            f"num_tokens: wanted at most the {num_tokens - before} tokens that are not computed, "
            f"got {num_computed - before}"
        )
    for table in seq.tables:
        room = len(table.blocks) * table.block_size
        if num_computed > room:
            raise NotReservedError(
                f"commit: {num_computed} tokens computed, blocks reserved for {room}"
            )
    if num_computed > before and seq.state is not None and not seq.state.write:
        raise NotReservedError(
            f"commit: {num_computed} tokens computed, no blocks reserved for the state after them"
        )
