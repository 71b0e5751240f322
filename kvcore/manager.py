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

from collections.abc import Sequence
from typing import NoReturn, SupportsIndex, final

from kvcore.advance import advance, grow, grow_groups
from kvcore.arguments import Flag, as_bool, as_int
from kvcore.block import Block, BlockId
from kvcore.errors import InvalidArgumentError, MisuseError
from kvcore.hashing import DEFAULT_NAMESPACE, Namespace
from kvcore.items import Item, as_items, check_items, cut_items
from kvcore.leases import Lease
from kvcore.lifetimes import MAX_STEP
from kvcore.peaks import blocks_to_take
from kvcore.prefix import find_blocks, find_prefix, kept_hits, share_computed
from kvcore.reports import CopyOrder, Plan, ResetReport
from kvcore.retention import Retention, check_wishes
from kvcore.rewind import (
    blocks_tail_first,
    computed_after_cut,
    cut_tables,
    distrust_blocks,
    distrust_from,
    leaving,
)
from kvcore.sequence import KVSequence
from kvcore.steps import StepVerbs
from kvcore.tokens import MAX_TOKEN, Tokens, pack


@final
class KVCacheManager(StepVerbs):
    """The block tables of all sequences, and the prefixes that they share.

    Args:
        num_blocks: blocks in the cache; block 0 is the null block and is never handed out.
        block_size: tokens a block.
        groups: the layer groups that draw from the pool; None: one of full attention.
        enable_caching: False: nothing is published and nothing is hit.
        max_model_len: the most tokens a sequence may have, and the most it may reserve for.
        record_events: name contents so, and note in `events` what can be hit; None: note nothing.
        record_lifetimes: keep in the stats how long blocks live, lie idle and wait for a hit.
        prefault: make every block now, not when it is first handed out; `gc.freeze()` after that
            spares the garbage collector all of them.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def open(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = DEFAULT_NAMESPACE,
        items: Sequence[Item] = (),
        retain: Sequence[Retention] = (),
        resumed: Flag = False,
        skip_reading: Flag = False,
    ) -> KVSequence:
        """Begin a sequence: its longest cached prefix is found and held in one step.

        Takes no new block, so it cannot run out. The last token is never a hit: it must be computed
        to give logits. O(len(tokens)).

        Args:
            tokens: at least one token id; packed (a buffer of uint32) is fastest.
            namespace: with whom it shares; None: with nobody, and nothing of it is published.
            items: content that is not tokens (images, embeddings), in order and apart.
            retain: which ranges of it to keep longer than others once it is closed.
            resumed: it was preempted and computed before; the statistics count it apart.
            skip_reading: look nothing up, so that all of it is computed; what it computes can be
                hit by others all the same. The statistics do not count it.

        Raises:
            InvalidArgumentError: no tokens, not token ids, not a namespace, or items that overlap
                or reach beyond the tokens.
            SequenceTooLongError: more tokens than `max_model_len`.
        """
        is_resumed, is_blind = as_bool("resumed", resumed), as_bool("skip_reading", skip_reading)
        packed, key, checked = self._described(tokens, namespace, items)
        wishes = check_wishes(retain) if retain else ()
        seq = self._new_sequence(packed, key, checked)
        seq.wishes = wishes
        hits: list[Block] = []
        if is_blind:
            key = None  # of the look-up; the sequence has its own
        if key is not None and self._is_plain:
            only = seq.tables[0]
            if checked:
                hits = find_blocks(self.pool, only.block_size, key, packed, checked)
            else:
                longest = (len(packed) - 1) // only.block_size
                hits = self.pool.match(key, packed.tobytes(), longest)
            if hits:
                only.start(self.pool.null, 0, hits)
                seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * only.block_size
        elif key is not None:
            cached, found = find_prefix(self.pool, self.groups, key, packed, checked)
            for table, blocks in zip(seq.tables, found, strict=True):
                num_null = cached // table.block_size - len(blocks)
                table.start(self.pool.null, num_null, blocks)
                hits += blocks
            seq.num_computed_tokens = seq.num_cached_tokens = cached
        self._admit(seq, hits)
        if key is not None and is_resumed:
            self._num_resumed_tokens += len(packed)
            self._num_resumed_hit_tokens += seq.num_cached_tokens
        elif key is not None:
            self._num_queried_tokens += len(packed)
            self._num_hit_tokens += seq.num_cached_tokens
        return seq

    def plan(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = DEFAULT_NAMESPACE,
        items: Sequence[Item] = (),
        chunk: SupportsIndex | None = None,
        skip_reading: Flag = False,
    ) -> Plan:
        """Say what `open` and the room for all the tokens would take; changes nothing.

        O(len(tokens) + blocks under leases); with `chunk` also what `peak_blocks` costs.

        Args:
            tokens: as for `open`; so are `namespace` and `items`.
            namespace: with whom it shares.
            items: content that is not tokens.
            chunk: they are computed in steps of at most so many tokens, and what windows give back
                on the way is taken again; None: in one step.
            skip_reading: as for `open`.

        Raises:
            InvalidArgumentError: as `open`, or `chunk` is below 1.
            SequenceTooLongError: more tokens than `max_model_len`.
        """
        width = None if chunk is None else as_int("chunk", chunk, 1)
        is_blind = as_bool("skip_reading", skip_reading)
        packed, key, checked = self._described(tokens, namespace, items)
        cached = 0
        hits: list[list[Block]] = []
        if key is not None and not is_blind:
            cached, hits = find_prefix(self.pool, self.groups, key, packed, checked)
        return Plan(
            num_cached_tokens=cached,
            num_new_blocks=blocks_to_take(self.groups, hits, cached, len(packed), width),
            num_revived_blocks=sum([b.ref_count == 0 for blocks in hits for b in blocks]),
            num_free_blocks=self.pool.num_free_blocks,
            num_deferred_blocks=self.leases.num_deferred_blocks(),
        )

    def reserve(
        self, seq: KVSequence, num_tokens: SupportsIndex
    ) -> tuple[tuple[BlockId, ...], ...]:
        """Make room for the next `num_tokens` tokens after the computed ones.

        They may reach beyond the tokens that the sequence has: room for drafts. O(new blocks).

        Returns:
            For each layer group the ids that were appended to its block table, often none.

        Raises:
            OutOfBlocksError: too few blocks are free.
            SequenceTooLongError: the room would reach past `max_model_len`.
        """
        known: object = seq  # callers are not all typed
        if type(num_tokens) is int and type(known) is KVSequence and num_tokens >= 0:
            total = seq.num_computed_tokens + num_tokens
            if total <= seq.room and seq.is_open and seq.owner is self:
                return self._no_growth
        return self._grow(seq, self._room_wanted(seq, num_tokens))

    def reserve_to(
        self, seq: KVSequence, num_tokens: SupportsIndex
    ) -> tuple[tuple[BlockId, ...], ...]:
        """Make room for the first `num_tokens` tokens in all; otherwise as `reserve`."""
        total = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        self._check_length(total)
        return self._grow(seq, total)

    def _grow(self, seq: KVSequence, total: int) -> tuple[tuple[BlockId, ...], ...]:
        """Give a sequence room for so many tokens, and say what was appended."""
        for table in seq.tables:
            if total > len(table.blocks) * table.block_size:
                break
        else:
            seq.find_limits(self.max_model_len)
            return self._no_growth
        if len(seq.tables) == 1:
            return (grow(self.pool, seq.tables[0], total),)
        return grow_groups(self.pool, seq, total)

    def can_reserve(self, seq: KVSequence, num_tokens: SupportsIndex) -> bool:
        """Say whether enough blocks are free for `reserve` with the same arguments. O(groups).

        Raises like `reserve`, but for `OutOfBlocksError`.
        """
        total = self._room_wanted(seq, num_tokens)
        missing = sum([table.num_missing(total) for table in seq.tables])
        return missing <= self.pool.num_free_blocks

    def append(self, seq: KVSequence, token: SupportsIndex) -> None:
        """Let a token join the end; its KV is not computed yet. O(1).

        Raises:
            InvalidArgumentError: not a token id.
            SequenceTooLongError: the sequence has `max_model_len` tokens already.
            UntoldTokensError: tokens before it are expected and not told yet.
        """
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            # A bool is an int, as it is in `pack`: to look for one costs more than packing does.
            token = int(token) if type(token) is bool else as_int("token", token, 0, MAX_TOKEN)
        known: object = seq  # callers are not all typed
        if type(known) is not KVSequence or not known.is_open or known.owner is not self:
            self._check_open(seq)
        if seq.num_untold_tokens:
            self._check_told(seq)
        if self.max_model_len is not None:
            self._check_length(len(seq.packed) + 1)
        seq.packed.append(token)
        seq.stop = 0

    def extend(self, seq: KVSequence, tokens: Tokens, *, items: Sequence[Item] = ()) -> None:
        """Let several tokens join the end: drafts, or a next turn. O(len(tokens)).

        Items lie within the new tokens, at their positions in the whole sequence. Raises like
        `append`, and like `open` for items.
        """
        packed = pack(tokens)
        given = as_items(items)
        self._check_open(seq)
        self._check_told(seq)
        length = len(seq.packed)
        self._check_length(length + len(packed))
        together = seq.items + check_items(given, length, length + len(packed))
        seq.packed.extend(packed)
        seq.stop = 0
        seq.items = together

    def expect(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """Let tokens join the end whose ids are told later: sampled, or drafted, on the device.

        They count like any other, and can be given room and committed; what they fill can be hit
        once they are told. Only expected tokens may follow them until then. O(1).

        Raises:
            SequenceTooLongError: the sequence would have more than `max_model_len` tokens.
        """
        count = as_int("num_tokens", num_tokens, 0, MAX_STEP)
        self._check_open(seq)
        self._check_length(seq.num_tokens + count)
        seq.num_untold_tokens += count
        seq.stop = 0

    def tell(self, seq: KVSequence, tokens: Tokens, *, start: SupportsIndex | None = None) -> None:
        """Say which tokens the first expected ones are.

        What this settles can be hit from now on, and what it puts out of a window's sight is given
        back. O(len(tokens) + blocks filled and given back).

        Args:
            seq: an open sequence.
            tokens: at most as many as it expects.
            start: the position of the first of them, where the caller knows it: tokens that were
                told before, or cut and expected anew, are then found out.

        Raises:
            InvalidArgumentError: not token ids.
            NotExpectedError: more tokens than are expected, or other positions.
        """
        packed = pack(tokens)
        first = None if start is None else as_int("start", start, 0)
        self._check_open(seq)
        self._check_expected(seq, len(packed), first)
        length = len(seq.packed)
        seq.packed.extend(packed)
        try:
            advance(self.pool, seq, 0)
        except BaseException:
            del seq.packed[length:]
            raise
        seq.num_untold_tokens -= len(packed)

    def commit(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """State that the KV of the next `num_tokens` tokens is written.

        Blocks that this fills can be hit by others from now on, or once their last token is told;
        blocks of window and chunk groups that no query after the settled tokens can see any more
        are given back. O(blocks filled and given back).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
            NotReservedError: more tokens than it has room for.
        """
        known: object = seq  # callers are not all typed
        if type(num_tokens) is int and type(known) is KVSequence and num_tokens >= 0:
            computed = seq.num_computed_tokens + num_tokens
            if (
                computed < seq.due
                and computed <= seq.room
                and computed <= len(seq.packed)
                and seq.is_open
                and seq.owner is self
            ):
                seq.num_computed_tokens = computed
                seq.stop = 0
                return
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        if not advance(self.pool, seq, count):
            seq.find_limits(self.max_model_len)

    def truncate(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """Keep the first `num_tokens` tokens, and only the blocks that they need.

        Rejected drafts leave so, expected tokens, and room that was reserved beyond. Where the cut
        goes through a block that is published or shared, that block is given back too (it still
        holds its content for others) and `num_computed_tokens` falls to its first token. Where it
        goes below what a window group still has, everything is given back and
        `num_computed_tokens` falls to 0.
        O(blocks released).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        count = as_int("num_tokens", count, 0, seq.num_tokens)
        computed = computed_after_cut(seq, count)
        kept = count if computed == min(count, seq.num_computed_tokens) else computed
        told = min(count, len(seq.packed))
        items = cut_items(seq.items, told)
        seq.packed.append(0)  # a view that somebody holds of it stops the cut here
        seq.packed.pop()
        self.pool.release(leaving(seq, kept))
        cut_tables(seq, kept)
        del seq.packed[told:]
        seq.num_untold_tokens = count - told
        seq.items = items
        seq.num_computed_tokens = computed
        seq.num_cached_tokens = min(seq.num_cached_tokens, computed)
        seq.cut_names(told)

    def fork(self, seq: KVSequence) -> tuple[KVSequence, tuple[CopyOrder, ...]]:
        """Begin a second sequence with the same told tokens and the same computed KV.

        What is expected and not told yet stays the parent's, with the KV computed for it. Full
        blocks are shared. A block that is computed in part cannot be: the child gets a block of its
        own, and the caller must carry out the copy orders before either sequence is written to.
        O(num_blocks).

        Returns:
            The child, and one copy order for each group whose last block is half full.

        Raises:
            OutOfBlocksError: no block is free for a half-full one.
        """
        self._check_open(seq)
        child = self._new_sequence(seq.packed[:], seq.namespace_key, seq.items)
        self.sequences[child.seq_id] = child
        try:
            orders = share_computed(self.pool, seq, child)
        except BaseException:
            del self.sequences[child.seq_id]
            raise
        self._next_seq_id += 1
        return child, orders

    def lease(
        self,
        seq: KVSequence,
        kind: str = "step",
        *,
        owner: str = "",
        num_tokens: SupportsIndex | None = None,
        max_steps: SupportsIndex | None = None,
    ) -> Lease:
        """Keep every block that the sequence has now until the lease ends. O(num_blocks).

        For a step in flight or a transfer: the sequence may be cut or closed meanwhile, its blocks
        are handed out to nobody. Use it in a `with`, or end it by `lease.end()`, by
        `leases.end(lease_id)` when a completion arrives, or by its deadline. A lease without one is
        a pin: what it holds stays in the cache, and can be hit, until it is ended.

        Args:
            seq: an open sequence.
            kind: what holds the blocks, such as "step", "load" or "store".
            owner: who, for reports.
            num_tokens: hold only the blocks of so many first tokens; None: all.
            max_steps: `advance` ends it after so many steps; None: it has no deadline.

        Raises:
            InvalidArgumentError: `kind` or `owner` is no string, or `max_steps` is below 1.
        """
        count = None if num_tokens is None else as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        return self.leases.begin(blocks_tail_first(seq, count), kind, owner, max_steps)

    def advance(self, num_steps: SupportsIndex = 1) -> tuple[Lease, ...]:
        """Let steps pass, or any other unit of time that the caller counts deadlines in.

        Leases whose deadline has come end, and blocks are not kept beyond theirs.
        O(active leases + kept blocks).

        Returns:
            The leases that this has ended, oldest first.
        """
        count = as_int("num_steps", num_steps, 0, MAX_STEP - self.pool.step)
        late = self.leases.due(self.pool.step + count)
        self.pool.advance(count, [block for lease in late for block in lease.blocks])
        self.leases.forget(late)
        return late

    def fail_load(self, seq: KVSequence, num_tokens: SupportsIndex) -> tuple[KVSequence, ...]:
        """State that KV after the first `num_tokens` tokens was committed and never arrived.

        Nothing that spells this prefix beyond them can be hit any more, and every sequence that has
        such a block computes it again: `num_computed_tokens` falls, the tokens stay. O(num_blocks).

        Returns:
            The sequences that this has set back, in the order in which they were opened.

        Raises:
            InvalidArgumentError: more tokens than are computed.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        count = as_int("num_tokens", count, 0, seq.num_computed_tokens)
        return distrust_from(self.pool, seq, count, list(self.sequences.values()))

    def fail_transfer(self, lease: Lease) -> tuple[KVSequence, ...]:
        """State that the KV in a lease's blocks is not what it should be; and end the lease.

        As `fail_load`, for a transfer whose request may be gone: what the blocks hold cannot be hit
        any more, nor what may have been built on it. A lease that has ended says nothing of blocks
        any more: nothing changes. O(all tokens and blocks of the sequences and of that content).

        Returns:
            The sequences that this has set back, in the order in which they were opened.

        Raises:
            InvalidArgumentError: not a lease of this manager.
        """
        known: object = lease  # callers are not all typed
        if type(known) is not Lease or not self.leases.is_its_own(known):
            raise InvalidArgumentError(f"lease: wanted a lease of this manager, got {lease!r}")
        if not lease.is_active:
            return ()
        sequences = list(self.sequences.values())
        set_back = distrust_blocks(self.pool, lease.blocks, sequences, lease.blocks)
        self.leases.forget((lease,))
        return set_back

    def fail_blocks(self, block_ids: Sequence[SupportsIndex]) -> tuple[KVSequence, ...]:
        """State that the KV in some blocks is not what it should be, whoever holds them now.

        As `fail_transfer`, for a caller that knows no more than their ids: a block may have been
        reused since, unless a lease held it. Blocks that hold nothing are passed over.

        Raises:
            InvalidArgumentError: not the id of a block that can be handed out.
        """
        ids = [as_int("block_ids", one, 1, self.num_blocks - 1) for one in block_ids]
        everything = self.pool.blocks
        blocks = [everything[block_id] for block_id in dict.fromkeys(ids)]
        return distrust_blocks(self.pool, blocks, list(self.sequences.values()))

    def close(self, seq: KVSequence) -> None:
        """End a sequence: its blocks are released, tail first. O(num_blocks).

        What it published can be hit until its blocks are reused.
        """
        self._check_open(seq)
        self.pool.release(leaving(seq, 0))
        for table in seq.tables:
            table.cut(0)
        seq.is_open = False
        self._last_step = []
        del self.sequences[seq.seq_id]

    def reset(self, *, canonical_order: Flag = False) -> ResetReport:
        """Make all cached content unreachable at once, as after a change of weights.

        Open sequences keep their blocks and go on, but nothing that they have computed or still
        compute is ever shared: it belongs to before. What loses its content is reused first.
        O(contents + open sequences).

        Args:
            canonical_order: also put the free blocks in the order of their ids, as when new;
                O(n log n) of the blocks that were ever held.

        Returns:
            How many blocks lost content, and how many are still held by open sequences.
        """
        report = ResetReport(
            self.pool.num_cached_blocks, self.pool.num_used_blocks, len(self.sequences)
        )
        self.pool.clear(canonical_order=canonical_order)
        for seq in self.sequences.values():
            seq.forget_identity()
        return report

    def __copy__(self) -> NoReturn:
        raise MisuseError(f"{self!r} is one cache: a copy would hand out the same blocks")

    def __repr__(self) -> str:
        return (
            f"KVCacheManager({self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.num_free_blocks} free, {len(self.sequences)} sequences, "
            f"{len(self.leases.active)} leases)"
        )

    def _admit(self, seq: KVSequence, hits: list[Block]) -> None:
        """Let a new sequence hold its hits and keep them as it wishes, and count it among all."""
        self.sequences[seq.seq_id] = seq
        try:
            if seq.wishes:
                self.pool.revive(hits, kept_hits(self.pool, seq))
            elif hits:
                self.pool.revive(hits)
        except BaseException:
            del self.sequences[seq.seq_id]
            raise
        self._next_seq_id += 1
