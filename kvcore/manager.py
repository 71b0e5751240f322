"""Sequences over a pool: open, reserve, append, commit, truncate, close.

One rule decides what others can see: reserve, write, commit(n), visible. A block is published when
the last of its tokens is committed, never earlier, so drafts, chunks, failed loads and aborts need
no rule of their own. A published block is immutable: a sequence that is cut inside one gives it
back and computes its head again.

Every call checks first and changes afterwards: one that raises has changed nothing. Nothing here
reads a clock, a hash or the order of a set, so managers fed the same calls give the same ids in
every process. A manager is not thread-safe, and does not know what a block's memory looks like.
"""

from __future__ import annotations

from array import array
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
from kvcore.hashing import (
    DEFAULT_NAMESPACE,
    BlockHash,
    NameAlgorithm,
    NameChain,
    Namespace,
    encode_namespace,
)
from kvcore.pool import BlockPool
from kvcore.sequence import KVSequence
from kvcore.slots import slots_of, write_ints
from kvcore.stats import Plan, Stats
from kvcore.tokens import MAX_TOKEN, Tokens, pack


@final
class KVCacheManager:
    """The block tables of all sequences, and the prefixes that they share.

    Args:
        num_blocks: blocks in the cache; block 0 is the null block and is never handed out.
        block_size: tokens a block.
        enable_caching: False: nothing is published and nothing is hit.
        max_model_len: the most tokens a sequence may have, and the most it may reserve for.
        name_algorithm: how blocks are named for the outside: "xxh3-128", or "sha256".

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_caching: bool = True,
        max_model_len: int | None = None,
        name_algorithm: NameAlgorithm = "xxh3-128",
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = self.pool.block_size
        self.enable_caching = bool(enable_caching)
        self.max_model_len = (
            None if max_model_len is None else as_int("max_model_len", max_model_len, 1)
        )
        NameChain(b"", self.block_size, name_algorithm)  # refuses an unknown algorithm now
        self.name_algorithm: NameAlgorithm = name_algorithm
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
        seq = KVSequence(self, self._next_seq_id, packed, key)
        if key is not None:
            hits = self.pool.match(key, packed.tobytes(), (len(packed) - 1) // self.block_size)
            self.pool.hold(hits)
            seq.blocks = hits
            seq.block_ids = array("i", [block.block_id for block in hits])
            seq.num_published_blocks = len(hits)
            seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * self.block_size
            self._num_queried_tokens += len(packed)
            self._num_hit_tokens += seq.num_cached_tokens
        self._next_seq_id += 1
        self.sequences[seq.seq_id] = seq
        return seq

    def plan(self, tokens: Tokens, *, namespace: Namespace | None = DEFAULT_NAMESPACE) -> Plan:
        """Say what `open` and `reserve` of all the tokens would take; changes nothing.

        O(len(tokens)). Raises like `open`.
        """
        packed, key = self._described(tokens, namespace)
        hits = []
        if key is not None:
            hits = self.pool.match(key, packed.tobytes(), (len(packed) - 1) // self.block_size)
        return Plan(
            num_cached_tokens=len(hits) * self.block_size,
            num_new_blocks=-(-len(packed) // self.block_size) - len(hits),
            num_revived_blocks=sum(block.ref_count == 0 for block in hits),
            num_free_blocks=self.pool.num_free_blocks,
        )

    def reserve(self, seq: KVSequence, num_tokens: int) -> tuple[BlockId, ...]:
        """Make room for the next `num_tokens` tokens after the computed ones.

        They may reach beyond the tokens that the sequence has: room for drafts. O(new blocks).

        Returns:
            The ids that were appended to the block table, often none.

        Raises:
            OutOfBlocksError: too few blocks are free.
            SequenceTooLongError: the room would reach past `max_model_len`.
        """
        missing = self._num_missing_blocks(seq, num_tokens)
        if missing <= 0:
            return ()
        taken = self.pool.take(missing)
        ids = tuple(block.block_id for block in taken)
        seq.blocks.extend(taken)
        seq.block_ids.extend(ids)
        return ids

    def can_reserve(self, seq: KVSequence, num_tokens: int) -> bool:
        """Say whether `reserve` with the same arguments would succeed now. O(1)."""
        return self._num_missing_blocks(seq, num_tokens) <= self.pool.num_free_blocks

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

        Blocks that this fills can be hit by others from now on. O(blocks filled).

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
        if computed > len(seq.blocks) * self.block_size:
            raise NotReservedError(
                f"commit: {computed} tokens computed, room for {len(seq.blocks) * self.block_size}"
            )
        seq.num_computed_tokens = computed
        if seq.namespace_key is not None:
            self._publish(seq, seq.namespace_key)

    def truncate(self, seq: KVSequence, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and only the blocks that they need.

        Rejected drafts leave so, and room that was reserved beyond. Where the cut goes through a
        published block, that block is given back too (it still holds its content for others) and
        `num_computed_tokens` falls to its first token. O(blocks released).

        Raises:
            InvalidArgumentError: more tokens than the sequence has.
        """
        self._check_open(seq)
        count = as_int("num_tokens", num_tokens, 0, len(seq.packed))
        size = self.block_size
        whole = count // size
        keep = whole if whole < seq.num_published_blocks else -(-count // size)
        self.pool.release(seq.blocks[keep:][::-1])
        del seq.blocks[keep:], seq.block_ids[keep:], seq.packed[count:]
        seq.num_published_blocks = min(seq.num_published_blocks, keep)
        seq.num_computed_tokens = min(seq.num_computed_tokens, count, keep * size)
        seq.num_cached_tokens = min(seq.num_cached_tokens, seq.num_computed_tokens)
        if seq.chain is not None:
            seq.chain.cut(whole)

    def close(self, seq: KVSequence) -> None:
        """End a sequence: its blocks are released, tail first. O(num_blocks).

        What it published can be hit until its blocks are reused.
        """
        self._check_open(seq)
        self.pool.release(seq.blocks[::-1])
        seq.blocks = []
        seq.block_ids = array("i")
        seq.num_published_blocks = 0
        seq.is_open = False
        del self.sequences[seq.seq_id]

    def write_block_table(self, seq: KVSequence, out: object) -> int:
        """Write the sequence's block ids to the beginning of `out`. O(num_blocks).

        Args:
            seq: an open sequence.
            out: a writable, contiguous buffer of int32: [at least num_blocks].

        Returns:
            How many entries were written; those after them are untouched.

        Raises:
            InvalidArgumentError: `out` is another kind of buffer, or too short.
        """
        self._check_open(seq)
        write_ints("out", out, seq.block_ids)
        return len(seq.block_ids)

    def write_slot_mapping(self, seq: KVSequence, start: int, stop: int, out: object) -> int:
        """Write the slots of the positions `start` to `stop - 1` to the beginning of `out`.

        O(stop - start). `out` is a writable, contiguous buffer of int64: [at least stop - start].

        Returns:
            How many entries were written.

        Raises:
            NotReservedError: the sequence has no block for one of the positions.
            InvalidArgumentError: `stop < start`, or `out` is another kind of buffer or too short.
        """
        self._check_open(seq)
        start = as_int("start", start, 0)
        stop = as_int("stop", stop, start)
        if stop > len(seq.blocks) * self.block_size:
            raise NotReservedError(
                f"stop: position {stop - 1} has no block, "
                f"room for {len(seq.blocks) * self.block_size}"
            )
        write_ints("out", out, slots_of(seq.block_table, start, stop, self.block_size))
        return stop - start

    def block_names(self, seq: KVSequence) -> tuple[BlockHash, ...]:
        """Return the names of the sequence's published blocks. O(blocks not named before).

        No hit depends on them. A sequence that is not cached has none.
        """
        self._check_open(seq)
        if seq.namespace_key is None:
            return ()
        if seq.chain is None:
            seq.chain = NameChain(seq.namespace_key, self.block_size, self.name_algorithm)
        return seq.chain.names(seq.packed, seq.num_published_blocks)

    def stats(self) -> Stats:
        """Return a snapshot of the counters. O(num_blocks)."""
        return Stats(
            num_blocks=len(self.pool.blocks),
            num_used_blocks=self.pool.num_used_blocks,
            num_free_blocks=self.pool.num_free_blocks,
            num_cached_blocks=sum(block.node is not None for block in self.pool.blocks),
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

    def _num_missing_blocks(self, seq: KVSequence, num_tokens: int) -> int:
        self._check_open(seq)
        total = seq.num_computed_tokens + as_int("num_tokens", num_tokens, 0)
        self._check_length(total)
        return -(-total // self.block_size) - len(seq.blocks)

    def _publish(self, seq: KVSequence, key: bytes) -> None:
        size = self.block_size
        for index in range(seq.num_published_blocks, seq.num_computed_tokens // size):
            parent = seq.blocks[index - 1] if index else None
            tokens = seq.packed[index * size : (index + 1) * size].tobytes()
            self.pool.publish(seq.blocks[index], key, parent, tokens)
            seq.num_published_blocks = index + 1

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
