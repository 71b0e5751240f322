"""What paging saves: the memory of a flat cache and of a paged one, and fragmentation on a trace.

Decides: what is wasted. A slot is wasted where it belongs to a sequence and holds no token of it. A
flat cache gives every sequence a row for the longest one; that is a paged cache whose blocks are
rows, so both go through the same manager and the same scheduler, with the same memory. A free block
serves any sequence, so nothing else can be wasted: there is no outer fragmentation.

Invariants: numbers come from the manager, none is a formula.

Does not know: networks, bytes of a token beyond what it is told.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kvcore
from model.bench.serve import Arrivals, serve
from model.bench.simulate import Simulation
from model.bench.workloads import BenchRequest
from model.control.config import SchedulerConfig

_POINTS = 20


@dataclass(frozen=True, slots=True)
class Holding:
    """What a cache holds for sequences of given lengths.

    Attributes:
        block_size: tokens a block; of a flat cache, the slots of a row.
        num_tokens: what the sequences have.
        num_slots: what they take.
        wasted: the share of the slots that hold no token.
    """

    block_size: int
    num_tokens: int
    num_slots: int
    wasted: float


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A workload on one block size.

    Attributes:
        block_size: tokens a block; the last row's are the rows of a flat cache.
        num_steps: until every request was answered.
        num_preemptions: requests that gave their blocks up on the way.
        mean_running: requests that held blocks, the mean over the steps.
        peak_running: the most of them.
        fragmentation: idle slots of the used ones, all steps together.
        mean_occupancy: used slots of all, the mean over the steps.
        peak_occupancy: the most of it.
        hit_rate: prompt tokens that were found in the cache.
        occupancy: along the run, the means of its equal parts.
    """

    block_size: int
    num_steps: int
    num_preemptions: int
    mean_running: float
    peak_running: int
    fragmentation: float
    mean_occupancy: float
    peak_occupancy: float
    hit_rate: float
    occupancy: tuple[float, ...]


def hold(lengths: Sequence[int], block_size: int) -> Holding:
    """Hold sequences of these lengths in a manager and count. O(tokens)."""
    num_blocks = 1 + sum(-(-length // block_size) for length in lengths)
    kv = kvcore.KVCacheManager(num_blocks, block_size, enable_caching=False)
    for length in lengths:
        sequence = kv.open([0] * length)
        kv.reserve(sequence, length)
        kv.commit(sequence, length)
    stats = kv.stats()
    wasted = 1 - stats.num_computed_tokens / stats.num_slots
    return Holding(block_size, stats.num_computed_tokens, stats.num_slots, wasted)


def replay(
    requests: Sequence[BenchRequest],
    block_size: int,
    num_slots: int,
    limits: SchedulerConfig,
    on_finish: Callable[[], None] = lambda: None,
) -> TraceRow:
    """Run a workload through the schedule and the cache, without a network. O(all tokens).

    Args:
        requests: all sent at once, but for those that follow another.
        block_size: tokens a block.
        num_slots: the memory, the same for every block size; what is left of it when it is cut
            into blocks is not used.
        limits: of a step.
        on_finish: called when a request is answered.

    Raises:
        RequestTooLongError: a request does not fit.
    """
    kv = kvcore.KVCacheManager(1 + num_slots // block_size, block_size)
    simulation = Simulation(kv, limits)
    serve(simulation, requests, Arrivals(), on_finish=on_finish)
    stats = simulation.scheduler.stats
    samples = simulation.samples
    usable = kv.num_usable_blocks * block_size
    occupancy = [sample.num_used_slots / usable for sample in samples]
    idle = sum(sample.num_idle_slots for sample in samples)
    running = [sample.num_running for sample in samples]
    return TraceRow(
        block_size=block_size,
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        mean_running=statistics.fmean(running),
        peak_running=max(running),
        fragmentation=idle / sum(sample.num_used_slots for sample in samples),
        mean_occupancy=statistics.fmean(occupancy),
        peak_occupancy=max(occupancy),
        hit_rate=stats.num_hit_tokens / stats.num_prompt_tokens,
        occupancy=tuple(_means(occupancy, min(_POINTS, len(occupancy)))),
    )


def _means(values: Sequence[float], parts: int) -> list[float]:
    bounds = [len(values) * part // parts for part in range(parts + 1)]
    return [statistics.fmean(values[first:last]) for first, last in itertools.pairwise(bounds)]
