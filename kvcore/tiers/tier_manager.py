"""The tiers behind the prefix cache of one manager: what is where, and what moves.

Decides: which copies a prompt can use, beyond what the pool itself has; which contents are stored.
A content is stored when it is published, in every tier, so a process that is killed has lost
nothing but what was on its way. The pool reports published contents, and drops the report when
contents prove invalid: then every tier is cleared, because what was computed from them is not known
any more. A look-up asks the pool, then host and disk together, and never by block id: the key of a
copy is its layer group and its block hash with sha256, which covers its tokens, its multimodal
items and its namespace.

Invariants: a copy can be found only when all of its bytes are there, and they are read from a block
only while a lease holds it; a load joins its sequence as a whole or not at all. Nothing here waits.

Does not know: threads, clocks, tensors: `jobs.py` moves the bytes wherever the caller runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, SupportsIndex, cast, final

from kvcore.arguments import as_int
from kvcore.block import Block, Node
from kvcore.content_tree import find_pieces
from kvcore.errors import InvalidArgumentError
from kvcore.events import node_hash
from kvcore.identity.block_hash import (
    HashAlgorithm,
    HashChain,
    block_contents,
    digest,
    hashes_after,
)
from kvcore.identity.namespace import has_salt
from kvcore.manager import KVCacheManager
from kvcore.sequence import KVSequence
from kvcore.tables.groups import RecurrentState
from kvcore.tiers.host import HostTier
from kvcore.tiers.host_blocks import BlockMover, HostBlocks, HostMover, OneByOne
from kvcore.tiers.jobs import LoadJob, Part, StoreJob
from kvcore.tiers.record import Key, key_of, meaning_of
from kvcore.tiers.tier import KeepingTier, Tier, TierError

_ALGORITHM: Final[HashAlgorithm] = "sha256"


@dataclass(frozen=True, slots=True)
class Found:
    """What is where of a sequence's prefix.

    Attributes:
        num_device_tokens: its computed tokens, which are in the pool.
        num_tokens: its first tokens whose KV is in the pool or in tiers.
        num_copies: for each tier the number of copies that a load would read from it.
    """

    num_device_tokens: int
    num_tokens: int
    num_copies: Mapping[str, int]


@final
class TierManager:
    """Host memory and disk behind the prefix cache of a manager.

    Args:
        kv: the manager; with `record_events`, its algorithm has to be sha256.
        tiers: the fastest first. They are started here, and closed by `close`.
        mover: moves blocks, many at once, or reads and writes them one by one.
        block_bytes: bytes of a block.
        meaning: what these bytes mean: everything that another process must share to use them, such
            as a digest of the weights, the dtype and the rank. The geometry of the layer groups
            is added here.
        max_store_blocks: the most blocks that stores hold at once; None: an eighth of the pool.
        batch_bytes: what jobs move at once; host memory for four batches is allocated beside that
            of tiers, for a load and a store at a time.
        is_shard: other processes make the same calls and hold other parts of the same contents, so
            all must make the same choices: what tiers have decides nothing but what `find` returns,
            and the caller says how much is loaded and which stores are done.

    Attributes:
        kv: as above.
        tiers: as above.
        keeping: those that take copies.
        num_loaded_tokens: tokens that loads have brought.
        num_failed_loads: loads that did not join their sequence.
        num_skipped: published contents that were evicted before they could be stored.
        meaning: the digest of what the bytes of a copy mean.

    Raises:
        InvalidArgumentError: an argument is out of range.
        TierError: a tier cannot start; those before it are closed again.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        tiers: Sequence[Tier],
        mover: HostMover | BlockMover,
        *,
        block_bytes: SupportsIndex,
        meaning: Mapping[str, str | int],
        max_store_blocks: SupportsIndex | None = None,
        batch_bytes: SupportsIndex = 128 << 20,
        is_shard: bool = False,
    ) -> None:
        self.kv = kv
        self.tiers = tuple(tiers)
        self.keeping = tuple([cast("KeepingTier", tier) for tier in self.tiers if tier.keeps])
        self.num_loaded_tokens = self.num_failed_loads = self.num_skipped = 0
        self._block_bytes = as_int("block_bytes", block_bytes, 1)
        most = kv.num_usable_blocks // 8 or 1
        if max_store_blocks is not None:
            most = as_int("max_store_blocks", max_store_blocks, 1)
        self._most = most
        self._is_shard = is_shard
        if kv.events is not None and kv.events.algorithm != _ALGORITHM:
            raise InvalidArgumentError(
                f"record_events: wanted 'sha256' or None with tiers, got {kv.events.algorithm!r}"
            )
        if kv.pool.watcher is not None:
            raise InvalidArgumentError("kv: wanted a manager without tiers, got one that has some")
        self._state = kv.groups[-1] if isinstance(kv.groups[-1], RecurrentState) else None
        self._common = lcm(*kv.pool.block_sizes)
        self._published: dict[Block, None] = {}  # these wait for `begin_store`
        self._stores: list[StoreJob] = []
        self._loads: list[LoadJob] = []
        self._storing: set[Key] = set()
        self._wrong: tuple[tuple[int, ...], frozenset[Key]] | None = None  # while `reset` runs
        self._num_storing = 0
        about = {**meaning, "block_bytes": self._block_bytes, "groups": repr(kv.groups)}
        self.meaning = meaning_of(about)
        largest = self.copy_bytes(len(kv.groups) - 1)
        batch = as_int("batch_bytes", batch_bytes, 1) // self._block_bytes
        self._batch = max(largest // self._block_bytes, min(batch, kv.num_usable_blocks))
        if not isinstance(mover, HostMover):
            mover = OneByOne(mover, self._block_bytes)
        self._mover: HostMover = mover
        started: list[Tier] = []
        try:
            for tier in self.tiers:
                tier.start(self.meaning, largest)
                started.append(tier)
            self._blocks = self._host_blocks(mover, largest)
        except BaseException:
            for tier in started:
                tier.close()
            raise
        kv.pool.watcher = self

    def _host_blocks(self, mover: HostMover, largest: int) -> HostBlocks:
        """Allocate host memory for host tiers, three batches of a load and one of a store."""
        hosts = [cast("HostTier", tier) for tier in self.tiers if tier.in_blocks]
        count = 4 * self._batch + sum(
            [tier.most_blocks(largest, self._block_bytes) for tier in hosts]
        )
        try:
            blocks = HostBlocks(mover, count, self._block_bytes)
        except MemoryError as error:
            raise TierError(f"host tier: {error}") from None
        for tier in hosts:
            tier.use(blocks)
        return blocks

    def copy_bytes(self, group: int) -> int:
        """Return the bytes of a copy of one layer group. O(1)."""
        is_state = self._state is not None and group == len(self.kv.groups) - 1
        pieces = self._state.num_blocks if is_state and self._state is not None else 1
        return pieces * self._block_bytes

    @property
    def num_published(self) -> int:
        """The published blocks that wait for `begin_store`. O(1)."""
        return len(self._published)

    # What the pool reports

    def published(self, blocks: list[Block]) -> None:
        """See `ContentWatcher`. O(blocks)."""
        if self.keeping:
            self._published.update(dict.fromkeys(blocks))

    def cleared(self) -> None:
        """See `ContentWatcher`: forget every copy, and what is on its way. O(files)."""
        self._published.clear()
        self._storing.clear()  # the stores under way keep nothing any more
        if self._wrong is None:
            for tier in self.tiers:
                tier.clear()
            return
        marks, keys = self._wrong
        for tier, mark in zip(self.tiers, marks, strict=True):
            tier.forget(mark, keys)

    def marks(self) -> tuple[int, ...]:
        """Return the moment, for `reset`. O(tiers)."""
        return tuple([tier.mark() for tier in self.tiers])

    def reset(self, since: tuple[int, ...], seq: KVSequence | None = None) -> None:
        """Empty the prefix cache as `kv.reset` does; keep the copies that are right nevertheless.

        Forgotten are those that were stored since a moment, such as the begin of a step that has
        failed, and those of a sequence. O(copies).
        """
        self._wrong = since, frozenset(() if seq is None else self._all_keys(seq))
        try:
            self.kv.reset()
        finally:
            self._wrong = None

    def _all_keys(self, seq: KVSequence) -> Iterator[Key]:
        """Yield the keys of all full blocks of a sequence. O(tokens)."""
        namespace_key = seq.namespace_key
        if namespace_key is None:
            return
        is_private = has_salt(namespace_key)
        for group, size in enumerate(self.kv.pool.block_sizes):
            chain = HashChain(namespace_key, size, _ALGORITHM)
            for block_hash in chain.hashes(seq.packed, len(seq.packed) // size, seq.items):
                yield key_of(group, block_hash, is_private=is_private)

    # Stores

    def begin_store(self) -> StoreJob | None:
        """Begin to store published contents that no tier lacks room for. O(blocks).

        Call it after each step. The blocks are under a lease until `finish_store`; no more than
        `max_store_blocks` at once, and the rest waits for the next call.

        Returns:
            A job to run on any thread; None: there is nothing to store.
        """
        parts: list[Part] = []
        blocks: dict[Block, None] = {}
        salted: dict[Node, bool] = {}
        while self._published and len(blocks) < self._most - self._num_storing:
            block = next(iter(self._published))
            del self._published[block]
            held = self._pieces(block)
            if held and not any(each in blocks for each in held):
                part = self._part(held, salted)
                if part is not None:
                    parts.append(part)
                    blocks.update(dict.fromkeys(held))
        if not parts:
            return None
        lease = self.kv.leases.begin([*blocks], "store", "tiers", None)
        job = StoreJob(parts[::-1], lease, self.keeping, self._blocks, self._batch)
        self._stores.append(job)
        self._storing.update([part.key for part in parts])
        self._num_storing += len(blocks)
        return job

    def finish_store(self, job: StoreJob, *, is_done: bool | None = None) -> None:
        """End a store, done or not: its blocks are released. O(blocks).

        Blocks that were not stored by then are queued again, if they are still cached. A second
        call changes nothing.

        Args:
            job: as `begin_store` returned it.
            is_done: whether it is done in every process; None: this is the only one.
        """
        if job not in self._stores:
            return
        job.cancel()
        if not ((job.is_done if is_done is None else is_done) or job.is_stale):
            self._published.update(dict.fromkeys(job.lease.blocks))
        self._stores.remove(job)
        if not job.is_stale:
            self._storing.difference_update([part.key for part in job.parts])
        self._num_storing -= sum([len(part.block_ids) for part in job.parts])
        job.lease.end()

    def cancel_stores(self) -> bool:
        """End every store that is under way, because its blocks are needed. O(their blocks).

        Returns:
            Whether there were any.
        """
        jobs = [*self._stores]
        for job in jobs:
            self.finish_store(job, is_done=False if self._is_shard else None)
        return bool(jobs)

    def _pieces(self, block: Block) -> list[Block]:
        """Return the blocks of the content that a block has now; none if it has none."""
        node = block.node
        if node is None:
            self.num_skipped += 1
            return []
        if node.is_piece():
            return []
        if self._state is None or block.group != len(self.kv.groups) - 1:
            return [block]
        found = find_pieces(block, self._state.num_blocks)
        return found if len(found) == self._state.num_blocks else []

    def _part(self, held: list[Block], salted: dict[Node, bool]) -> Part | None:
        first = held[0]
        if first.node is None:
            return None
        size = self.kv.pool.block_sizes[first.group]
        block_hash = node_hash(first.node, size, _ALGORITHM)
        key = key_of(first.group, block_hash, is_private=_is_salted(first.node, salted))
        if key in self._storing or (not self._is_shard and self._is_kept(key)):
            return None
        terms = self.kv.pool.idle_blocks.kept.get(first.block_id)
        ids = tuple([block.block_id for block in held])
        return Part(key, ids, terms[0][0] if terms else 0)

    def _is_kept(self, key: Key) -> bool:
        """Return whether every tier that takes copies has one. O(tiers)."""
        return all(tier.contains(key) for tier in self.keeping)

    # Loads

    def most_tokens(self, seq: KVSequence) -> int:
        """Return how many tokens of a sequence tiers could have: whole blocks of a prefix. O(1).

        The last known token is never among them: its logits are needed.
        """
        if seq.namespace_key is None or not self.tiers:
            return 0
        return (len(seq.packed) - 1) // self._common * self._common

    def find(self, seq: KVSequence) -> Found:
        """Return how much of a prefix the pool and each tier have. O(blocks in tiers)."""
        computed = seq.num_computed_tokens
        num_tokens, keys = self._look_up(seq)
        counts = dict.fromkeys([tier.name for tier in self.tiers], 0)
        for key in keys:
            for tier in self.tiers:
                if tier.contains(key):
                    counts[tier.name] += 1
                    break
        return Found(computed, num_tokens, counts)

    def begin_load(
        self, seq: KVSequence, *, num_tokens: SupportsIndex | None = None
    ) -> LoadJob | None:
        """Reserve blocks for the part of a prefix that tiers have, and begin to load it.

        Until `finish_load` the sequence is unchanged. What the pool had of the prefix counts as
        used in the tiers too, and is stored again if they have lost it. O(blocks).

        Args:
            seq: an open sequence.
            num_tokens: of the prefix to load, such as `find` has returned; None: all that is found.
                A copy that is missing by then has the load fail.

        Returns:
            A job to run on any thread; None: the tiers have nothing more than the pool.

        Raises:
            OutOfBlocksError: too few blocks are free.
        """
        self._use(seq)
        wanted = None if num_tokens is None else as_int("num_tokens", num_tokens, 0)
        length, keys = self._look_up(seq, wanted)
        num_new = length - seq.num_computed_tokens
        if num_new <= 0:
            return None
        lease = self.kv.begin_load(seq, length, owner="tiers")
        load = lease.load
        if load is None:
            return None
        ids: list[tuple[int, ...]] = []
        for group, run in enumerate(load.block_ids):
            is_state = self._state is not None and group == len(load.block_ids) - 1
            ids += [tuple(run)] if is_state else [(block_id,) for block_id in run]
        parts = [Part(key, one) for key, one in zip(keys, ids, strict=True)]
        job = LoadJob(parts, lease, self.tiers, self._blocks, self._batch, num_new)
        self._loads.append(job)
        return job

    def finish_load(self, job: LoadJob) -> bool:
        """End a load: the sequence has the tokens if all of them came. O(num_tokens).

        A load that is not done is given up; its blocks are released either way. A second call
        changes nothing.

        Returns:
            Whether the sequence has them.
        """
        if job not in self._loads:
            return False
        job.cancel()
        self._loads.remove(job)
        blocks = job.lease.blocks
        if job.is_whole and self.kv.commit_load(job.lease):
            self.num_loaded_tokens += job.num_tokens
            for block in blocks if self._is_shard else ():  # all processes have its copy
                self._published.pop(block, None)
            for part in reversed(job.parts):  # a prefix outlives what continues it
                for tier in self.keeping:
                    tier.touch(part.key)
            return True
        job.lease.end()
        self.num_failed_loads += 1
        return False

    def probe(self, tier: Tier) -> int:
        """Have a tier return some copies, to measure how long that takes. On any thread.

        Returns:
            The bytes; 0: it has no copies, or memory for them is in use. O(these).
        """
        count = min(self._batch, self.kv.num_usable_blocks)
        copies = self._blocks.take([1] * count)
        try:
            return tier.probe(self._blocks, copies) if copies else 0
        finally:
            for copy in copies:
                self._blocks.release(copy)

    def _use(self, seq: KVSequence) -> None:
        """Note in the tiers what a sequence has found in the pool. O(its blocks)."""
        is_private = has_salt(seq.namespace_key or b"")
        for number, table in enumerate(seq.tables):
            for block in reversed(table.blocks):
                if block.node is not None:
                    block_hash = node_hash(block.node, table.block_size, _ALGORITHM)
                    key = key_of(number, block_hash, is_private=is_private)
                    for tier in self.keeping:
                        tier.touch(key)
                    if not (self._is_shard or self._is_kept(key)):
                        self._published[block] = None

    def close(self) -> None:
        """Give up what is under way, close the tiers, and leave the manager. O(blocks)."""
        self.cancel_stores()
        for job in [*self._loads]:
            self.finish_load(job)
        if self.kv.pool.watcher is self:
            self.kv.pool.watcher = None
        for tier in self.tiers:
            tier.close()
        self._mover.free()

    def _look_up(self, seq: KVSequence, wanted: int | None = None) -> tuple[int, list[Key]]:
        """Return the longest prefix that pool and tiers have, and the keys that a load reads.

        The keys stand in the order of the load's blocks. If a length is wanted, it is that one,
        whether tiers have it or not.
        """
        computed = seq.num_computed_tokens
        last = self.most_tokens(seq)
        if wanted is not None:
            last = min(last, wanted // self._common * self._common)
        if last <= computed:
            return computed, []
        runs: list[_Run] = []
        for number, table in enumerate(seq.tables):
            run = _Run(self, seq, number, table.block_size, last, is_found=wanted is not None)
            runs.append(run)
            if not (table.window or table.chunk):
                last = min(last, run.end_of_first_gap() // self._common * self._common)
            if last <= computed:
                return computed, []
        state = seq.state
        if state is not None:
            size = state.block_size
            runs.append(_Run(self, seq, state.number, size, last, is_found=wanted is not None))
        for num_tokens in range(last, computed, -self._common):
            keys = _keys_of(seq, runs, num_tokens)
            if keys is not None:
                return num_tokens, keys
        return computed, []


def _is_salted(node: Node, known: dict[Node, bool]) -> bool:
    """Return whether a node's namespace has a salt. O(ancestors that are not known yet)."""
    passed: list[Node] = []
    while (found := known.get(node)) is None:
        passed.append(node)
        if node.parent is None:
            found = has_salt(node.tokens)
            break
        node = node.parent
    known.update(dict.fromkeys(passed, found))
    return found


def _keys_of(seq: KVSequence, runs: Sequence[_Run], num_tokens: int) -> list[Key] | None:
    """Return the keys of what a load of `num_tokens` tokens takes; None: some are nowhere."""
    keys: list[Key] = []
    for run, table in zip(runs, seq.tables, strict=False):
        first = table.first_loaded(seq.num_computed_tokens, num_tokens)
        found = run.keys_between(first, num_tokens // table.block_size)
        if found is None:
            return None
        keys += found
    if seq.state is not None:
        stop = num_tokens // seq.state.block_size
        found = runs[-1].keys_between(stop - 1, stop)
        return None if found is None else keys + found
    return keys


@final
class _Run:
    """The copies of one group of a sequence, from its first full block that is not computed.

    If they are found already, no tier is asked.
    """

    def __init__(
        self,
        tiers: TierManager,
        seq: KVSequence,
        group: int,
        block_size: int,
        last: int,
        *,
        is_found: bool,
    ) -> None:
        self._tiers = tiers.tiers
        self._is_found = is_found
        self._seq = seq
        self._group = group
        self._namespace_key = seq.namespace_key or b""
        self._is_private = has_salt(self._namespace_key)
        self._size = block_size
        self._first = seq.num_computed_tokens // block_size
        self._stop = last // block_size
        self._keys: list[Key] = []  # of the blocks from `_first` on, as far as it was asked
        self._parent = self._hash_before()

    def _hash_before(self) -> bytes:
        """Return the hash before the first block: from its node, or from the tokens."""
        seq, first = self._seq, self._first
        if first and self._group < len(seq.tables):
            table = seq.tables[self._group]
            node = table.blocks[first - 1].node if first <= len(table.blocks) else None
            if node is not None:
                return node_hash(node, self._size, _ALGORITHM)
        key = self._namespace_key
        chain = HashChain(key, self._size, _ALGORITHM)
        return chain.hashes(seq.packed, first, seq.items)[-1] if first else digest(key, _ALGORITHM)

    def end_of_first_gap(self) -> int:
        """Return the number of tokens before the first block that no tier has. O(blocks found)."""
        place = self._first
        while place < self._stop and self._has(place):
            place += 1
        return place * self._size

    def keys_between(self, first: int, stop: int) -> list[Key] | None:
        """Return the keys of blocks `first` to `stop - 1`; None: one of them is nowhere."""
        for place in range(stop - 1, first - 1, -1):
            if not self._has(place):
                return None
        return self._keys[first - self._first : stop - self._first]

    def _has(self, place: int) -> bool:
        key = self._key(place)
        return self._is_found or any(tier.contains(key) for tier in self._tiers)

    def _key(self, place: int) -> Key:
        """Return the key of a block; those before it are computed as well. O(new tokens)."""
        missing = place - self._first + 1 - len(self._keys)
        if missing > 0:
            begin = self._first + len(self._keys)
            contents = block_contents(
                self._seq.packed, self._seq.items, begin, place + 1, self._size
            )
            for block_hash in hashes_after(self._parent, contents, self._size, _ALGORITHM):
                key = key_of(self._group, block_hash, is_private=self._is_private)
                self._keys.append(key)
                self._parent = block_hash
        return self._keys[place - self._first]
