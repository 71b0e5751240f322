"""Admission: the blocks that a start needs, and the fate of those of a preempted request.

Decides: the blocks that a start needs, and those that must stay free beside it: a block in hand for
everything that running requests know already, one more a group for each that can still grow, and
the watermark. And the fate of the blocks of a preempted request: they are stored in host memory
while there is room for them there, otherwise they are given up and computed again.

Invariants:
- counts are never too low for a request that runs alone, so what `Scheduler.add` accepts can end;
- blocks that are being stored or loaded are under a lease and are not reused before the step is
  updated; their number is known (`num_freeing`), so no request is preempted for blocks that will
  be free anyway;
- a copy in host memory is counted exactly while its request has it;
- within a step, the blocks that running requests may come to take are counted once for each request
  that has its blocks: for it they change only when it stops running.

Does not know: the order of requests, budgets of tokens, how blocks are copied.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import kvcore
from model.control.config import SchedulerConfig
from model.control.request import HostCopy, Request
from model.control.step import Chunk, Transfer
from model.control.tier_transfers import TierTransfers
from model.errors import SchedulerStateError

MAX_SCORED_TOKENS = 256
"""The most prompt tokens of a step whose log-probabilities are computed: their logits are held."""


class Admission:
    """Room in the pool and in the host memory of one scheduler.

    Attributes:
        num_host_blocks_left: free blocks of host memory.
    """

    def __init__(
        self, kv: kvcore.KVCacheManager, config: SchedulerConfig, tiers: TierTransfers | None
    ) -> None:
        self._kv = kv
        self._tiers = tiers
        self._keeps_all = len(kv.groups) == 1 and isinstance(kv.groups[0], kvcore.FullAttention)
        # A block a group for one token more; a state may need all its blocks.
        self._growth = sum(
            group.num_blocks if isinstance(group, kvcore.RecurrentState) else 1
            for group in kv.groups
        )
        self._watermark = int(config.watermark * kv.num_usable_blocks)
        self._long_above = config.long_above
        self._num_freeing = 0
        self.num_host_blocks_left = config.num_host_blocks
        # In this step: of requests that have blocks for all their tokens, and of the others.
        self._outlooks: dict[int, int] | None = None  # by request_id; None: not counted yet
        self._num_needed = 0  # the sum of these
        self._unsettled: dict[int, Request] = {}

    @property
    def num_freeing(self) -> int:
        """The blocks that come free when the transfers under way are done. O(1)."""
        if self._tiers is not None:
            return self._kv.leases.num_deferred_blocks()
        return self._num_freeing

    def begin_step(self) -> None:
        """Forget the counts of the step before: requests have moved on since. O(1)."""
        self._outlooks, self._unsettled = None, {}

    def is_long(self, request: Request) -> bool:
        """Return True if a request is longer than `SchedulerConfig.long_above`. O(1)."""
        return self._long_above is not None and request.num_tokens > self._long_above

    def plan(self, request: Request) -> kvcore.Plan:
        """Return what a start would find in the cache, load and take. O(its tokens)."""
        tokens, items = request.tokens, request.items
        namespace = self._namespace(request)
        copy, skips = request.host_copy, request.is_scoring
        if copy is None:
            return self._kv.plan(
                tokens, namespace=namespace, items=items, chunk=1, skip_reading=skips
            )
        stored = copy.num_tokens
        plan = self._kv.plan(
            tokens,
            namespace=namespace,
            items=items,
            chunk=1,
            num_external=stored,
            skip_reading=skips,
        )
        if self._is_of_use(copy, plan.num_cached_tokens):
            return plan
        return self._kv.plan(tokens, namespace=namespace, items=items, chunk=1, skip_reading=skips)

    def _is_of_use(self, copy: HostCopy, num_cached_tokens: int) -> bool:
        """Return True if a copy joins on to the cached prefix and reaches further. O(1)."""
        found = num_cached_tokens // self._kv.groups[0].block_size
        is_whole = copy.places[0][0] <= found or not self._keeps_all
        return is_whole and num_cached_tokens < copy.num_tokens

    def _namespace(self, request: Request) -> kvcore.Namespace:
        if self._long_above is None:
            return request.namespace
        # The factors of long texts act like other weights: of each epoch there are two.
        epoch = 2 * request.namespace.weight_epoch + self.is_long(request)
        return replace(request.namespace, weight_epoch=epoch) if epoch else request.namespace

    @staticmethod
    def num_wanted(plan: kvcore.Plan) -> int:
        """Return the free blocks that a start takes until all known tokens are computed. O(1).

        Cached blocks that it finds free, and new ones, at the moment when it holds the most.
        """
        return plan.num_new_blocks + plan.num_revived_blocks

    def num_to_leave_free(
        self, running: Sequence[Request], num_forks: int, leaving: Sequence[Request] = ()
    ) -> int:
        """Return the blocks that a start has to leave free for others; 0 when no request runs.

        O(requests that lack blocks for their tokens + leaving), and O(num_running) once in a step.

        Args:
            running: all running requests.
            num_forks: further samples of running requests that will start by a fork.
            leaving: those of them that do not count, because they would be preempted.
        """
        if len(running) == len(leaving):
            return 0
        if self._outlooks is None:
            self._outlooks, self._num_needed = {}, 0
            self._unsettled = {request.request_id: request for request in running}
        num_needed = 0
        for number, request in list(self._unsettled.items()):
            outlook, is_settled = self._outlook(request)
            if is_settled:
                del self._unsettled[number]
                self._outlooks[number] = outlook
                self._num_needed += outlook
            else:
                num_needed += outlook
        num_needed += self._num_needed
        for request in leaving:
            known = self._outlooks.get(request.request_id)
            num_needed -= self._outlook(request)[0] if known is None else known
        return max(self._watermark, num_needed + num_forks * self._growth)

    def num_exclusive(self, request: Request) -> int:
        """Return the number of blocks that only this request uses. O(its blocks)."""
        return self._kv.num_exclusive_blocks(request.running_sequence)

    def num_reservable(self, request: Request, wanted: int) -> int:
        """Return the most next tokens, at most `wanted`, that the free blocks have room for.

        0 if a chunk would cut an image that one step has to compute.
        O(num_groups * log(wanted)).
        """
        sequence = request.running_sequence
        if self._kv.can_reserve(sequence, wanted):
            return request.whole_chunk(wanted)
        fits, too_many = 0, wanted
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._kv.can_reserve(sequence, middle):
                fits = middle
            else:
                too_many = middle
        return request.whole_chunk(fits)

    @staticmethod
    def num_plannable(request: Request, budget: int, planned: Iterable[Chunk]) -> int:
        """Return the next tokens that a step has budget for, and memory for logits if they score.

        Those of requests that want log-probabilities of their prompts do, but for the last token of
        a prompt. O(num_planned) for such a request.
        """
        wanted = min(request.num_uncomputed_tokens, budget)
        if not request.num_to_score(1):
            return wanted
        held = sum([chunk.num_scored for chunk in planned])
        return min(wanted, MAX_SCORED_TOKENS - held)

    def is_coming(self, request: Request) -> bool:
        """Return True if its next chunk has room once this step's transfers are done. O(1)."""
        missing = self._kv.num_missing_blocks(request.running_sequence, request.least_chunk)
        return missing <= self._kv.num_free_blocks + self.num_freeing

    def close_sequence(self, request: Request) -> Transfer | None:
        """Preempt a running request: close its sequence, store its blocks if they fit.

        O(its blocks).

        Returns:
            The transfer to host memory; None: nothing is stored.
        """
        sequence = request.running_sequence
        transfer = self._store(request, sequence)
        if self._outlooks is not None:
            self._unsettled.pop(request.request_id, None)
            self._num_needed -= self._outlooks.pop(request.request_id, 0)
        request.preempt()
        self._kv.close(sequence)
        if transfer is not None:
            self._num_freeing += transfer.lease.num_exclusive_blocks
        return transfer

    def open_sequence(self, request: Request) -> Transfer | None:
        """Open the sequence of a request that starts: its cached prefix is found, its copy loaded.

        A copy that does not join the cached prefix is of no use, and neither is one that the prefix
        covers: it is dropped. There is room, as `num_wanted` said. If tiers have more of it, the
        request gives the sequence up again and waits for its KV. O(its tokens).

        Returns:
            The transfer from host memory; None: nothing is loaded.
        """
        request.is_long = self.is_long(request)
        sequence = self._kv.open(
            request.tokens,
            namespace=self._namespace(request),
            items=request.items,
            retain=request.retain,
            boundaries=request.boundaries,
            skip_reading=request.is_scoring,
            resumed=request.num_preemptions > 0 or request.has_asked_tiers,
        )
        request.start(sequence)
        self._unsettled[request.request_id] = request
        if self._tiers is not None:
            self._tiers.note_start(request)
        copy = request.host_copy
        if copy is None:
            if self._tiers is not None and not request.is_scoring and self._tiers.begin(request):
                del self._unsettled[request.request_id]
            return None
        if not self._is_of_use(copy, sequence.num_computed_tokens):
            self.drop_copy(request)
            return None
        owner = str(request.request_id)
        lease = self._kv.begin_load(sequence, copy.num_tokens, owner=owner)
        with _ended_if_broken(lease):
            transfer = _transfer_back(request, copy, lease)
        request.load = lease
        return transfer

    def end_transfers(self, stores: Iterable[Transfer], loads: Iterable[Transfer]) -> None:
        """Note that a step's transfers are done: loaded tokens are computed. O(their blocks)."""
        for store in stores:
            store.lease.end()
        for load in loads:
            request = load.request
            self._kv.commit_load(load.lease)  # or it ends, where the request was aborted
            request.load = None
            if request.host_copy is load.copy:
                self.drop_copy(request)
        self._num_freeing = 0

    def drop_copy(self, request: Request) -> None:
        """Give the host memory of a request back, if it has any. O(1)."""
        if request.host_copy is not None:
            self.num_host_blocks_left += request.host_copy.num_blocks
            request.host_copy = None

    def _outlook(self, request: Request) -> tuple[int, bool]:
        """Return the blocks a running request may come to take, and True if that stays the same.

        They are blocks for all its tokens, and one more a group if it can grow. The number stays
        the same as long as it runs in this step if it has the former.
        """
        length = request.num_tokens
        room = -(-length // self._kv.block_size) * self._kv.block_size
        growing = (request.max_total_tokens - 1 > room) * self._growth
        sequence = request.running_sequence
        left = max(0, length - sequence.num_computed_tokens)
        if request.load is not None and request.host_copy is not None:
            stored = request.host_copy.num_tokens
            missing = self._kv.num_missing_blocks(sequence, left, chunk=1, num_external=stored)
            return growing + missing - request.load.num_exclusive_blocks, False
        missing = self._kv.num_missing_blocks(sequence, left)
        if missing == 0:
            return growing, True
        if not self._keeps_all:  # windows release blocks on the way
            missing = self._kv.num_missing_blocks(sequence, left, chunk=1)
        return growing + missing, False

    def _store(self, request: Request, sequence: kvcore.KVSequence) -> Transfer | None:
        """Lease the blocks that a request would have to compute again, if host memory has room."""
        places = [
            (table.num_null, -(-sequence.num_computed_tokens // table.block_size))
            for table in sequence.tables
        ]
        if self._keeps_all and self._kv.enable_caching:  # what others have too can be found again
            _, stop = places[0]
            places = [(min(stop, self._kv.num_shared_blocks(sequence)), stop)]
        entries: list[Sequence[int]] = [table.block_ids for table in sequence.tables]
        if sequence.state is not None:
            entries.append([block.block_id for block in sequence.state.read])
            places.append((0, len(entries[-1])))
        copy = HostCopy(sequence.num_computed_tokens, tuple(places))
        if request.load is not None or not 0 < copy.num_blocks <= self.num_host_blocks_left:
            return None
        blocks = [
            block_id
            for ids, (first, stop) in zip(entries, places, strict=True)
            for block_id in ids[first:stop]
        ]
        lease = self._kv.lease(sequence, "store", owner=str(request.request_id))
        with _ended_if_broken(lease):
            transfer = Transfer(request, tuple(blocks), copy, ((0, copy.num_blocks),), lease)
        request.host_copy = copy
        self.num_host_blocks_left -= copy.num_blocks
        return transfer


@contextmanager
def _ended_if_broken(lease: kvcore.Lease) -> Iterator[None]:
    """End a lease if an error keeps it from a transfer."""
    try:
        yield
    except BaseException:
        lease.end()
        raise


def _transfer_back(request: Request, copy: HostCopy, lease: kvcore.Lease) -> Transfer:
    """Return the transfer of a copy to the blocks of a load: each group's last entries."""
    load = lease.load
    if load is None:
        raise SchedulerStateError(f"loads: {lease!r} loads nothing")
    blocks: list[int] = []
    ranges: list[tuple[int, int]] = []
    end = 0
    for (first, stop), ids in zip(copy.places, load.block_ids, strict=True):
        end += stop - first
        ranges.append((end - len(ids), end))
        blocks += ids
    return Transfer(request, tuple(blocks), copy, tuple(ranges), lease)
