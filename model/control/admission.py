"""Room in the pool: who needs how much, who gives up what, and what moves to host memory.

Decides: how many blocks a start needs and how many must stay free beside it: a block in hand for
everything that running requests know already, one more a group for each that can still grow, and
the watermark. And what becomes of the blocks of a preempted request: they are stored in host memory
while there is room for them there, otherwise they are given up and computed again.

Invariants:
- counts are never too low for a request that runs alone, so what `Scheduler.add` accepts can end;
- blocks that are being stored or loaded are under a lease, so nobody is given them before the step
  is updated; their number is known (`num_freeing`), so nobody is preempted for what is coming;
- a copy in host memory is counted exactly while its request has it.

Does not know: the order of requests, budgets of tokens, how blocks are copied.
"""

from collections.abc import Iterable
from dataclasses import replace

import kvcore
from model.control.config import SchedulerConfig
from model.control.request import HostCopy, Request
from model.control.step import Transfer
from model.errors import SchedulerStateError


class Room:
    """The pool and the host memory of one scheduler.

    Attributes:
        num_freeing: blocks that come free when the transfers of this step are done.
        num_host_blocks_left: blocks of host memory that nobody has.
    """

    def __init__(self, kv: kvcore.KVCacheManager, config: SchedulerConfig) -> None:
        self._kv = kv
        self._keeps_all = len(kv.groups) == 1 and isinstance(kv.groups[0], kvcore.FullAttention)
        self._watermark = int(config.watermark * kv.num_usable_blocks)
        self._long_above = config.long_above
        self.num_freeing = 0
        self.num_host_blocks_left = config.num_host_blocks

    def is_long(self, request: Request) -> bool:
        """Whether a request is longer than the texts whose keys and values are the first. O(1)."""
        return self._long_above is not None and request.num_tokens > self._long_above

    def plan(self, request: Request) -> kvcore.Plan:
        """What a start would find in the cache, and take, token by token. O(its tokens)."""
        return self._kv.plan(request.tokens, namespace=self._namespace(request), chunk=1)

    def _namespace(self, request: Request) -> kvcore.Namespace:
        if self._long_above is None:
            return request.namespace
        # Other factors are other weights: of each epoch there are two.
        epoch = 2 * request.namespace.weight_epoch + self.is_long(request)
        return replace(request.namespace, weight_epoch=epoch) if epoch else request.namespace

    def wanted(self, request: Request, plan: kvcore.Plan) -> int:
        """Free blocks that a start takes until all known tokens are computed. O(num_groups).

        What it finds and what it adds, at the moment when it holds the most.
        """
        if request.host_copy is not None and not self._keeps_all:  # `_restore` finds nothing
            size, groups = self._kv.block_size, self._kv.groups
            return kvcore.peak_blocks(request.num_tokens, size, groups=groups, chunk=1)
        return plan.num_new_blocks + plan.num_revived_blocks

    def promised(self, running: Iterable[Request], num_forks: int) -> int:
        """Blocks that a start has to leave free for others; none where nobody runs.

        Args:
            running: who runs.
            num_forks: further samples of running requests that will start by a fork.
        """
        outlooks = [self._outlook(request) for request in running]
        if not outlooks:
            return 0
        return max(self._watermark, sum(outlooks) + num_forks * len(self._kv.groups))

    def num_exclusive(self, request: Request) -> int:
        """Blocks that nobody else has: free when it is preempted. O(its blocks)."""
        return self._kv.num_exclusive_blocks(request.running_sequence)

    def num_reservable(self, request: Request, wanted: int) -> int:
        """The most next tokens, at most `wanted`, that the free blocks have room for.

        O(num_groups * log(wanted)).
        """
        sequence = request.running_sequence
        if self._kv.can_reserve(sequence, wanted):
            return wanted
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._kv.can_reserve(sequence, middle):
                fits = middle
            else:
                too_many = middle
        return fits

    def is_coming(self, request: Request) -> bool:
        """Whether there is room for one more token once this step's transfers are done. O(1)."""
        missing = self._kv.num_missing_blocks(request.running_sequence, 1)
        return missing <= self._kv.num_free_blocks + self.num_freeing

    def give_up(self, request: Request) -> Transfer | None:
        """Preempt a running request: its blocks are stored or released. O(its blocks).

        Returns:
            What has to be stored, if anything.
        """
        sequence = request.running_sequence
        transfer = self._store(request, sequence)
        request.preempt()
        self._kv.close(sequence)
        if transfer is not None:
            self.num_freeing += transfer.lease.num_exclusive_blocks
        return transfer

    def enter(self, request: Request) -> Transfer | None:
        """Let a request run: the longest cached prefix is its own, and what is stored is loaded.

        A copy that does not reach down to the cached prefix is of no use, and neither is one that
        the prefix covers: it is dropped. There is room, as `wanted` said. O(its tokens).

        Returns:
            What has to be loaded, if anything.
        """
        request.is_long = self.is_long(request)
        if request.host_copy is not None and not self._keeps_all:
            found = self.plan(request).num_cached_tokens
            if found + self._kv.block_size <= request.host_copy.num_tokens:
                return self._restore(request, request.host_copy)
            self.drop_copy(request)
        sequence = self._kv.open(
            request.tokens,
            namespace=self._namespace(request),
            retain=request.retain,
            resumed=request.num_preemptions > 0,
        )
        request.start(sequence)
        copy, size = request.host_copy, self._kv.block_size
        if copy is None:
            return None
        cached = sequence.num_computed_tokens
        first = cached // size - copy.places[0][0]
        if first < 0 or cached >= copy.num_tokens:
            self.drop_copy(request)
            return None
        self._kv.reserve(sequence, copy.num_tokens - cached)
        request.is_loading = True
        blocks = tuple(sequence.tables[0].block_ids[cached // size :])
        lease = self._kv.lease(sequence, "load", owner=str(request.request_id))
        return Transfer(request, blocks, copy, first, lease)

    def _restore(self, request: Request, copy: HostCopy) -> Transfer:
        """Let a request run whose past a window has left behind: as it was, and with nobody.

        A table that begins with null entries cannot be opened, so one is filled block by block,
        and gives back what is out of sight as it did before. Nothing was written there, so none of
        it may be found by others: the sequence has no namespace. O(its tokens).
        """
        kv = self._kv
        sequence = kv.open(request.tokens, namespace=None)
        request.start(sequence)
        for start in range(0, copy.num_tokens, kv.block_size):
            count = min(kv.block_size, copy.num_tokens - start)
            kv.reserve(sequence, count)
            kv.commit(sequence, count)
        blocks: list[int] = []
        for table, (first, stop) in zip(sequence.tables, copy.places, strict=True):
            if table.num_null != first or len(table.block_ids) != stop:
                raise SchedulerStateError(f"loads: {request!r} has other blocks than were stored")
            blocks += table.block_ids[first:]
        request.is_loading = True
        lease = kv.lease(sequence, "load", owner=str(request.request_id))
        return Transfer(request, tuple(blocks), copy, 0, lease)

    def end_transfers(self, stores: Iterable[Transfer], loads: Iterable[Transfer]) -> None:
        """The transfers of a step are done: what was loaded is computed. O(their blocks)."""
        for transfer in (*stores, *loads):
            transfer.lease.end()
        for transfer in loads:
            request = transfer.request
            if request.is_loading and request.host_copy is transfer.copy:
                request.is_loading = False
                loaded = transfer.copy.num_tokens - request.running_sequence.num_computed_tokens
                if loaded:
                    self._kv.commit(request.running_sequence, loaded)
                self.drop_copy(request)
        self.num_freeing = 0

    def drop_copy(self, request: Request) -> None:
        """Give the host memory of a request back, if it has any. O(1)."""
        if request.host_copy is not None:
            self.num_host_blocks_left += request.host_copy.num_blocks
            request.host_copy = None

    def _outlook(self, request: Request) -> int:
        """Blocks a running request may come to take: for all it knows, and one more a group."""
        length = request.num_tokens
        room = -(-length // self._kv.block_size) * self._kv.block_size
        grows = request.max_total_tokens - 1 > room
        sequence = request.running_sequence
        left = max(0, length - sequence.num_computed_tokens)
        missing = self._kv.num_missing_blocks(sequence, left, chunk=1)
        return missing + grows * len(self._kv.groups)

    def _store(self, request: Request, sequence: kvcore.KVSequence) -> Transfer | None:
        """Count and lease what a request would have to compute again, if host memory has room."""
        places = [
            (table.num_null, -(-sequence.num_computed_tokens // table.block_size))
            for table in sequence.tables
        ]
        if self._keeps_all and self._kv.enable_caching:  # what others have too can be found again
            _, stop = places[0]
            places = [(min(stop, self._kv.num_shared_blocks(sequence)), stop)]
        copy = HostCopy(sequence.num_computed_tokens, tuple(places))
        if request.is_loading or not 0 < copy.num_blocks <= self.num_host_blocks_left:
            return None
        request.host_copy = copy
        self.num_host_blocks_left -= copy.num_blocks
        lease = self._kv.lease(sequence, "store", owner=str(request.request_id))
        blocks = [
            block_id
            for table, (first, stop) in zip(sequence.tables, places, strict=True)
            for block_id in table.block_ids[first:stop]
        ]
        return Transfer(request, tuple(blocks), copy, 0, lease)
