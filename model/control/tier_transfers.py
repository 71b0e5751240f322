"""Requests that wait for KV from host memory, disk or a peer, and transfers to and from tiers.

Decides: whether a load is worth it: it should be quicker than computing, behind the loads before
it. Both rates are measured at the start or while running; a tier of unknown speed is tried once,
for a twentieth of the time of computing, and one that was too slow is measured again beside
requests that compute. How much is stored at once, and when loads and stores are given up.

A request that starts and finds more in the tiers than in the pool goes back among the waiting ones:
its blocks are reserved under a lease, it has no place in the batch, and those behind it go on. When
its KV has come, its blocks are published, and it starts like any request, with a longer cached
prefix; when the load has failed or takes too long, it starts too, and computes.

Where ranks share a network, each stores and loads its own part of a block, and all take the same
decisions: a request that starts waits for the next step, before which the ranks exchange, in one
message for all of them, how much each has found for it, and which transfers are over, have failed
or take too long. The least counts: a prefix is loaded as far as all have it, a load joins once all
have their bytes, and what fails on one is given up by all. While nothing waits or is on its way,
there is no message.

Invariants: one thread, that of the scheduler, but for the jobs themselves, which run on two threads
of their own, one for loads and one for stores; no block is published before all bytes of its load
are there; every load and every store ends, by its deadline at the latest; a request that ends while
it waits gives its blocks back at once; no clock, thread or tier of one rank alone changes the pool.

Does not know: torch, which bytes a block has (`TierDevice`), the order of requests but for the
one that is preempted.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, final

import kvcore
from model.control.request import Request
from model.host import Host

if TYPE_CHECKING:  # not loaded where there are no tiers
    from kvcore.tiers import Found, LoadJob, PeerServer, StoreJob, Tier, TierManager

_LEAST_STEP_TOKENS: Final = 16  # a step with fewer says little about the time of a prefill
_LEAST_DEADLINE_S: Final = 1.0
_SLOWEST_BYTES_PER_S: Final = 50e6  # of a device whose speed was never measured
_MAX_STORES: Final = 4  # jobs
_STORE_DEADLINE_S: Final = 1.0
_POLL_S: Final = 0.002
_DRAIN_S: Final = 10.0
_WEIGHT: Final = 0.3  # of a new measurement
_FORGOTTEN: Final = 0.99  # of the largest step, at each later one
_LEAST_TRIAL_S: Final = 0.25
_TRIAL_SHARE: Final = 0.05  # of computing, that is waited for a tier of unknown speed
_PROBE_PAUSE_S: Final = 1.0
_FAILED, _RUNNING, _DONE = 0, 1, 2  # states of a transfer: of several ranks the least counts
_log = logging.getLogger(__name__)


class TierDevice(Protocol):
    """A device that runs jobs, such as `HostTransfers`: it knows the bytes of a block."""

    def mark(self) -> object:
        """Return a mark of all that was sent to the device; a job with it comes after that."""
        ...

    def began(self, job: LoadJob) -> None:
        """Note that a load has begun; its blocks will be written."""
        ...

    def load(self, job: LoadJob, mark: object) -> None:
        """Run a load; its bytes are in the blocks when this returns. Called on a thread for it."""
        ...

    def store(self, job: StoreJob, mark: object) -> None:
        """Run a store likewise."""
        ...

    def gave_up(self) -> None:
        """Order what is sent from now on after the writes of a running load that was given up."""
        ...


class TierRanks(Protocol):
    """The processes that share a network, such as `Ranks`: each has a part of every block."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def all_gather(self, content: bytes) -> Sequence[bytes]:
        """Return the content that each rank has given, by rank; all have one length."""
        ...


