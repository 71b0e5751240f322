"""Requests that wait for KV from host memory, disk or a peer, and transfers to and from tiers.

Decides: whether a load is worth it: it should be quicker than computing, both as measured while
running; until both have been measured, a load is tried. When a load is given up: once it has taken
as long as computing would, so a request waits at most twice as long as without tiers. How much is
stored at once, and when a store is given up.

A request that starts and finds more in the tiers than in the pool goes back among the waiting ones:
its blocks are reserved under a lease, it has no place in the batch, and those behind it go on. When
its KV has come, its blocks are published, and it starts like any request, with a longer cached
prefix; when the load has failed or takes too long, it starts too, and computes.

Invariants: one thread, that of the scheduler, but for the jobs themselves, which run on two threads
of their own, one for loads and one for stores; no block is published before all bytes of its load
are there; every load and every store ends, by its deadline at the latest; a request that ends while
it waits gives its blocks back at once.

Does not know: torch, which bytes a block has (`TierDevice`), the order of requests but for who
gives way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, final

import kvcore
from model.control.request import Request
from model.host import Host

if TYPE_CHECKING:  # not loaded where there are no tiers
    from kvcore.tiers import Found, LoadJob, PeerServer, StoreJob, TierManager

_LEAST_STEP_TOKENS: Final = 16  # a step with fewer says little about the time of a prefill
_LEAST_DEADLINE_S: Final = 1.0
_SLOWEST_BYTES_PER_S: Final = 50e6  # of a device whose speed was never measured
_MAX_STORES: Final = 4  # jobs
_STORE_DEADLINE_S: Final = 1.0
_POLL_S: Final = 0.002
_DRAIN_S: Final = 10.0
_WEIGHT: Final = 0.3  # of a new measurement
_FORGIVEN: Final = 0.95  # what a load that was not worth it makes of the time that loads take
_log = logging.getLogger(__name__)


class TierDevice(Protocol):
    """Runs jobs, such as `HostTransfers`: it knows where the bytes of a block are."""

    def mark(self) -> object:
        """Note what the device has been sent so far; a job with this mark comes after it."""
        ...

    def began(self, job: LoadJob) -> None:
        """A load has been begun; its blocks will be written."""
        ...

    def load(self, job: LoadJob, mark: object) -> None:
        """Run a load; its bytes are in the blocks when this returns. Called on a thread for it."""
        ...

    def store(self, job: StoreJob, mark: object) -> None:
        """Run a store likewise."""
        ...

    def gave_up(self) -> None:
        """A load was given up while it ran: what is sent from now on comes after its writes."""
        ...


@final
class TransferCosts:
    """What computing and loading take, measured while running.

    Args:
        copy_bytes: of a block.

    Attributes:
        compute_s: seconds a token in a prefill; None: not measured yet.
        load_s: for each tier seconds a byte; a tier is missing until it is measured.
    """

    def __init__(self, copy_bytes: int) -> None:
        self.compute_s: float | None = None
        self.load_s: dict[str, float] = {}
        self._copy_bytes = copy_bytes

    def loading_s(self, copies: Mapping[str, int]) -> float | None:
        """The seconds that a load of these copies takes in all; None: unknown. O(tiers)."""
        found = [(self.load_s.get(name), count) for name, count in copies.items() if count]
        if any(rate is None for rate, _ in found):
            return None
        return sum([(rate or 0.0) * count for rate, count in found]) * self._copy_bytes

    def computing_s(self, num_tokens: int) -> float | None:
        """Seconds that computing tokens takes; None: unknown. O(1)."""
        return None if self.compute_s is None else self.compute_s * num_tokens

    def deadline_s(self, num_tokens: int, num_copies: int) -> float:
        """Seconds after which a load is given up. O(1)."""
        longest = self.computing_s(num_tokens)
        if longest is None:
            longest = num_copies * self._copy_bytes / _SLOWEST_BYTES_PER_S
        return max(_LEAST_DEADLINE_S, longest)

    def is_worth(self, found: Found, waiting_s: float) -> bool:
        """Whether to load what was found, behind loads that take `waiting_s`. O(tiers)."""
        loading_s = self.loading_s(found.num_copies)
        computing_s = self.computing_s(found.num_tokens - found.num_device_tokens)
        if loading_s is None or computing_s is None or waiting_s + loading_s <= computing_s:
            return True
        for name, count in found.num_copies.items():
            if count and waiting_s < computing_s:
                self.load_s[name] *= _FORGIVEN  # a slow moment does not count for ever
        return False

    def note_step(self, num_tokens: int, took_s: float) -> None:
        """Note how long a step took. O(1)."""
        if num_tokens >= _LEAST_STEP_TOKENS:
            each, before = took_s / num_tokens, self.compute_s
            self.compute_s = each if before is None else before + _WEIGHT * (each - before)

    def note_load(self, copies: Mapping[str, int], took_s: float) -> None:
        """Note how long a load of this number of copies from each tier took. O(tiers)."""
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
        deadline_s: when it is given up.
        is_over: whether its thread has done with it.
        has_failed: whether it raised.
        took_s: how long it ran.
    """

    job: _Job
    deadline_s: float
    is_over: bool = False
    has_failed: bool = False
    took_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting(_Running["LoadJob"]):
    """A load, and the request that waits for it.

    Attributes:
        request: the request.
        sequence: its sequence until then.
        expected_s: how long the load should take.
    """

    request: Request
    sequence: kvcore.KVSequence
    expected_s: float


