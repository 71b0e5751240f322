"""The KV cache manager: open, plan, reserve, append, commit, truncate, fork and close sequences.

Decides which blocks each sequence has, and what is shared through the prefix cache.

Invariants: a block is published when the last of its tokens is committed, never earlier, so draft
tokens, chunked prefill, failed loads and aborts need no further rule. A block that is published or
shared is immutable: a sequence that is truncated inside such a block releases it and computes its
first tokens again. Every call checks first and changes state afterwards: a call that raises has
changed nothing. No decision depends on a clock, a hash value or the order of a set, so managers
with the same calls return the same ids in every process.

Does not know how the memory of a block is laid out. A manager is not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn, SupportsIndex, final

from kvcore.arguments import (
    MAX_COUNT,
    Flag,
    as_bool,
    as_counts,
    as_int,
    as_list,
    check_sum,
)
from kvcore.block import Block, BlockId
from kvcore.content_tree import snapshot
from kvcore.errors import (
    ForeignSequenceError,
    InvalidArgumentError,
    MisuseError,
    StaleSequenceError,
)
from kvcore.events import EventLog, Snapshot
from kvcore.eviction.lifetimes import MAX_STEP, LifetimeRecorder
from kvcore.eviction.retention import Retention, check_retention
from kvcore.identity.block_hash import HashAlgorithm
from kvcore.identity.multimodal import MultimodalItem, as_items, check_items
from kvcore.identity.namespace import DEFAULT_NAMESPACE, Namespace
from kvcore.identity.tokens import MAX_TOKEN, Tokens, pack
from kvcore.lease import Lease, LeaseBook
from kvcore.pool import BlockPool
from kvcore.reports import CopyOrder, Growth, LookUps, Plan, ResetReport, Stats
from kvcore.sequence import KVSequence, check_all_known, check_expected, check_length
from kvcore.tables.block_table import BlockTable
from kvcore.tables.groups import LayerGroup, attention_groups, resolve_groups
from kvcore.tables.state_table import StateTable, new_states
from kvcore.verbs import load as loading
from kvcore.verbs import rewind, share, states
from kvcore.verbs import step as stepping
from kvcore.verbs.ends import Sight, first_ends
from kvcore.verbs.peaks import blocks_still_taken
from kvcore.verbs.write import write_rows


@final
class KVCacheManager:
    """Allocates the blocks of a KV cache to sequences, with prefix caching.

    Args:
        num_blocks: blocks in the cache; block 0 is the null block and is never handed out.
        block_size: tokens a block.
        groups: the KV cache groups that share the pool; None: one of full attention.
        enable_caching: False: no prefix caching.
        max_model_len: the most tokens that a sequence may have or reserve blocks for.
        record_events: record KV events in `events`, with this hash function; None: record none.
        record_lifetimes: add histograms of block lifetimes and reuse gaps to the stats.
        prefault: create all block objects now instead of at their first use; a `gc.freeze()`
            afterwards exempts them from garbage collection.

    Attributes:
        block_size: tokens a block, for groups that have no block size.
        groups: the layer groups, block sizes filled in.
        enable_caching: True if prefix caching is on.
        max_model_len: the most tokens a sequence may have; None: any number.
        pool: the blocks.
        leases: the leases for steps and transfers in flight.
        events: the KV events; None without `record_events`.
        sequences: the open sequences by their ids, oldest first.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        num_blocks: SupportsIndex,
        block_size: SupportsIndex,
        *,
        groups: Sequence[LayerGroup] | None = None,
        enable_caching: Flag = True,
        max_model_len: SupportsIndex | None = None,
        record_events: HashAlgorithm | None = None,
        record_lifetimes: Flag = False,
        prefault: Flag = False,
    ) -> None:
        self.block_size = as_int("block_size", block_size, 1, 2**20)
        self.groups = resolve_groups(groups, self.block_size)
        sizes = [group.block_size for group in self.groups]
        self.events = None if record_events is None else EventLog(sizes, record_events)
        self.pool = BlockPool(num_blocks, *sizes, log=self.events)
        if self.events is not None:
            self.events.max_hashes = max(self.events.max_hashes, self.pool.num_blocks)
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
        self._attention = attention_groups(self.groups)
        self._shapes = tuple([BlockTable(group) for group in self._attention])  # always empty
        self._state = new_states(self.groups)  # always empty
        self._has_ends = self.groups[1:] != () or self._shapes[0].forgets
        self._no_growth: tuple[tuple[BlockId, ...], ...] = ((),) * len(sizes)
        self._last_step: list[KVSequence] = []
        self._next_seq_id = 0
        self._queried, self._resumed = LookUps(), LookUps()

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache, the null block included. O(1)."""
        return self.pool.num_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be allocated: all but the null block. O(1)."""
        return self.pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now. O(1)."""
        return self.pool.num_free_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """The number of evictions so far: blocks with content that were reused. O(1)."""
        return self.pool.num_evicted_blocks

    def open(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = DEFAULT_NAMESPACE,
        items: Sequence[MultimodalItem] = (),
        retain: Sequence[Retention] = (),
        boundaries: Sequence[SupportsIndex] = (),
        recompute: SupportsIndex = 0,
        resumed: Flag = False,
        skip_reading: Flag = False,
    ) -> KVSequence:
        """Open a sequence: find its longest cached prefix and hold those blocks.

        No new block is taken, so the call cannot run out of blocks. The last token is never a hit,
        because its logits are needed. O(len(tokens)).

        Args:
            tokens: at least one token id; packed (a buffer of uint32) is fastest.
            namespace: it shares blocks with sequences of the same namespace; None: it shares none.
            items: multimodal items (images, embeddings), in order and without overlap.
            retain: the ranges of tokens to keep in the cache longer than others.
            boundaries: positions at which later prompts may continue otherwise, such as the start
                of a conversation's last turn, rounded down to block boundaries: recurrent states
                are published there, and blocks of windows before them are reused later than
                others. The end of the prompt and the end of its cached KV are always included.
            recompute: the number of last tokens of the cached prefix that are not hits, as their KV
                may be that of other tokens: a draft model of EAGLE's kind, or MTP, computes the KV
                of a token from the next one or more, so a prefix can be hit only where these are
                found too.
            resumed: the request was preempted before; the statistics count it separately.
            skip_reading: compute all tokens without a look-up. Other sequences can hit its blocks,
                and the statistics do not count it.

        Raises:
            InvalidArgumentError: no tokens, not token ids, not a namespace, or items that overlap
                or reach beyond the tokens.
            SequenceTooLongError: more tokens than `max_model_len`.
        """
        is_resumed = resumed is not False and as_bool("resumed", resumed)
        is_blind = skip_reading is not False and as_bool("skip_reading", skip_reading)
        packed, key, checked = share.describe(tokens, namespace, items, self.max_model_len)
        key = key if self.enable_caching else None
        ends = [as_int("boundaries", end, 0) for end in as_list("boundaries", boundaries)]
        is_zero = recompute.__class__ is int and not recompute  # as nearly always
        again = 0 if is_zero else as_int("recompute", recompute, 0)
        if again and self._state is not None:  # where the next look-up of this prompt ends
            ends.append(max(0, len(packed) - len(packed) % self._state.block_size - again))
        seq = self._new_sequence(packed, key, checked, ends, again)
        seq.retention = check_retention(retain) if retain else ()
        looks_up = not (key is None or is_blind)
        sight = Sight(is_resumed=is_resumed) if looks_up and self._has_ends else None
        self._admit(seq, share.share_cached(self.pool, seq, again, sight) if looks_up else [])
        if sight is not None and sight.older:
            self.pool.idle_blocks.put_first(sight.older, self.pool.idle_blocks.num_ends)
        if looks_up:
            counts = self._resumed if is_resumed else self._queried
            counts.num_tokens += len(packed)
            counts.num_hit_tokens += seq.num_cached_tokens
        return seq

    def plan(
        self,
        tokens: Tokens,
        *,
        namespace: Namespace | None = DEFAULT_NAMESPACE,
        items: Sequence[MultimodalItem] = (),
        chunk: SupportsIndex | None = None,
        num_external: SupportsIndex = 0,
        recompute: SupportsIndex = 0,
        skip_reading: Flag = False,
    ) -> Plan:
        """Return the blocks that `open` and `reserve` of all tokens would take; changes nothing.

        O(len(tokens)); with `chunk` also what `peak_blocks` costs.

        Args:
            tokens: as for `open`.
            namespace: as for `open`.
            items: as for `open`.
            chunk: the most tokens of one step (chunked prefill); blocks that windows release on the
                way are reused. None: one step computes all tokens.
            num_external: the number of first tokens whose KV is loaded by `begin_load`, if fewer
                are cached.
            recompute: as for `open`.
            skip_reading: as for `open`.

        Raises:
            InvalidArgumentError: as `open`, or `chunk` or `num_external` is out of range.
            SequenceTooLongError: more tokens than `max_model_len`.
        """
        width = None if chunk is None else as_int("chunk", chunk, 1)
        packed, key, checked = share.describe(tokens, namespace, items, self.max_model_len)
        external = as_int("num_external", num_external, 0, len(packed))
        again, is_blind = as_int("recompute", recompute, 0), as_bool("skip_reading", skip_reading)
        about = packed, key if self.enable_caching else None, checked, width, external, again
        return share.planned(self.pool, self._shapes, self._state, *about, is_blind=is_blind)

    def chunk_length(self, seq: KVSequence, num_tokens: SupportsIndex) -> int:
        """Return how many of the next `num_tokens` tokens one step should compute. O(log).

        Fewer, if a recurrent state is wanted before their end: a state can be published only where
        a step ends. A longer step is right too, and publishes less.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        state = None if seq.namespace_key is None else seq.state
        computed = seq.num_computed_tokens
        return count if state is None else min(count, state.next_stop(computed) - computed)

    def reserve(
        self, seq: KVSequence, num_tokens: SupportsIndex
    ) -> tuple[tuple[BlockId, ...], ...]:
        """Reserve blocks for the next `num_tokens` tokens after the computed ones.

        They may exceed the tokens that the sequence has, as lookahead for draft tokens.
        O(new blocks).

        Returns:
            For each layer group the block ids appended to its block table, often none.

        Raises:
            OutOfBlocksError: too few blocks are free.
            SequenceTooLongError: the tokens would exceed `max_model_len`.
        """
        known: object = seq  # callers are not all typed
        if (
            type(num_tokens) is int
            and 0 <= num_tokens <= MAX_COUNT
            and type(known) is KVSequence
            and known.owner is self
        ):
            total = known.num_computed_tokens + num_tokens
            if total <= known.num_reserved_tokens:
                return self._no_growth
            self._check_open(known)  # it may be a copy
            check_length(total, self.max_model_len)
            return self._grow(known, total)
        return self._grow(seq, self._room_wanted(seq, num_tokens))

    def reserve_to(
        self, seq: KVSequence, num_tokens: SupportsIndex
    ) -> tuple[tuple[BlockId, ...], ...]:
        """Reserve blocks for the first `num_tokens` tokens in all; otherwise like `reserve`."""
        total = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        check_length(total, self.max_model_len)
        return self._grow(seq, total)

    def _grow(self, seq: KVSequence, total: int) -> tuple[tuple[BlockId, ...], ...]:
        """Reserve blocks for the first `total` tokens; return the appended ids."""
        for table in seq.tables:
            if total > len(table.blocks) * table.block_size:
                break
        else:
            if seq.state is None or seq.state.write:
                seq.find_limits(self.max_model_len)
                return self._no_growth
        return stepping.grow(self.pool, seq, total, self.max_model_len)

    def can_reserve(self, seq: KVSequence, num_tokens: SupportsIndex) -> bool:
        """Return whether enough blocks are free for `reserve` with these arguments. O(groups).

        No free blocks are needed to keep a recurrent state, as `num_missing_blocks` explains.
        Raises like `reserve`, except `OutOfBlocksError`.
        """
        total = self._room_wanted(seq, num_tokens)
        return blocks_still_taken(seq, total, None, 0) <= self.pool.num_free_blocks

    def append(self, seq: KVSequence, token: SupportsIndex) -> None:
        """Append a token whose KV is not computed yet. O(1).

        Raises:
            InvalidArgumentError: not a token id.
            SequenceTooLongError: the sequence has `max_model_len` tokens already.
            UnknownTokensError: expected tokens before it are not resolved yet.
        """
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            # A bool is an int, as it is in `pack`: to look for one costs more than packing does.
            token = int(token) if type(token) is bool else as_int("token", token, 0, MAX_TOKEN)
        known: object = seq  # callers are not all typed
        if type(known) is not KVSequence or known.owner is not self:
            self._check_open(seq)
        if seq.num_unknown_tokens:
            check_all_known(seq)
        if self.max_model_len is not None:
            check_length(len(seq.packed) + 1, self.max_model_len)
        seq.packed.append(token)
        seq.fast_decode_limit = 0

    def extend(
        self, seq: KVSequence, tokens: Tokens, *, items: Sequence[MultimodalItem] = ()
    ) -> None:
        """Append several tokens: draft tokens, or the next turn. O(len(tokens)).

        Items lie within the new tokens, at their positions in the whole sequence. Raises like
        `append`, and like `open` for items.
        """
        packed = pack(tokens)
        given = as_items(items)
        self._check_open(seq)
        check_all_known(seq)
        length = len(seq.packed)
        check_length(length + len(packed), self.max_model_len)
        together = seq.items + check_items(given, length, length + len(packed))
        seq.packed.extend(packed)
        seq.fast_decode_limit = 0
        seq.items = together

    def expect(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """Append expected tokens: their ids are on the device and become known by `resolve`.

        They count like other tokens, and can be reserved and committed. Blocks that they fill can
        be hit once the ids are known. Until then only expected tokens may follow them. O(1).

        Raises:
            SequenceTooLongError: the sequence would have more than `max_model_len` tokens.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        check_length(seq.num_tokens + count, self.max_model_len)
        seq.num_unknown_tokens += count
        seq.fast_decode_limit = 0

    def resolve(
        self, seq: KVSequence, tokens: Tokens, *, start: SupportsIndex | None = None
    ) -> None:
        """Set the ids of the first expected tokens.

        Blocks that this settles can be hit from now on, and blocks that leave a window are
        released. O(len(tokens) + blocks filled and released).

        Args:
            seq: an open sequence.
            tokens: the token ids, at most as many as are expected.
            start: the position of the first one, if the caller knows it. Tokens that were resolved
                before, or truncated and expected again, then raise.

        Raises:
            InvalidArgumentError: not token ids.
            NotExpectedError: more tokens than are expected, or other positions.
        """
        packed = pack(tokens)
        first = None if start is None else as_int("start", start, 0)
        self._check_open(seq)
        check_expected(seq, len(packed), first)
        stepping.resolve(self.pool, seq, packed.tolist(), self.max_model_len)

    def commit(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """State that the KV of the next `num_tokens` tokens is written.

        Blocks that this fills can be hit from now on, or once their last token is known. Blocks
        that left the sliding window or the chunk of all later queries are released.
        O(blocks filled and released).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
            NotReservedError: more tokens than it has reserved blocks for.
        """
        known: object = seq  # callers are not all typed
        if (
            type(num_tokens) is int
            and 0 <= num_tokens <= MAX_COUNT
            and type(known) is KVSequence
            and known.owner is self
        ):
            computed = known.num_computed_tokens + num_tokens
            if computed < known.next_boundary and computed <= len(known.packed):
                known.num_computed_tokens = computed
                known.fast_decode_limit = 0
                self.pool.num_computed_tokens += num_tokens
                return
            count = num_tokens
        else:
            count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        stepping.commit(self.pool, seq, count, self.max_model_len)

    def truncate(self, seq: KVSequence, num_tokens: SupportsIndex) -> None:
        """Keep the first `num_tokens` tokens, and only the blocks that they need.

        This removes rejected draft tokens, expected tokens and lookahead blocks. A cut inside a
        published or shared block releases that block too, and `num_computed_tokens` falls to its
        first token. A cut before the blocks that a window group still has releases all blocks, and
        `num_computed_tokens` falls to 0. O(blocks released).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        count = as_int("num_tokens", count, 0, seq.num_tokens)
        rewind.cut(self.pool, seq, count)

    def drop_kept_state(self, seq: KVSequence) -> int:
        """Release the recurrent state that a sequence keeps in order to publish it when it ends.

        The state after the last block boundary behind the prompt: nothing reads it before the end,
        so an engine that runs out of blocks can give it up before it preempts a request. The
        sequence goes on as before; if it is cut, it may resume at an earlier position. O(pieces).

        Returns:
            The number of blocks that this frees: 0 if the sequence keeps no such state, or if the
            next step reads it, which then writes over it and needs no blocks for another.
        """
        self._check_open(seq)
        return states.drop_kept(self.pool, seq)

    def fork(self, seq: KVSequence) -> tuple[KVSequence, tuple[CopyOrder, ...]]:
        """Fork a sequence: the child has the same known tokens and the same computed KV.

        Expected tokens, and the KV computed for them, stay with the parent. Full blocks are shared.
        A partly computed block is copied: the child gets a new block, and the caller must
        carry out the copy orders before either sequence is written to. O(num_blocks).

        Returns:
            The child, and one copy order for each group whose last block is half full.

        Raises:
            OutOfBlocksError: no block is free for a half-full one.
        """
        self._check_open(seq)
        child = self._new_sequence(seq.packed[:], seq.namespace_key, seq.items, [], 0)
        self.sequences[child.seq_id] = child
        try:
            orders = share.share_computed(self.pool, seq, child)
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
        """Hold every block that the sequence has now until the lease ends. O(num_blocks).

        For a step in flight or a transfer: the sequence may be truncated or closed meanwhile, but
        its blocks are not reused. Use the lease in a `with`, or end it by `lease.end()`, by
        `leases.end(lease_id)` when a completion arrives, or by its deadline. A lease without a
        deadline pins its blocks: they stay in the cache, and can be hit, until it is ended.
        Recurrent states are among them: a lease of the kind "step" includes the blocks that the
        next step writes a state to; another one holds the states that are computed, and the
        sequence does not write into those any more: call `reserve` before its next step.

        Args:
            seq: an open sequence.
            kind: the kind of holder, such as "step", "load" or "store".
            owner: a name of the holder, for reports.
            num_tokens: hold only the blocks of the first `num_tokens` tokens; None: all.
            max_steps: the number of steps after which `tick` ends it; None: no deadline.

        Raises:
            InvalidArgumentError: `kind` or `owner` is no string, or `max_steps` is below 1.
        """
        count = None if num_tokens is None else as_int("num_tokens", num_tokens, 0)
        steps = None if max_steps is None else as_int("max_steps", max_steps, 1)
        self._check_open(seq)
        held = rewind.blocks_to_lease(seq, count, is_step=kind == "step")
        lease = self.leases.begin(held, kind, owner, steps)
        state = seq.state
        if state is not None and kind != "step" and state.write is state.read:
            state.write = []
            seq.num_reserved_tokens = seq.next_boundary = seq.fast_decode_limit = 0
        return lease

    def begin_load(
        self,
        seq: KVSequence,
        num_tokens: SupportsIndex,
        *,
        owner: str = "",
        max_steps: SupportsIndex | None = None,
    ) -> Lease:
        """Take blocks for KV from outside: of the first `num_tokens` tokens, all together.

        A window or chunk group gets blocks for the tokens that later queries see, and null entries
        before them; computed blocks are not loaded again. Until `commit_load` the blocks belong to
        a lease, whose `load` lists them, and the sequence is unchanged. Any other end of the lease
        (`end`, `fail_transfer`, its deadline) leaves the sequence unchanged as well.
        O(new blocks + num_tokens).

        Args:
            seq: an open sequence.
            num_tokens: more than are computed, and at most the known tokens.
            owner: a name of the loader, for reports.
            max_steps: the number of steps after which `tick` cancels the load; None: never.

        Raises:
            OutOfBlocksError: too few blocks are free.
            InvalidArgumentError: an argument is out of range, or `owner` is no string.
        """
        count = as_int("num_tokens", num_tokens, 0)
        steps = None if max_steps is None else as_int("max_steps", max_steps, 1)
        self._check_open(seq)
        count = as_int("num_tokens", count, seq.num_computed_tokens + 1, len(seq.packed))
        return loading.begin(self.pool, self.leases, seq, count, owner, steps)

    def commit_load(self, lease: Lease) -> bool:
        """State that all KV of a load has arrived; the lease ends.

        The tokens count as computed: the blocks that they fill can be hit from now on. Blocks
        outside the windows and blocks reserved after the full ones are released: call `reserve`
        again for the next tokens. A load that does not fit any more (the sequence is closed, was
        set back below its computed tokens of that time, has other tokens, or has computed them
        itself) or has ended only releases its blocks. O(num_tokens).

        Returns:
            True if the sequence has the loaded tokens.

        Raises:
            InvalidArgumentError: not a lease of this manager that `begin_load` has returned.
        """
        return loading.join(self.pool, self.leases, lease, self.max_model_len)

    def tick(self, num_steps: SupportsIndex = 1) -> tuple[Lease, ...]:
        """Advance the time by `num_steps` steps, or by another unit that the caller counts in.

        Leases end at their deadline, and so does the retention of blocks. O(n log n) of those that
        end.

        Returns:
            The leases that this ended, oldest first.
        """
        count = as_int("num_steps", num_steps, 0, MAX_STEP - self.pool.step)
        late = self.leases.due(self.pool.step + count)
        self.pool.tick(count, [block for lease in late for block in lease.blocks])
        self.leases.forget(late)
        return late

    def fail_load(self, seq: KVSequence, num_tokens: SupportsIndex) -> tuple[KVSequence, ...]:
        """State that the KV of the computed tokens after the first `num_tokens` is invalid.

        These tokens are not computed any more. Other blocks with the same prefix and the first of
        these tokens may depend on the invalid KV: they cannot be hit any more, and every sequence
        that has such a block computes it again: `num_computed_tokens` falls, the tokens stay. If
        `num_tokens` equals the number of computed tokens, nothing changes.
        O(all tokens and blocks of the sequences and of that content).

        Args:
            seq: an open sequence.
            num_tokens: the number of first tokens with valid KV.

        Returns:
            The sequences that were set back, in the order in which they were opened.

        Raises:
            InvalidArgumentError: more tokens than are computed.
        """
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        count = as_int("num_tokens", count, 0, seq.num_computed_tokens)
        return rewind.invalidate_from(self.pool, seq, count, list(self.sequences.values()))

    def fail_transfer(self, lease: Lease) -> tuple[KVSequence, ...]:
        """State that the KV in the blocks of a lease is invalid, and end the lease.

        Like `fail_load`, for a transfer whose request may be closed. A lease that has ended changes
        nothing. O(all tokens and blocks of the sequences and of that content).

        Returns:
            The sequences that were set back, in the order in which they were opened.

        Raises:
            InvalidArgumentError: not a lease of this manager.
        """
        if not self.leases.is_active(lease):
            return ()
        sequences = list(self.sequences.values())
        set_back = rewind.invalidate_blocks(self.pool, lease.blocks, sequences, lease.blocks)
        self.leases.forget((lease,))
        return set_back

    def fail_blocks(self, block_ids: Sequence[SupportsIndex]) -> tuple[KVSequence, ...]:
        """State that the KV in these blocks is invalid.

        Like `fail_transfer`, for a caller with block ids alone: without a lease a block may have
        been reused since. Blocks without content are ignored.

        Raises:
            InvalidArgumentError: not the id of a block that can be handed out.
        """
        given = as_list("block_ids", block_ids)
        ids = [as_int("block_ids", one, 1, self.num_blocks - 1) for one in given]
        return rewind.invalidate_blocks(
            self.pool, self.pool.made_blocks(ids), list(self.sequences.values())
        )

    def close(self, seq: KVSequence) -> None:
        """Close a sequence and release its blocks, tail first. O(num_blocks).

        The blocks that it published can be hit until they are reused.
        """
        known: object = seq  # callers are not all typed
        if type(known) is not KVSequence or self.sequences.get(known.seq_id) is not known:
            self._check_open(seq)
        rewind.close(self.pool, seq)
        self._last_step = []
        del self.sequences[seq.seq_id]

    def reset(self, *, canonical_order: Flag = False) -> ResetReport:
        """Make all cached content unreachable at once, as after a change of weights.

        Open sequences keep their blocks and continue, but share nothing any more. Blocks that lose
        their content are reused first.
        O(contents + open sequences).

        Args:
            canonical_order: also sort the free blocks by id, as in a new cache;
                O(n log n) of the blocks that were ever held.

        Returns:
            The number of blocks that lost content, and of those that open sequences hold.
        """
        report = ResetReport(
            self.pool.num_cached_blocks, self.pool.num_used_blocks, len(self.sequences)
        )
        self.pool.clear(canonical_order=canonical_order)
        for seq in self.sequences.values():
            seq.forget_identity()
        return report

    def step(
        self,
        seqs: Sequence[KVSequence],
        num_computed: SupportsIndex | Sequence[SupportsIndex] | None = None,
        tokens: Tokens = (),
        *,
        num_known: SupportsIndex | Sequence[SupportsIndex] | None = None,
        num_expected: SupportsIndex | Sequence[SupportsIndex] | None = None,
        num_reserved: SupportsIndex | Sequence[SupportsIndex] | None = None,
    ) -> tuple[Growth, ...]:
        """Advance every sequence of a step to the next forward pass, or none of them.

        For each sequence, in this order: `tokens` become known: they are the ids of its expected
        tokens, and the rest is appended; the KV of `num_computed` tokens counts as written;
        `num_expected` expected tokens are appended; blocks for `num_reserved` tokens after the
        computed ones are reserved, before any block is released. The result equals `resolve`,
        `extend`, `commit`, `expect` and `reserve` of each sequence.

        An engine that reads a token before it launches the next pass calls `step(seqs, 1, tokens)`
        after each pass. One that runs ahead calls `step(seqs, 1, tokens, num_expected=1)` when it
        has launched a pass, with the tokens of the pass before. In both a sequence without block
        changes costs a comparison and two additions; prompts and drafts can be in the same step.
        O(sequences + blocks filled, taken and released).

        Each number is one for all sequences, or a list of one for each.

        Args:
            seqs: open sequences, each once.
            num_computed: the number of next tokens that were computed, at most those with reserved
                blocks; None: all tokens that it had before the step.
            tokens: the token ids that became known, one sequence after another.
            num_known: the number of its token ids; None: one.
            num_expected: the number of expected tokens to append; None: none.
            num_reserved: the number of tokens after the computed ones to reserve blocks for; None:
                all tokens that it has after the step.

        Returns:
            The appended blocks, in the order of the sequences; only tables that grew.

        Raises:
            OutOfBlocksError: too few blocks are free for all of them. The same step with
                `num_reserved=0` needs none.
            NotReservedError: more tokens are computed than blocks were reserved for.
            InvalidArgumentError: a sequence is given twice, a number is missing, more tokens are
                computed than there are, or `tokens` has the wrong length.
            SequenceTooLongError: a sequence would exceed `max_model_len`.
        """
        running = seqs.copy() if type(seqs) is list else as_list("seqs", seqs)
        count = len(running)
        became_known = pack(tokens).tolist()
        known = [1] * count if num_known is None else as_counts("num_known", num_known, count)
        if len(became_known) != (count if num_known is None else sum(known)):
            check_sum(became_known, known)  # raises
        moves = stepping.Moves(
            became_known,
            known,
            None if num_computed is None else as_counts("num_computed", num_computed, count),
            [0] * count if num_expected is None else as_counts("num_expected", num_expected, count),
            None if num_reserved is None else as_counts("num_reserved", num_reserved, count),
        )
        self._check_step(running)  # last: what an `__index__` does must not come after it
        return stepping.step(self.pool, running, moves, self.max_model_len)

    def decode_step(self, seqs: Sequence[KVSequence], tokens: Tokens) -> tuple[Growth, ...]:
        """Commit all tokens of every sequence, and append one with a reserved slot to each.

        `step(seqs, None, tokens)`, with its errors and its cost.
        """
        return self.step(seqs, None, tokens)

    def reserve_step(
        self, seqs: Sequence[KVSequence], num_tokens: Sequence[SupportsIndex]
    ) -> tuple[Growth, ...]:
        """Reserve blocks for the next tokens of every sequence of a step, or for none.

        `step` with nothing known, computed or expected; with its errors and its cost.
        """
        return self.step(seqs, 0, (), num_known=0, num_reserved=num_tokens)

    def commit_step(self, seqs: Sequence[KVSequence], num_tokens: Sequence[SupportsIndex]) -> None:
        """State for every sequence of a step that the KV of its next tokens is written.

        `step` with nothing known, expected or reserved; with its errors and its cost.
        """
        self.step(seqs, num_tokens, (), num_known=0, num_reserved=0)

    def resolve_step(
        self,
        seqs: Sequence[KVSequence],
        tokens: Tokens,
        *,
        num_resolved: Sequence[SupportsIndex] | None = None,
        starts: Sequence[SupportsIndex] | None = None,
    ) -> None:
        """Set the ids of the first expected tokens of every sequence; for all or for none.

        `step` with nothing computed, expected or reserved, but `tokens` resolve expected tokens
        only. Raises like `resolve` for each in turn.

        Args:
            seqs: open sequences, each once.
            tokens: the token ids, one sequence after another.
            num_resolved: for each the number of its token ids; None: one each.
            starts: for each the position of its first one, if the caller knows them.
        """
        running = as_list("seqs", seqs)
        count = len(running)
        counts = as_counts("num_resolved", 1 if num_resolved is None else num_resolved, count)
        firsts = None if starts is None else as_counts("starts", starts, count)
        self._check_step(running)
        for index, seq in enumerate(running):
            if firsts is not None or counts[index] > seq.num_unknown_tokens:
                check_expected(seq, counts[index], None if firsts is None else firsts[index])
        self.step(running, 0, tokens, num_known=counts, num_reserved=0)

    def write_step(
        self,
        seqs: Sequence[KVSequence],
        block_tables: object,
        slot_mapping: object,
        *,
        counts: Sequence[SupportsIndex] | None = None,
        row_stride: SupportsIndex | None = None,
        group: SupportsIndex = 0,
    ) -> None:
        """Write the block tables and the slot mapping of a step into buffers. O(blocks + slots).

        The slots are those of the tokens that the step computes, one sequence after another, each
        from its first token that is not computed. Call this before the tokens are committed.

        Args:
            seqs: open sequences, each once, with blocks for the tokens of the step.
            block_tables: a writable, contiguous buffer of int32 or int64, [rows, entries of a row],
                or flat: row `i` gets the table of sequence `i`; what follows in the row is
                untouched.
            slot_mapping: a writable, contiguous buffer of int64, or of int32 where the cache has
                fewer than 2**31 slots: [at least sum(counts)]; what follows is untouched.
            counts: for each sequence the number of tokens that the step computes. None: a decode
                step, one each.
            row_stride: entries from one row to the next of a flat `block_tables`.
            group: the layer group.

        Raises:
            NotReservedError: a sequence has no block for one of its tokens.
            InvalidArgumentError: a sequence is given twice, a count is missing, or `counts` is None
                and a sequence has more than one token to compute; a table is longer than a row, a
                slot exceeds 32 bits, or a buffer does not fit. Nothing is written then.
        """
        stride = None if row_stride is None else as_int("row_stride", row_stride, 1)
        number = as_int("group", group, 0, len(self.groups) - 1)
        running = as_list("seqs", seqs)
        each = None
        if counts is not None:
            each = as_counts("counts", as_list("counts", counts), len(running))
        self._check_step(running)
        write_rows(running, each, number, block_tables, slot_mapping, stride)

    def num_missing_blocks(
        self,
        seq: KVSequence,
        num_tokens: SupportsIndex,
        *,
        chunk: SupportsIndex | None = None,
        num_external: SupportsIndex = 0,
    ) -> int:
        """Return the fewest free blocks with which `reserve(seq, num_tokens)` succeeds. O(groups).

        It takes no others, but for recurrent states: where more blocks are free, it may take those
        of one state in addition, and keep the state that the next step would otherwise replace.
        `reserve_step` and `step` keep none where too few blocks are free for the whole step, so
        the sum over its sequences is sufficient for them.

        With `chunk`: the most blocks taken at once until `num_tokens` more tokens are computed in
        steps of at most `chunk` tokens, where blocks that windows release are reused. O(groups) if
        the blocks are reserved already, otherwise like `peak_blocks`. With `num_external`: includes
        a load of the first `num_external` tokens, if fewer are computed; O(blocks).

        Raises:
            InvalidArgumentError: an argument is out of range.
        """
        count = as_int("num_tokens", num_tokens, 0)
        width = None if chunk is None else as_int("chunk", chunk, 1)
        external = as_int("num_external", num_external, 0)
        self._check_open(seq)
        external = as_int("num_external", external, 0, len(seq.packed))
        return blocks_still_taken(seq, seq.num_computed_tokens + count, width, external)

    def num_exclusive_blocks(self, seq: KVSequence) -> int:
        """Return the number of blocks that closing this sequence would free. O(num_blocks)."""
        self._check_open(seq)
        return share.num_exclusive(seq)

    def num_shared_blocks(self, seq: KVSequence, *, group: SupportsIndex = 0) -> int:
        """Return the number of leading blocks of a group that have other holders. O(those).

        Other holders are sequences and leases. Such blocks survive the closing of this sequence.

        Raises:
            InvalidArgumentError: no such group.
        """
        self._check_open(seq)
        return share.num_shared(seq, group)

    def num_common_blocks(self, seqs: Sequence[KVSequence], *, group: SupportsIndex = 0) -> int:
        """Count the leading blocks that all these sequences share. O(len(seqs) * blocks shared).

        The result comes from the block tables, not from ref counts, which include other holders. A
        kernel may read the common prefix once for all sequences (cascade attention). Null entries
        are not shared, so a window that has moved on shares nothing.

        Raises:
            InvalidArgumentError: no sequences, or no such group.
        """
        running = as_list("seqs", seqs)
        for seq in running:
            self._check_open(seq)
        return share.num_common(running, group)

    def snapshot(self) -> Snapshot:
        """Return all contents that can be hit now, for a reader of KV events. O(contents).

        Raises:
            InvalidArgumentError: the manager was created without `record_events`.
        """
        return snapshot(self.events, self.pool.trees)

    def stats(self) -> Stats:
        """Return a snapshot of the counters. O(1)."""
        return Stats(
            num_blocks=self.pool.num_blocks,
            num_used_blocks=self.pool.num_used_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_cached_blocks=self.pool.num_cached_blocks,
            peak_used_blocks=self.pool.peak_used_blocks,
            num_queried_tokens=self._queried.num_tokens,
            num_hit_tokens=self._queried.num_hit_tokens,
            num_evicted_blocks=self.pool.num_evicted_blocks,
            num_allocated_blocks=self.pool.num_allocated_blocks,
            num_resumed_tokens=self._resumed.num_tokens,
            num_resumed_hit_tokens=self._resumed.num_hit_tokens,
            num_computed_tokens=self.pool.num_computed_tokens,
            num_slots=self.pool.num_used_slots,
            lifetimes=None if self.pool.lifetimes is None else self.pool.lifetimes.stats(),
        )

    def __copy__(self) -> NoReturn:
        raise MisuseError(f"{self!r} cannot be copied")

    def __reduce__(self) -> NoReturn:
        raise MisuseError(f"{self!r} cannot be pickled: send events and a snapshot")

    def __repr__(self) -> str:
        return (
            f"KVCacheManager({self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.num_free_blocks} free, {len(self.sequences)} sequences, "
            f"{len(self.leases.active)} leases)"
        )

    def _admit(self, seq: KVSequence, hits: list[Block]) -> None:
        """Hold the prefix cache hits of a new sequence, with its retention, and register it."""
        self.sequences[seq.seq_id] = seq
        if hits:
            try:
                kept = share.kept_hits(self.pool, seq) if seq.retention else ()
                self.pool.revive(hits, kept)
            except BaseException:
                del self.sequences[seq.seq_id]
                raise
            self.pool.num_computed_tokens += seq.num_computed_tokens
        self._next_seq_id += 1

    def _new_sequence(
        self,
        packed: array[int],
        key: bytes | None,
        items: tuple[MultimodalItem, ...],
        boundaries: list[int],
        recompute: int,
    ) -> KVSequence:
        seq = KVSequence(self, self._next_seq_id, packed, key, self._attention, items)
        seq.opened_at = self.pool.step
        if self._state is not None:
            seq.state = StateTable(self._state.group, self._state.number)
            seq.state.begin(len(packed), 0, () if key is None else boundaries)
        if self._has_ends and key is not None:
            seq.ends = first_ends(self.pool, len(packed), boundaries, recompute)
        return seq

    def _check_open(self, seq: KVSequence) -> None:
        known: object = seq  # callers are not all typed
        if type(known) is KVSequence and self.sequences.get(known.seq_id) is known:
            return
        if not isinstance(seq, KVSequence):
            raise InvalidArgumentError(f"seq: wanted a KVSequence, got {type(seq).__name__}")
        if seq.is_open and seq.owner is not self:
            raise ForeignSequenceError(f"seq: {seq!r} was opened by another manager")
        raise StaleSequenceError(f"seq: {seq!r} is closed, or a copy")

    def _room_wanted(self, seq: KVSequence, num_tokens: SupportsIndex) -> int:
        # Arguments first: what an `__index__` does must not come between a check and its use.
        count = as_int("num_tokens", num_tokens, 0)
        self._check_open(seq)
        total = seq.num_computed_tokens + count
        check_length(total, self.max_model_len)
        return total

    def _check_step(self, running: list[KVSequence]) -> None:
        """Raise unless the sequences of a step are open, and each is there once."""
        if self._last_step == running:  # ours compare by identity; none has been closed since
            return
        try:
            ids = [seq.seq_id for seq in running]
            are_known = [*map(self.sequences.__getitem__, ids)] == running
        except (AttributeError, KeyError, TypeError):
            ids, are_known = [], False
        if not are_known:
            for seq in running:
                self._check_open(seq)
        if len(set(ids)) != len(running):
            raise InvalidArgumentError("seqs: wanted each once, got one twice")
        self._last_step = running