@final
class TransferCosts:
    """The times of computing and of loading, measured while running.

    Args:
        copy_bytes: of a block.

    Attributes:
        compute_s: seconds a token in a prefill; None: not measured yet.
        load_s: for each tier seconds a byte; a tier is missing until it is measured.
        doubted: tiers that were too slow, once: nothing is loaded from them until they are measured
            again.
    """

    def __init__(self, copy_bytes: int) -> None:
        self.compute_s: float | None = None
        self.load_s: dict[str, float] = {}
        self.doubted: set[str] = set()
        self._copy_bytes = copy_bytes
        self._largest = 0.0  # tokens of a step, lately

    def loading_s(self, copies: Mapping[str, int]) -> float | None:
        """Return the seconds that a load of these copies takes; None: unknown. O(tiers)."""
        found = [(self.load_s.get(name), count) for name, count in copies.items() if count]
        if any(rate is None for rate, _ in found):
            return None
        return sum([(rate or 0.0) * count for rate, count in found]) * self._copy_bytes

    def computing_s(self, num_tokens: int) -> float | None:
        """Return the seconds that computing tokens takes; None: unknown. O(1)."""
        return None if self.compute_s is None else self.compute_s * num_tokens

    def deadline_s(self, num_tokens: int, copies: Mapping[str, int]) -> float:
        """Return the seconds after which a load is given up: of an unknown rate soon. O(tiers)."""
        computing_s, loading_s = self.computing_s(num_tokens), self.loading_s(copies)
        if loading_s is not None:
            return max(_LEAST_DEADLINE_S, 2 * loading_s)
        if computing_s is not None:
            return max(_LEAST_TRIAL_S, _TRIAL_SHARE * computing_s)
        size = sum(copies.values()) * self._copy_bytes
        return max(_LEAST_DEADLINE_S, size / _SLOWEST_BYTES_PER_S)

    def is_worth(self, found: Found, waiting_s: float) -> bool:
        """Return True if a load is worth it, behind loads that take `waiting_s`. O(tiers)."""
        names = {name for name, count in found.num_copies.items() if count}
        loading_s = self.loading_s(found.num_copies)
        computing_s = self.computing_s(found.num_tokens - found.num_device_tokens)
        if loading_s is None or computing_s is None:
            return True
        if loading_s > computing_s:
            self.doubted |= names  # a slow moment does not count for ever
        return not names & self.doubted and waiting_s + loading_s <= computing_s

    def note_step(self, num_tokens: int, took_s: float) -> None:
        """Note the time of a step; small ones say little about a prefill. O(1)."""
        self._largest = max(num_tokens, self._largest * _FORGOTTEN)
        if num_tokens >= max(_LEAST_STEP_TOKENS, self._largest / 4):
            each, before = took_s / num_tokens, self.compute_s
            self.compute_s = each if before is None else before + _WEIGHT * (each - before)

    def note_rate(self, name: str, size: int, took_s: float) -> None:
        """Note how long a tier took to return bytes. O(1)."""
        self.load_s[name] = took_s / size
        self.doubted.discard(name)

    def note_late(self, copies: Mapping[str, int], took_s: float) -> None:
        """Note a load of these copies that was given up after some time. O(tiers)."""
        size = sum(copies.values()) * self._copy_bytes
        for name in [name for name, count in copies.items() if count and size]:
            self.load_s[name] = max(self.load_s.get(name, 0.0), took_s / size)
            self.doubted.add(name)

    def note_load(self, copies: Mapping[str, int], took_s: float) -> None:
        """Note the time of a load of this number of copies from each tier. O(tiers)."""
        names = [name for name, count in copies.items() if count]
        size = sum(copies.values()) * self._copy_bytes
        if not size:
            return
        expected_s = self.loading_s(copies)
        for name in names:
            rate = self.load_s.get(name)
            if rate is None or not expected_s:
                self.load_s[name] = took_s / size
            else:
                factor = min(max(took_s / expected_s, 0.1), 10.0)
                self.load_s[name] = rate * (1 + _WEIGHT * (factor - 1))


_Job = TypeVar("_Job", bound="LoadJob | StoreJob")


