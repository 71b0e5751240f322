"""The parts of a cache, the checks of what it is given, and what can be read from it.

`KVCacheManager` is this plus the verbs. Nothing here changes what a block holds or who holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, SupportsIndex

from kvcore.arguments import Flag, as_bool, as_int
from kvcore.block import BlockId
from kvcore.errors import (
    ForeignSequenceError,
    InvalidArgumentError,
    NotExpectedError,
    SequenceTooLongError,
    StaleSequenceError,
    UntoldTokensError,
)
from kvcore.events import EventLog, Snapshot
from kvcore.groups import FullAttention, LayerGroup, resolve
from kvcore.hashing import DEFAULT_NAMESPACE, Namespace, encode_namespace
from kvcore.items import Item, as_items, check_items
from kvcore.leases import LeaseBook
from kvcore.lifetimes import LifetimeRecorder
from kvcore.names import NameAlgorithm
from kvcore.peaks import blocks_still_taken
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.stats import Stats
from kvcore.tokens import Tokens, pack

_DEFAULT_KEY: Final = encode_namespace(DEFAULT_NAMESPACE)


class CacheState:
    """A pool, the open sequences, what is in flight, and the limits they were made with.

    Attributes:
        pool: the blocks.
        groups: the layer groups, block sizes filled in.
        leases: what is in flight.
        events: what was stored and removed; None unless asked for.
        sequences: the open sequences by their ids, oldest first.
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex,
        *,
        groups: Sequence[LayerGroup] | None = None,
        enable_caching: Flag = True,
        max_model_len: SupportsIndex | None = None,
        record_events: NameAlgorithm | None = None,
        record_lifetimes: Flag = False,
        prefault: Flag = False,
    ) -> None:
        self.block_size = as_int("block_size", block_size, 1, 2**20)
        self.groups = resolve(groups, self.block_size)
        sizes = [group.block_size for group in self.groups]
        self.events = None if record_events is None else EventLog(sizes, record_events)
        self.pool = BlockPool(num_blocks, *sizes, log=self.events)
        if self.events is not None:
            self.events.max_names = max(self.events.max_names, self.pool.num_blocks)
        self._is_plain = len(sizes) == 1 and isinstance(self.groups[0], FullAttention)
        if as_bool("record_lifetimes", record_lifetimes):
            self.pool.lifetimes = LifetimeRecorder(self.pool.num_blocks)
        if as_bool("prefault", prefault):
            _ = self.pool.blocks  # to look at them makes them
        self.enable_caching = as_bool("enable_caching", enable_caching)
        self.max_model_len = (
            None if max_model_len is None else as_int("max_model_len", max_model_len, 1)
        )
        self.leases = LeaseBook(self.pool)
        self.sequences: dict[int, KVSequence] = {}
        self._no_growth: tuple[tuple[BlockId, ...], ...] = ((),) * len(sizes)
        self._last_step: list[KVSequence] = []
        self._next_seq_id = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0
        self._num_resumed_tokens = 0
        self._num_resumed_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, the null block included. O(1)."""
        return self.pool.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out in all: all but the null block. O(1)."""
        return self.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now. O(1)."""
        return self.pool.num_free_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """How many blocks were handed out although they held content, since it was made. O(1)."""
        return self.pool.num_evicted_blocks

    def num_missing_blocks(
        self, seq: KVSequence, num_tokens: SupportsIndex, *, chunk: SupportsIndex | None = None
    ) -> int:
        """How many free blocks `reserve(seq, num_tokens)` would take. O(groups).

        With `chunk`: the most that are taken at once until so many tokens more are computed, in
        steps of at most `chunk` tokens: what windows give back on the way is taken again.
        O(groups) where there is room already, otherwise as `peak_blocks`.

        Raises:
            InvalidArgumentError: a negative number, or `chunk` is below 1.
        """
        count = as_int("num_tokens", num_tokens, 0)
        width = None if chunk is None else as_int("chunk", chunk, 1)
        self._check_open(seq)
        total = seq.num_computed_tokens + count
        if width is not None:
            return blocks_still_taken(seq, total, width)
        return sum([table.num_missing(total) for table in seq.tables])

    def num_exclusive_blocks(self, seq: KVSequence) -> int:
        """How many blocks nobody but this sequence holds: free when it is closed. O(num_blocks)."""
        self._check_open(seq)
        return sum(
            [
                block.ref_count == 1
                for table in seq.tables
                for block in table.blocks[table.num_null :]
            ]
        )

    def num_shared_blocks(self, seq: KVSequence, *, group: SupportsIndex = 0) -> int:
        """How many leading blocks of a group others hold too, a lease or a sequence. O(those).

        What another sequence holds can be found again after this one has given it up.

        Raises:
            InvalidArgumentError: no such group.
        """
        table = seq.tables[as_int("group", group, 0, len(self.groups) - 1)]
        self._check_open(seq)
        count = 0
        for block in table.blocks[table.num_null :]:
            if block.ref_count < 2:
                break
            count += 1
        return count

    def num_common_blocks(self, seqs: Sequence[KVSequence], *, group: SupportsIndex = 0) -> int:
        """Count the leading blocks that all these sequences share. O(len(seqs) * blocks shared).

        Read from the tables themselves, never from ref counts, which also count holders that are
        not among `seqs`. A kernel may read that prefix once for all of them (cascade attention).
        Null entries are nobody's, so a window that has moved on shares nothing.

        Raises:
            InvalidArgumentError: no sequences, or no such group.
        """
        number = as_int("group", group, 0, len(self.groups) - 1)
        if not seqs:
            raise InvalidArgumentError("seqs: wanted at least one sequence, got none")
        for seq in seqs:
            self._check_open(seq)
        first, *others = [seq.tables[number].block_ids for seq in seqs]
        count = 0 if seqs[0].tables[number].num_null else len(first)
        for block_ids in others:
            both = range(min(count, len(block_ids)))
            count = next((i for i in both if first[i] != block_ids[i]), len(both))
        return count

    def snapshot(self) -> Snapshot:
        """Return all that can be hit now, for a reader of events who joins late. O(contents).

        Raises:
            InvalidArgumentError: the manager was made without `record_events`.
        """
        if self.events is None:
            raise InvalidArgumentError("snapshot: wanted a manager with record_events, got none")
        return self.events.snapshot(
            [(group, root) for group, tree in enumerate(self.pool.trees) for root in tree.roots()]
        )

    def stats(self) -> Stats:
        """Return a snapshot of the counters. O(open sequences)."""
        return Stats(
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_used_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_cached_blocks=self.pool.num_cached_blocks,
            peak_used_blocks=self.pool.peak_used_blocks,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_blocks=self.pool.num_evicted_blocks,
            num_allocated_blocks=self.pool.num_allocated_blocks,
            num_resumed_tokens=self._num_resumed_tokens,
            num_resumed_hit_tokens=self._num_resumed_hit_tokens,
            num_computed_tokens=sum([s.num_computed_tokens for s in self.sequences.values()]),
            num_slots=self.pool.num_used_slots,
            lifetimes=None if self.pool.lifetimes is None else self.pool.lifetimes.stats(),
        )

    def _described(
        self, tokens: Tokens, namespace: Namespace | None, items: Sequence[Item]
    ) -> tuple[array[int], bytes | None, tuple[Item, ...]]:
        """Check what `open` and `plan` are given; return tokens, the namespace's key, items."""
        # A subclass may mean more than its fields say, and would share what it should not.
        if namespace is not None and type(namespace) is not Namespace:
            raise InvalidArgumentError(
                f"namespace: wanted a Namespace or None, got {type(namespace).__name__}"
            )
        packed = pack(tokens)
        if not packed:
            raise InvalidArgumentError("tokens: wanted at least one token, got none")
        self._check_length(len(packed))
        key = None
        if self.enable_caching and namespace is not None:
            is_default = namespace is DEFAULT_NAMESPACE
            key = _DEFAULT_KEY if is_default else encode_namespace(namespace)
        if type(items) is tuple and not items:
            return packed, key, ()
        return packed, key, check_items(as_items(items), 0, len(packed))

    def _new_sequence(
        self, packed: array[int], key: bytes | None, items: tuple[Item, ...]
    ) -> KVSequence:
        seq = KVSequence(self, self._next_seq_id, packed, key, self.groups, items)
        seq.opened_at = self.pool.step
        return seq

    def _check_open(self, seq: KVSequence) -> None:
        known: object = seq  # callers are not all typed
        if type(known) is KVSequence and self.sequences.get(known.seq_id) is known:
            return
        if not isinstance(seq, KVSequence):
            raise InvalidArgumentError(f"seq: wanted a KVSequence, got {type(seq).__name__}")
        if seq.owner is not self:
            raise ForeignSequenceError(f"seq: {seq!r} was opened by another manager")
        raise StaleSequenceError(f"seq: {seq!r} is closed, or a copy")

    def _room_wanted(self, seq: KVSequence, num_tokens: SupportsIndex) -> int:
        # Arguments first: what an `__index__` does must not come between a check and its use.
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        total = seq.num_computed_tokens + count
        self._check_length(total)
        return total

    @staticmethod
    def _check_expected(seq: KVSequence, num_tokens: int, start: int | None) -> None:
        """Raise where so many tokens, from position `start` on, are not what a sequence expects."""
        length = len(seq.packed)
        if num_tokens > seq.num_untold_tokens or (start is not None and start != length):
            raise NotExpectedError(
                f"{seq!r}: wanted at most {seq.num_untold_tokens} tokens from position {length} "
                f"on, got {num_tokens}" + ("" if start is None else f" from {start} on")
            )

    def _check_told(self, seq: KVSequence) -> None:
        if seq.num_untold_tokens:
            raise UntoldTokensError(
                f"{seq!r}: wanted all tokens told before known ones join, "
                f"{seq.num_untold_tokens} are not"
            )

    def _check_length(self, num_tokens: int) -> None:
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            raise SequenceTooLongError(
                f"{num_tokens} tokens, max_model_len is {self.max_model_len}"
            )

    def _checked_step(self, seqs: Sequence[KVSequence], numbers: list[int]) -> list[KVSequence]:
        """Return the sequences of a step as a list: open ones of this manager, each once."""
        running = list(seqs)
        if len(running) != len(numbers):
            raise InvalidArgumentError(
                f"wanted one number for each of {len(running)} sequences, got {len(numbers)}"
            )
        if self._last_step == running:  # ours compare by identity; none has been closed since
            return running
        known = self.sequences
        try:
            strangers = [seq for seq in running if known.get(seq.seq_id) is not seq]
        except (AttributeError, TypeError):
            strangers = running
        for seq in strangers:
            self._check_open(seq)
        if len({seq.seq_id for seq in running}) != len(running):
            raise InvalidArgumentError("seqs: wanted each once, got one twice")
        self._last_step = running
        return running
