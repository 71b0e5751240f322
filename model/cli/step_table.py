"""The time of recorded steps by phase, and the cache's counts meanwhile: numbers and a table.

Decides: the numbers that `--stats` shows. Invariants: they are those of the recording alone,
whatever the engine did before it.

Does not know: how a step is recorded (`trace.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.control.step import PHASES
from model.trace import StepRecorder


@dataclass(frozen=True, slots=True)
class Durations:
    """The durations of something over all steps, in microseconds but for the total."""

    total_s: float
    mean_us: float
    median_us: float
    p99_us: float

    @classmethod
    def of(cls, times_ns: Sequence[int]) -> "Durations":
        """Summarize; zeros where there is nothing. O(steps * log(steps))."""
        ordered = sorted(times_ns) or [0]
        return cls(
            total_s=sum(ordered) / 1e9,
            mean_us=sum(ordered) / len(ordered) / 1e3,
            median_us=ordered[len(ordered) // 2] / 1e3,
            p99_us=ordered[len(ordered) * 99 // 100] / 1e3,
        )


@dataclass(frozen=True, slots=True)
class StepStats:
    """The numbers that `--stats` shows; counts are of the recording alone.

    Attributes:
        num_steps: recorded steps.
        step: their durations.
        phases: the same for each phase.
        num_decode_tokens: tokens computed one at a time.
        num_prefill_tokens: the others.
        mean_occupancy: blocks in use of all usable ones, the mean over the steps, 0 to 1.
        peak_occupancy: the largest share in a step.
        num_usable_blocks: the blocks that both are shares of.
        num_queried_tokens: tokens of requests when they were first admitted.
        num_hit_tokens: those found in the cache.
        num_resumed_tokens: tokens of preempted requests when they were admitted again.
        num_resumed_hit_tokens: those found in the cache.
        num_allocated_blocks: blocks handed out; hits are not among them.
        num_evicted_blocks: those of them that held content, which was evicted.
        num_cached_blocks: blocks that hold content at the end.
        num_preemptions: requests that gave their blocks up.
    """

    num_steps: int
    step: Durations
    phases: dict[str, Durations]
    num_decode_tokens: int
    num_prefill_tokens: int
    mean_occupancy: float
    peak_occupancy: float
    num_usable_blocks: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_resumed_tokens: int
    num_resumed_hit_tokens: int
    num_allocated_blocks: int
    num_evicted_blocks: int
    num_cached_blocks: int
    num_preemptions: int


def summarize_steps(recorder: StepRecorder) -> StepStats:
    """Collect the numbers of a recording. O(steps * log(steps) + num_blocks)."""
    steps, before, now = recorder.steps, recorder.before, recorder.cache_stats()
    phases: dict[str, list[int]] = {name: [] for name in PHASES}
    for step in steps:
        for name, begin, end in step.phases():
            phases[name].append(end - begin)
    used = [step.num_used_blocks / recorder.num_usable_blocks for step in steps] or [0.0]
    preempted = steps[-1].num_preemptions if steps else recorder.num_preemptions_before
    return StepStats(
        num_steps=len(steps),
        step=Durations.of([step.elapsed_ns for step in steps]),
        phases={name: Durations.of(times) for name, times in phases.items()},
        num_decode_tokens=sum(step.num_decode_tokens for step in steps),
        num_prefill_tokens=sum(step.num_prefill_tokens for step in steps),
        mean_occupancy=sum(used) / len(used),
        peak_occupancy=max(used),
        num_usable_blocks=recorder.num_usable_blocks,
        num_queried_tokens=now.num_queried_tokens - before.num_queried_tokens,
        num_hit_tokens=now.num_hit_tokens - before.num_hit_tokens,
        num_resumed_tokens=now.num_resumed_tokens - before.num_resumed_tokens,
        num_resumed_hit_tokens=now.num_resumed_hit_tokens - before.num_resumed_hit_tokens,
        num_allocated_blocks=now.num_allocated_blocks - before.num_allocated_blocks,
        num_evicted_blocks=now.num_evicted_blocks - before.num_evicted_blocks,
        num_cached_blocks=now.num_cached_blocks,
        num_preemptions=preempted - recorder.num_preemptions_before,
    )


def step_table(stats: StepStats) -> str:
    """Return the numbers as aligned lines. O(1)."""
    lines = [f"{'us a step':<12}{'share':>8}{'mean':>12}{'median':>12}{'p99':>12}"]
    for name, times in (*stats.phases.items(), ("step", stats.step)):
        share = times.total_s / stats.step.total_s if stats.step.total_s else 0.0
        cells = "".join(f"{v:>12,.1f}" for v in (times.mean_us, times.median_us, times.p99_us))
        lines.append(f"{name:<12}{share:>8.1%}{cells}")
    resumed = f"{stats.num_resumed_hit_tokens:,} of {stats.num_resumed_tokens:,} after preemption"
    rows = {
        "steps": f"{stats.num_steps:,} in {stats.step.total_s:.2f} s",
        "tokens": f"{stats.num_decode_tokens:,} decoded, {stats.num_prefill_tokens:,} prefilled",
        "hits": f"{stats.num_hit_tokens:,} of {stats.num_queried_tokens:,} tokens, {resumed}",
        "blocks": f"{stats.num_allocated_blocks:,} allocated, "
        f"{stats.num_evicted_blocks:,} evicted, {stats.num_cached_blocks:,} cached",
        "occupancy": f"mean {stats.mean_occupancy:.1%}, peak {stats.peak_occupancy:.1%} of "
        f"{stats.num_usable_blocks:,} blocks",
        "preemptions": f"{stats.num_preemptions:,}",
    }
    lines += [f"{name:<12}  {value}" for name, value in rows.items()]
    return "\n".join(lines)