@dataclass(slots=True, eq=False, kw_only=True)
class _Running(Generic[_Job]):
    """A job on its way.

    Attributes:
        job: the job.
        deadline_s: the time at which it is given up.
        is_over: True once its thread has done with it.
        is_told: True once the other ranks know that, if there are any.
        has_failed: True if it raised.
        took_s: the seconds that it ran.
    """

    job: _Job
    deadline_s: float
    is_over: bool = False
    is_told: bool = False
    has_failed: bool = False
    took_s: float = 0.0

    @property
    def has_succeeded(self) -> bool:
        """True if it has succeeded; only once it is over. O(1)."""
        return self.job.is_done

    def tell(self, now_s: float) -> int:
        """Return the state to report to the other ranks. O(tiers)."""
        if self.is_over:
            self.is_told = True
            return _DONE if self.has_succeeded else _FAILED
        return _FAILED if now_s >= self.deadline_s else _RUNNING


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting(_Running["LoadJob"]):
    """A load, and the request that waits for it.

    Attributes:
        request: the request.
        sequence: its sequence until then.
        expected_s: the seconds that the load should take.
        began_s: when it should begin, behind others.
        num_copies: for each tier the copies that it reads.
    """

    request: Request
    sequence: kvcore.KVSequence
    expected_s: float
    began_s: float
    num_copies: Mapping[str, int]

    @property
    def has_succeeded(self) -> bool:
        """True if all its bytes are in their blocks, and it did not raise. O(tiers)."""
        return self.job.is_whole and not self.has_failed


@dataclass(frozen=True, slots=True)
class _Asking:
    """A request that waits until all ranks have reported the copies that they have found for it.

    Attributes:
        sequence: its sequence until then.
        found: the copies that this rank has found.
        num_tokens: the tokens of them that are worth a load; 0: none.
        waiting_s: the seconds that a load would wait for those before it.
    """

    sequence: kvcore.KVSequence
    found: Found
    num_tokens: int
    waiting_s: float


@dataclass(slots=True)
class TransferStats:
    """Counters since the start.

    Attributes:
        num_loads: loads that came.
        num_failed_loads: loads that failed: a copy was lost, or wrong, here or on another rank.
        num_late_loads: loads that were given up at their deadline.
        num_not_worth: finds that were computed, because that is quicker.
        num_loaded_tokens: tokens that loads brought.
        loading_s: seconds that loads ran.
        storing_s: seconds that stores ran.
        num_late_stores: stores that were given up at their deadline.
    """

    num_loads: int = 0
    num_failed_loads: int = 0
    num_late_loads: int = 0
    num_not_worth: int = 0
    num_loaded_tokens: int = 0
    loading_s: float = 0.0
    storing_s: float = 0.0
    num_late_stores: int = 0


