"""Sequences over a pool: open, plan, reserve, append, commit, truncate, fork, close, reset.

One rule decides what others can see: reserve, write, commit(n), visible. A block is published when
the last of its tokens is committed, never earlier, so drafts, chunks, failed loads and aborts need
no rule of their own. A block that is published or shared is immutable: a sequence that is cut
inside one gives it back and computes its head again.

Every call checks first and changes afterwards: one that raises has changed nothing. Nothing here
reads a clock, a hash or the order of a set, so managers fed the same calls give the same ids in
every process. A manager is not thread-safe, and does not know what a block's memory looks like.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from kvcore.arguments import as_int
from kvcore.block import BlockId
from kvcore.errors import (
    ForeignSequenceError,
    InvalidArgumentError,
    NotReservedError,
    SequenceTooLongError,
    StaleSequenceError,
)
from kvcore.groups import LayerGroup, first_kept_block, resolve
from kvcore.hashing import DEFAULT_NAMESPACE, Namespace, encode_namespace
from kvcore.leases import Lease, LeaseBook
from kvcore.pool import BlockPool
from kvcore.prefix import (
    blocks_tail_first,
    computed_after_cut,
    distrust_from,
    find_prefix,
    publish_full_blocks,
    release_from,
    share_computed,
)
from kvcore.reports import CopyOrder, Plan, ResetReport
from kvcore.sequence import KVSequence
from kvcore.stats import Stats
from kvcore.tokens import MAX_TOKEN, Tokens, pack


@final
class KVCacheManager:
    """The block tables of all sequences, and the prefixes that they share.

    Args:
        num_blocks: blocks in the cache; block 0 is the null block and is never handed out.
        block_size: tokens a block.
        groups: the layer groups that draw from the pool; None: one of full attention.
        enable_caching: False: nothing is published and nothing is hit.
        max_model_len: the most tokens a sequence may have, and the most it may reserve for.

    Attributes:
        pool: the blocks.
        groups: the layer groups, block sizes filled in.
        leases: what is in flight.
        sequences: the open sequences by their ids, oldest first.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[LayerGroup] | None = None,
        enable_caching: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        self.block_size = as_int("block_size", block_size, 1, 2**20)
        self.groups = resolve(groups, self.block_size)
        self.pool = BlockPool(num_blocks, *[group.block_size for group in self.groups])
        self.enable_caching = bool(enable_caching)
        self.max_model_len = (
            None if max_model_len is None else as_int("max_model_len", max_model_len, 1)
        )
        self.leases = LeaseBook(self.pool)
        self.sequences: dict[int, KVSequence] = {}
        self._next_seq_id = 0
        self._num_queried_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, the null block included. O(1)."""
        return len(self.pool.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out in all: all but the null block. O(1)."""
        return self.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now. O(1)."""
        return self.pool.num_free_blocks

    def open(
        self, tokens: Tokens, *, namespace: Namespace | None = DEFAULT_NAMESPACE
    ) -> KVSequence:
        """Begin a sequence: its longest cached prefix is found and held in one step.

        Takes no new block, so it cannot run out. The last token is never a hit: it must be computed
        to give logits. O(len(tokens)).

        Args:
            tokens: at least one token id; packed (a buffer of uint32) is fastest.
            namespace: with whom it shares; None: with nobody, and nothing of it is published.

        Raises:
            InvalidArgumentError: no tokens, not token ids, or not a namespace.
            SequenceTooLongError: more tokens than `max_model_len`.
        """
        packed, key = self._described(tokens, namespace)
        seq = self._new_sequence(packed, key)
        if key is not None:
            cached, hits = find_prefix(self.pool, self.groups, key, packed)
            for table, blocks in zip(seq.tables, hits, strict=True):
                self.pool.hold(blocks)
                num_null = cached // table.block_size - len(blocks)
                table.start(self.pool.blocks[0], num_null, blocks)
            seq.num_computed_tokens = seq.num_cached_tokens = cached
            self._num_queried_tokens += len(packed)
            self._num_hit_tokens += cached
        return seq

    def plan(self, tokens: Tokens, *, namespace: Namespace | None = DEFAULT_NAMESPACE) -> Plan:
        """Say what `open` and `reserve` of all the tokens would take; changes nothing.

        O(len(tokens)). Raises like `open`.
        """
        packed, key = self._described(tokens, namespace)
        cached, hits = (0, []) if key is None else find_prefix(self.pool, self.groups, key, packed)
        return Plan(
            num_cached_tokens=cached,
            num_new_blocks=sum(
                [-(-len(packed) // g.block_size) - cached // g.block_size for g in self.groups]
            ),
            num_revived_blocks=sum([b.ref_count == 0 for blocks in hits for b in blocks]),
            num_free_blocks=self.pool.num_free_blocks,
            num_deferred_blocks=self.leases.num_deferred_blocks(),
        )

    def reserve(self, seq: KVSequence, num_tokens: int) -> tuple[tuple[BlockId, ...], ...]:
        """Make room for the next `num_tokens` tokens after the computed ones.

        They may reach beyond the tokens that the sequence has: room for drafts. O(new blocks).

        Returns:
            For each layer group the ids that were appended to its block table, often none.

        Raises:
            OutOfBlocksError: too few blocks are free.
            SequenceTooLongError: the room would reach past `max_model_len`.
        """
        total = self._room_wanted(seq, num_tokens)
        missing = [table.num_missing(total) for table in seq.tables]
        taken = self.pool.take(sum(missing))
        appended: list[tuple[BlockId, ...]] = []
        start = 0
        for table, count in zip(seq.tables, missing, strict=True):
            new = taken[start : start + count]
            table.grow(new)
            appended.append(tuple([block.block_id for block in new]))
            start += count
        return tuple(appended)

    def can_reserve(self, seq: KVSequence, num_tokens: int) -> bool:
        """Say whether `reserve` with the same arguments would succeed now. O(groups)."""
        total = self._room_wanted(seq, num_tokens)
        missing = sum([table.num_missing(total) for table in seq.tables])
        return missing <= self.pool.num_free_blocks

    def append(self, seq: KVSequence, token: int) -> None:
        """Let a token join the end; its KV is not computed yet. O(1).

        Raises:
            InvalidArgumentError: not a token id.
            SequenceTooLongError: the sequence has `max_model_len` tokens already.
        """
        self._check_open(seq)
        token = as_int("token", token, 0, MAX_TOKEN)
        self._check_length(len(seq.packed) + 1)
        seq.packed.append(token)

    def extend(self, seq: KVSequence, tokens: Tokens) -> None:
        """Let several tokens join the end: drafts, or a next turn. O(len(tokens)).

        Raises like `append`.
        """
        self._check_open(seq)
        packed = pack(tokens)
        self._check_length(len(seq.packed) + len(packed))
        seq.packed.extend(packed)

    def commit(self, seq: KVSequence, num_tokens: int) -> None:
        """State that the KV of the next `num_tokens` tokens is written.

        Blocks that this fills can be hit by others from now on; blocks of window and chunk groups
        that no query can see any more are given back. O(blocks filled and given back).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
            NotReservedError: more tokens than it has room for.
        """
        self._check_open(seq)
        count = as_int("num_tokens", num_tokens, 0)
        computed = seq.num_computed_tokens + count
        if computed > len(seq.packed):
            raise InvalidArgumentError(
                f"num_tokens: wanted at most the {len(seq.packed) - seq.num_computed_tokens} "
                f"tokens that are not computed, got {count}"
            )
        for table in seq.tables:
            if computed > len(table.blocks) * table.block_size:
                raise NotReservedError(
                    f"commit: {computed} tokens computed, "
                    f"room for {len(table.blocks) * table.block_size}"
                )
        seq.num_computed_tokens = computed
        for number, table in enumerate(seq.tables):
            if seq.namespace_key is not None:
                publish_full_blocks(self.pool, seq, seq.namespace_key, number)
            kept = first_kept_block(table.group, table.block_size, computed)
            if kept > table.num_null:
                self.pool.release(table.forget(self.pool.blocks[0], kept))

    def truncate(self, seq: KVSequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and only the blocks that they need.

        Rejected drafts leave so, and room that was reserved beyond. Where the cut goes through a
        block that is published or shared, that block is given back too (it still holds its content
        for others) and `num_computed_tokens` falls to its first token. Where it goes below what a
        window group still has, everything is given back and `num_computed_tokens` falls to 0.
        O(blocks released).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
        """
        self._check_open(seq)
        count = as_int("num_tokens", num_tokens, 0, len(seq.packed))
        computed = computed_after_cut(seq, count)
        kept = count if computed == min(count, seq.num_computed_tokens) else computed
        release_from(self.pool, seq, kept)
        del seq.packed[count:]
        seq.num_computed_tokens = computed
        seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
        seq.cut_names(count)

    def fork(self, seq: KVSequence) -> tuple[KVSequence, tuple[CopyOrder, ...]]:
        """Begin a second sequence with the same tokens and the same computed KV.

        Full blocks are shared. A block that is computed in part cannot be: the child gets a block
        of its own, and the caller must carry out the copy orders before either sequence is written
        to. O(num_blocks).

        Returns:
            The child, and one copy order for each group whose last block is half full.

        Raises:
            OutOfBlocksError: no block is free for a half-full one.
        """
        self._check_open(seq)
        computed = seq.num_computed_tokens
        half_full = [table for table in seq.tables if computed % table.block_size]
        own = self.pool.take(len(half_full))
        child = self._new_sequence(seq.packed[:], seq.namespace_key)
        return child, share_computed(self.pool, seq, child, own)

    def lease(
        self,
        seq: KVSequence,
        kind: str = "step",
        *,
        owner: str = "",
        max_steps: int | None = None,
    ) -> Lease:
        """Keep every block that the sequence has now until the lease ends. O(num_blocks).

        For a step in flight or a transfer: the sequence may be cut or closed meanwhile, its blocks
        are handed out to nobody. Use it in a `with`, or end it by `lease.end()`, by
        `leases.end(lease_id)` when a completion arrives, or by its deadline.

        Args:
            seq: an open sequence.
            kind: what holds the blocks, such as "step", "load" or "store".
            owner: who, for reports.
            max_steps: `leases.advance()` ends it after so many steps; None: it has no deadline.

        Raises:
            InvalidArgumentError: `kind` or `owner` is no string, or `max_steps` is below 1.
        """
        self._check_open(seq)
        return self.leases.begin(blocks_tail_first(seq), kind, owner, max_steps)

    def fail_load(self, seq: KVSequence, num_tokens: int) -> tuple[KVSequence, ...]:
        """State that KV after the first `num_tokens` tokens was committed and never arrived.

        Nothing that spells this prefix beyond them can be hit any more, and every sequence that has
        such a block computes it again: `num_computed_tokens` falls, the tokens stay. O(num_blocks).

        Returns:
            The sequences that this has set back, in the order in which they were opened.

        Raises:
            InvalidArgumentError: more tokens than are computed.
        """
        self._check_open(seq)
        count = as_int("num_tokens", num_tokens, 0, seq.num_computed_tokens)
        return distrust_from(self.pool, seq, count, list(self.sequences.values()))

    def close(self, seq: KVSequence) -> None:
        """End a sequence: its blocks are released, tail first. O(num_blocks).

        What it published can be hit until its blocks are reused.
        """
        self._check_open(seq)
        release_from(self.pool, seq, 0)
        seq.is_open = False
        del self.sequences[seq.seq_id]

    def reset(self, *, canonical_order: bool = False) -> ResetReport:
        """Make all cached content unreachable at once, as after a change of weights.

        Open sequences keep their blocks and go on, but nothing that they have computed or still
        compute is ever shared: it belongs to before. O(num_blocks).

        Args:
            canonical_order: also put the free blocks in the order of their ids, as when new.

        Returns:
            How many blocks lost content, and how many are still held by open sequences.
        """
        forgotten = self.pool.clear(canonical_order=canonical_order)
        for seq in self.sequences.values():
            seq.forget_identity()
        return ResetReport(forgotten, self.pool.num_used_blocks, len(self.sequences))

    def stats(self) -> Stats:
        """Return a snapshot of the counters. O(num_blocks)."""
        return Stats(
            num_blocks=len(self.pool.blocks),
            num_used_blocks=self.pool.num_used_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_cached_blocks=sum([block.node is not None for block in self.pool.blocks]),
            peak_used_blocks=self.pool.peak_used_blocks,
            num_queried_tokens=self._num_queried_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_evicted_blocks=self.pool.num_evicted_blocks,
            num_allocated_blocks=self.pool.num_allocated_blocks,
        )

    def _described(
        self, tokens: Tokens, namespace: Namespace | None
    ) -> tuple[array[int], bytes | None]:
        """Check what `open` and `plan` are given; return packed tokens and the namespace's key."""
        if namespace is not None and not isinstance(namespace, Namespace):
            raise InvalidArgumentError(
                f"namespace: wanted a Namespace or None, got {type(namespace).__name__}"
            )
        packed = pack(tokens)
        if not packed:
            raise InvalidArgumentError("tokens: wanted at least one token, got none")
        self._check_length(len(packed))
        cached = self.enable_caching and namespace is not None
        return packed, encode_namespace(namespace) if cached and namespace is not None else None

    def _new_sequence(self, packed: array[int], key: bytes | None) -> KVSequence:
        seq = KVSequence(self, self._next_seq_id, packed, key, self.groups)
        self._next_seq_id += 1
        self.sequences[seq.seq_id] = seq
        return seq

    def _room_wanted(self, seq: KVSequence, num_tokens: int) -> int:
        self._check_open(seq)
        total = seq.num_computed_tokens + as_int("num_tokens", num_tokens, 0)
        self._check_length(total)
        return total

    def _check_open(self, seq: KVSequence) -> None:
        if not isinstance(seq, KVSequence):
            raise InvalidArgumentError(f"seq: wanted a KVSequence, got {type(seq).__name__}")
        if seq.owner is not self:
            raise ForeignSequenceError(f"seq: {seq!r} was opened by another manager")
        if not seq.is_open:
            raise StaleSequenceError(f"seq: {seq!r} is closed")

    def _check_length(self, num_tokens: int) -> None:
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            raise SequenceTooLongError(
                f"{num_tokens} tokens, max_model_len is {self.max_model_len}"
            )