@dataclass(slots=True)
class TransferStats:
    """Counters since the start.

    Attributes:
        num_loads: loads that came.
        num_failed_loads: loads that failed: a copy was lost, or wrong.
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
        tiers: what is where.
        device: moves bytes.
        host: gives threads and time; None: the process.
        server: serves the tiers to peers; None: nothing does.

    Attributes:
        tiers: as above.
        server: as above.
        costs: what decides whether a load is worth it.
        stats: its counters.
        wake: is called on a thread of the transfers whenever one is over.
    """

    def __init__(
        self,
        tiers: TierManager,
        device: TierDevice,
        costs: TransferCosts,
        host: Host | None = None,
        server: PeerServer | None = None,
    ) -> None:
        self.tiers = tiers
        self.server = server
        self.costs = costs
        self.stats = TransferStats()
        self.wake: Callable[[], None] = _nothing
        self._device = device
        self._host = Host() if host is None else host
        self._loads: dict[Request, _Waiting] = {}
        self._stores: list[_Running[StoreJob]] = []
        self._sent: list[_Running[StoreJob]] = []  # those whose thread has not done with them
        self._began_s = 0.0
        self._step_marks = deque([tiers.marks()], maxlen=2)  # at the begin of the last two steps
        self._news = self._host.event()
        self._queues = self._host.queue(), self._host.queue()
        for name, queue in zip(("kv loads", "kv stores"), self._queues, strict=True):
            self._host.start_thread(name, partial(self._work, queue))

    def __contains__(self, request: Request) -> bool:
        """Whether a request waits for its KV. O(1)."""
        return request in self._loads

    @property
    def requests(self) -> Iterable[Request]:
        """The requests that wait for their KV. O(1)."""
        return self._loads.keys()

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way. O(1)."""
        return bool(self._loads or self._stores)

    # What has failed

    def note_start(self, request: Request) -> None:
        """A request gets blocks: what it computes is stored after this moment. O(tiers)."""
        request.tier_marks = request.tier_marks or self.tiers.marks()

    def distrust(self, request: Request) -> None:
        """Empty the cache; of the tiers forget what a request has read or may have computed.

        What was computed from that came later than its start. O(copies).
        """
        self.tiers.reset(request.tier_marks or self.tiers.marks(), request.sequence)

    def distrust_steps(self) -> None:
        """Empty the cache; of the tiers forget what the last two steps may have written.

        O(copies).
        """
        self.tiers.reset(self._step_marks[0])

    # Loads

    def begin(self, request: Request) -> bool:
        """Begin to load what the tiers have of a request that has just started, if it is worth it.

        The request waits then, without its sequence: see `Request.suspend`. Asked once each time
        that a request has no blocks. O(its blocks in tiers).

        Returns:
            Whether it waits.
        """
        if request.has_asked_tiers:
            return False
        request.has_asked_tiers = True
        sequence = request.running_sequence
        found = self.tiers.find(sequence)
        num_new = found.num_tokens - found.num_device_tokens
        waiting_s = sum([load.expected_s for load in self._loads.values()])
        least = 1
        if num_new and not self.costs.is_worth(found, waiting_s):
            self.stats.num_not_worth += 1
            least = num_new + 1
        try:
            job = self.tiers.begin_load(sequence, least_tokens=least)
        except kvcore.OutOfBlocksError:
            return False
        if job is None:
            return False
        self._device.began(job)
        expected_s = self.costs.loading_s(found.num_copies) or 0.0
        patience_s = waiting_s + self.costs.deadline_s(num_new, sum(found.num_copies.values()))
        load = _Waiting(
            job=job,
            deadline_s=self._host.now_s() + patience_s,
            request=request,
            sequence=request.suspend(),
            expected_s=expected_s,
        )
        self._loads[request] = load
        self._queues[0].put(partial(self._run, load, self._device.load, self._device.mark()))
        return True

    def give_way(self, order: tuple[float, int]) -> bool:
        """Release blocks for a running request: those of stores, or of the last load behind it.

        Stores are begun again as far as their contents are still there. O(transfers).

        Returns:
            Whether there were any.
        """
        if self._stores:
            self._stores.clear()
            return self.tiers.cancel_stores()
        last = max(self._loads, key=_order, default=None)
        if last is None or last.order <= order:
            return False
        self.forget(last)
        last.has_asked_tiers = False
        return True

    def forget(self, request: Request) -> None:
        """Give up the load of a request, if it waits for one; its blocks are free. O(blocks)."""
        load = self._loads.pop(request, None)
        if load is not None:
            self._end_load(load, is_wanted=False)

    def settle(self) -> bool:
        """End what is over, has failed or takes too long. O(transfers and their blocks).

        Returns:
            Whether loads have ended: their requests can start now.
        """
        if not (self._loads or self._stores):
            return False
        now_s = self._host.now_s()
        for store in [one for one in self._stores if one.is_over or now_s >= one.deadline_s]:
            self._stores.remove(store)
            self.tiers.finish_store(store.job)
            self.stats.storing_s += store.took_s
            self.stats.num_late_stores += not store.is_over
        ended = [one for one in self._loads.values() if one.is_over or now_s >= one.deadline_s]
        for load in ended:
            del self._loads[load.request]
            self._end_load(load, is_wanted=load.is_over and not load.has_failed)
            self.stats.num_late_loads += not load.is_over
        return bool(ended)

    def _end_load(self, load: _Waiting, *, is_wanted: bool) -> None:
        """End a load, and publish what it brought if it is wanted and whole."""
        job: LoadJob = load.job
        if not is_wanted:
            job.cancel()
            job.lease.end()
            if not load.is_over:
                self._device.gave_up()
        if self.tiers.finish_load(job):
            load.request.num_loaded_tokens += job.num_tokens
            self.costs.note_load(job.num_found, load.took_s)
            self.stats.num_loads += 1
            self.stats.num_loaded_tokens += job.num_tokens
            self.stats.loading_s += load.took_s
        elif load.is_over and is_wanted:
            self.stats.num_failed_loads += 1
        self.tiers.kv.close(load.sequence)

    # Stores

    def begin_step(self) -> None:
        """A step begins. O(tiers)."""
        self._step_marks.append(self.tiers.marks())
        self._began_s = self._host.now_s()

    def end_step(self, num_tokens: int) -> None:
        """A step was sent and committed: store what it has published. O(blocks)."""
        now_s = self._host.now_s()
        self.costs.note_step(num_tokens, now_s - self._began_s)
        self.store(now_s)

    def store(self, now_s: float) -> None:
        """Begin to store published blocks, unless enough is on its way. O(blocks)."""
        self._sent = [one for one in self._sent if not one.is_over]
        if len(self._sent) < _MAX_STORES and (job := self.tiers.begin_store()) is not None:
            store = _Running(job=job, deadline_s=now_s + _STORE_DEADLINE_S)
            self._stores.append(store)
            self._sent.append(store)
            run = partial(self._run, store, self._device.store, self._device.mark())
            self._queues[1].put(run)

    def tend(self) -> None:
        """Do what is due while no steps run. O(transfers and their blocks)."""
        self.settle()
        self.store(self._host.now_s())

    def wait(self) -> bool:
        """Wait a moment for a transfer to be over, at most 2 ms; False: none is on its way."""
        news = self._news = self._host.event()
        stores, loads = self._stores, self._loads.values()
        if not (any(one.is_over for one in stores) or any(one.is_over for one in loads)):
            news.wait(_POLL_S)
        return self.is_busy

    def close(self) -> None:
        """Store what is left, at most 10 s, and close the tiers. Loads are given up."""
        for request in [*self._loads]:
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
            run()
            self._news.set()
            self.wake()

    def _run(
        self, running: _Running[_Job], how: Callable[[_Job, object], None], mark: object
    ) -> None:
        began_s = self._host.now_s()
        try:
            how(running.job, mark)
        except Exception:  # noqa: BLE001  # whatever it is, its request computes
            running.has_failed = True
            _log.exception("a transfer of KV failed")
        finally:
            running.took_s = self._host.now_s() - began_s
            running.is_over = True


_order = attrgetter("order")


def _nothing() -> None:
    pass