@final
class TierTransfers:
    """The tiers behind the pool of one scheduler.

    Args:
        tiers: the tiers, which know the place of each copy.
        device: moves the bytes.
        host: the source of threads and time; None: this process.
        server: serves the tiers to peers; None: they are not served.
        ranks: the processes that share the network; None: it is whole here.

    Attributes:
        tiers: as above.
        server: as above.
        costs: the times that decide if a load is worth it.
        stats: the counters.
        wake: called on a thread of the transfers whenever one is over.
    """

    def __init__(
        self,
        tiers: TierManager,
        device: TierDevice,
        costs: TransferCosts,
        host: Host | None = None,
        server: PeerServer | None = None,
        ranks: TierRanks | None = None,
    ) -> None:
        self.tiers = tiers
        self.server = server
        self.costs = costs
        self.stats = TransferStats()
        self.wake: Callable[[], None] = _nothing
        self._device = device
        self._host = Host() if host is None else host
        self._ranks = ranks
        self._asking: dict[Request, _Asking] = {}
        self._loads: dict[Request, _Waiting] = {}
        self._stores: list[_Running[StoreJob]] = []
        self._given_up: list[_Running[StoreJob]] = []  # stores that still have their thread
        self._began_s = self._next_probe_s = 0.0
        self._step_marks = deque([tiers.marks()], maxlen=2)  # at the begin of the last two steps
        self._news = self._host.event()
        self._queues = self._host.queue(), self._host.queue()
        for name, queue in zip(("kv loads", "kv stores"), self._queues, strict=True):
            self._host.start_thread(name, partial(self._work, queue))

    def __contains__(self, request: Request) -> bool:
        """Return True if a request waits for its KV. O(1)."""
        return request in self._loads or request in self._asking

    @property
    def requests(self) -> Iterable[Request]:
        """The requests that wait for their KV. O(those)."""
        return (*self._loads, *self._asking)

    @property
    def is_busy(self) -> bool:
        """True if a transfer is under way. O(1)."""
        return bool(self._loads or self._stores or self._asking)

    @property
    def has_work(self) -> bool:
        """True while a transfer has a thread, if given up too, or a block is to be stored. O(1)."""
        return self.is_busy or bool(self._given_up or self.tiers.num_published)

    @property
    def patience_s(self) -> float | None:
        """The seconds until `tend` is due without a wake-up; None: it never is. O(stores)."""
        now_s = self._host.now_s()
        waits_s = [store.deadline_s - now_s for store in self._stores]
        if self._given_up and self._ranks is not None:
            waits_s.append(_STORE_DEADLINE_S)  # nothing wakes this rank when another one is done
        return max(0.0, min(waits_s)) if waits_s else None

    # What has failed

    def note_start(self, request: Request) -> None:
        """Note that a request gets blocks: its KV is stored after this moment. O(tiers)."""
        request.tier_marks = request.tier_marks or self.tiers.marks()

    def distrust(self, request: Request) -> None:
        """Empty the cache, and forget copies of the tiers that a request read or may have written.

        Copies that were computed from these came later than its start. O(copies).
        """
        self.tiers.reset(request.tier_marks or self.tiers.marks(), request.sequence)

    def distrust_steps(self) -> None:
        """Empty the cache, and forget copies of the tiers that the last two steps may have written.

        O(copies).
        """
        self.tiers.reset(self._step_marks[0])

    # Loads

    def begin(self, request: Request) -> bool:
        """Begin to load the KV of a request that has just started, if that is worth it.

        The request waits then, without its sequence: see `Request.suspend`. The tiers are searched
        once each time that a request has no blocks. O(its blocks in tiers).

        Returns:
            True if it waits.
        """
        if request.has_asked_tiers:
            return False
        request.has_asked_tiers = True
        sequence = request.running_sequence
        found = self.tiers.find(sequence)
        num_new = found.num_tokens - found.num_device_tokens
        waiting_s = sum([load.expected_s for load in self._loads.values()])
        is_worth = not num_new or self.costs.is_worth(found, waiting_s)
        if not is_worth:
            self.stats.num_not_worth += 1
            self._probe(found)
        asked = _Asking(sequence, found, found.num_tokens if is_worth else 0, waiting_s)
        if self._ranks is None or self.tiers.most_tokens(sequence) <= found.num_device_tokens:
            if not self._begin(request, asked, asked.num_tokens):
                return False
        else:
            self._asking[request] = asked
        request.suspend()
        return True

    def _begin(self, request: Request, asked: _Asking, num_tokens: int) -> bool:
        """Begin to load a prefix; False if there is no room, or no more than the pool has."""
        try:
            job = self.tiers.begin_load(asked.sequence, num_tokens=num_tokens)
        except kvcore.OutOfBlocksError:
            return False
        if job is None:
            return False
        self._device.began(job)
        patience_s = self.costs.deadline_s(job.num_tokens, asked.found.num_copies)
        began_s = self._host.now_s() + asked.waiting_s
        load = _Waiting(
            job=job,
            began_s=began_s,
            num_copies=asked.found.num_copies,
            deadline_s=began_s + patience_s,
            request=request,
            sequence=asked.sequence,
            expected_s=self.costs.loading_s(asked.found.num_copies) or 0.0,
        )
        self._loads[request] = load
        self._queues[0].put(partial(self._run, load, self._device.load, self._device.mark()))
        return True

    def _probe(self, found: Found) -> None:
        """Measure the tiers that are doubted, on the thread of loads; now and then. O(tiers)."""
        now_s = self._host.now_s()
        if now_s < self._next_probe_s or self._loads:
            return
        self._next_probe_s = now_s + _PROBE_PAUSE_S
        for tier in self.tiers.tiers:
            if tier.name in self.costs.doubted and found.num_copies[tier.name]:
                self._queues[0].put(partial(self.measure, tier))

    def measure(self, tier: Tier) -> None:
        """Measure how long a tier takes to return copies, if it has any. O(their bytes)."""
        began_s = self._host.now_s()
        if size := self.tiers.probe(tier):
            self.costs.note_rate(tier.name, size, self._host.now_s() - began_s)

    def give_way(self, order: tuple[float, int]) -> bool:
        """Release blocks for a running request: those of stores, or of the last load behind it.

        Stores are begun again as far as their contents are still there. O(transfers).

        Returns:
            True if there were any.
        """
        if self._stores:
            self._given_up += self._stores
            self._stores.clear()
            return self.tiers.cancel_stores()
        last = max(self.requests, key=_order, default=None)
        if last is None or last.order <= order:
            return False
        self.forget(last)
        last.has_asked_tiers = False
        return True

    def forget(self, request: Request) -> None:
        """Give up the load of a request, if it waits for one, and free its blocks. O(blocks)."""
        if (asked := self._asking.pop(request, None)) is not None:
            self.tiers.kv.close(asked.sequence)
        if (load := self._loads.pop(request, None)) is not None:
            self._end_load(load, is_wanted=False)

    def settle(self) -> bool:
        """End the transfers that are over, have failed or take too long. O(their blocks).

        With ranks, all call it at the same time; it takes a message if anything is on its way.

        Returns:
            True if requests have ceased to wait: they can start now.
        """
        loads, stores = [*self._loads.values()], [*self._stores]
        given_up, asking = self._given_up, [*self._asking.items()]
        if not (loads or stores or given_up or asking):
            return False
        now_s = self._host.now_s()
        told = [_DONE if store.is_over else _RUNNING for store in given_up]
        told += [load.tell(now_s) for load in loads]
        told += [store.tell(now_s) for store in stores]
        agreed = iter(self._agreed([*told, *[asked.num_tokens for _, asked in asking]]))
        self._given_up = [store for store in given_up if next(agreed) == _RUNNING]
        has_ended = [self._settle_load(load, next(agreed), now_s) for load in loads]
        for store in stores:
            self._settle_store(store, next(agreed))
        for (request, asked), num_tokens in zip(asking, agreed, strict=True):
            del self._asking[request]
            if not self._begin(request, asked, num_tokens):
                self.tiers.kv.close(asked.sequence)
                has_ended.append(True)
        if self._lags():
            self.wake()
        return any(has_ended)

    def _lags(self) -> bool:
        """Return True if a store that is over here still runs on another rank. O(stores)."""
        return any(one.is_told for one in self._stores)

    def _agreed(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the least of all ranks, of each number. One message, if there are other ranks."""
        if self._ranks is None:
            return numbers
        told = self._ranks.all_gather(array("q", numbers).tobytes())
        return [min(each) for each in zip(*[array("q", one) for one in told], strict=True)]

    def _settle_load(self, load: _Waiting, state: int, now_s: float) -> bool:
        """End a load unless it runs; return True if it has ended. O(its blocks)."""
        if state == _RUNNING:
            return False
        del self._loads[load.request]
        if not self._end_load(load, is_wanted=state == _DONE):
            is_late = not load.is_told and now_s >= load.deadline_s
            if is_late:
                self.costs.note_late(load.num_copies, now_s - load.began_s)
            self.stats.num_late_loads += is_late
            self.stats.num_failed_loads += not is_late
        return True

    def _end_load(self, load: _Waiting, *, is_wanted: bool) -> bool:
        """End a load; publish its blocks and return True if it is wanted and whole."""
        job: LoadJob = load.job
        if not is_wanted:
            job.cancel()
            job.lease.end()
            if not load.is_over:
                self._device.gave_up()
        has_joined = self.tiers.finish_load(job)
        if has_joined:
            load.request.num_loaded_tokens += job.num_tokens
            self.costs.note_load(job.num_found, load.took_s)
            self.stats.num_loads += 1
            self.stats.num_loaded_tokens += job.num_tokens
            self.stats.loading_s += load.took_s
        self.tiers.kv.close(load.sequence)
        return has_joined

    # Stores

    def begin_step(self) -> None:
        """Note that a step begins. O(tiers)."""
        self._step_marks.append(self.tiers.marks())
        self._began_s = self._host.now_s()

    def end_step(self, num_tokens: int) -> None:
        """Note that a step was sent and committed, and store its new blocks. O(blocks)."""
        now_s = self._host.now_s()
        self.costs.note_step(num_tokens, now_s - self._began_s)
        self.store(now_s)

    def _settle_store(self, store: _Running[StoreJob], state: int) -> None:
        """End a store unless it runs. O(its blocks)."""
        if state == _RUNNING:
            return
        self._stores.remove(store)
        self.tiers.finish_store(store.job, is_done=state == _DONE)
        self.stats.storing_s += store.took_s
        if state == _FAILED:
            self._given_up.append(store)
            self.stats.num_late_stores += not store.is_told

    def store(self, now_s: float) -> None:
        """Begin to store published blocks, unless enough is on its way, or a load. O(blocks)."""
        if self._loads or len(self._stores) + len(self._given_up) >= _MAX_STORES:
            return
        if (job := self.tiers.begin_store()) is not None:
            store = _Running(job=job, deadline_s=now_s + _STORE_DEADLINE_S)
            self._stores.append(store)
            run = partial(self._run, store, self._device.store, self._device.mark())
            self._queues[1].put(run)

    def tend(self) -> None:
        """Do the work that is due while no steps run; all ranks call it at the same time.

        O(transfers and their blocks).
        """
        self.settle()
        self.store(self._host.now_s())
        if self._lags():
            self.wait()

    def wait(self) -> bool:
        """Wait at most 2 ms for a transfer to end; False: none is under way."""
        news = self._news = self._host.event()
        stores, loads = self._stores, self._loads.values()
        if not (self._asking or any(map(_is_news, stores)) or any(map(_is_news, loads))):
            news.wait(_POLL_S)
        return self.is_busy

    def close(self) -> None:
        """Store the last blocks, for at most 10 s, cancel loads, and close the tiers.

        Each rank does so by itself: the pool is not used any more.
        """
        self._ranks = None
        for request in self.requests:
            self.forget(request)
        end_s = self._host.now_s() + _DRAIN_S
        self.tend()
        while self._stores and self._host.now_s() < end_s:
            self.wait()
            self.tend()
        for queue in self._queues:
            queue.put(None)
        if self.server is not None:
            self.server.close()
        self.tiers.close()

    # What follows runs on the threads of the transfers.

    def _work(self, queue: Any) -> None:  # noqa: ANN401  # a SimpleQueue, or one like it
        while (run := queue.get()) is not None:
            try:
                run()
            except Exception:  # noqa: BLE001  # a tier that cannot be measured: transfers go on
                _log.exception("a transfer of KV failed")
            self._news.set()
            self.wake()

    def _run(
        self, running: _Running[_Job], how: Callable[[_Job, object], None], mark: object
    ) -> None:
        began_s = self._host.now_s()
        try:
            how(running.job, mark)
        except Exception:  # whatever it is, its request computes
            running.has_failed = True
            raise
        finally:
            running.took_s = self._host.now_s() - began_s
            running.is_over = True


_order = attrgetter("order")


def _is_news(one: _Running[Any]) -> bool:
    """Return True if a transfer is over since the last step."""
    return one.is_over and not one.is_told


def _nothing() -> None:
    pass
