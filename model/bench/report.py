"""What a benchmark found: a table, a JSON document.

Decides: which numbers are told and how. A ratio is that of output throughputs, ours to the peer's,
the median over the rounds with the lowest and the highest; above 1 ours is faster.

Invariants: the table and the document show the same numbers.

Does not know: how they came about.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from model.cli.step_table import StepStats, step_table


@dataclass(frozen=True, slots=True)
class Counters:
    """What the cache and the scheduler did."""

    num_steps: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_evicted_blocks: int
    peak_running: int
    peak_used_blocks: int
    num_usable_blocks: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def since(self, before: Self) -> "Counters":
        """What was added after `before`; peaks and sizes stay. O(1)."""
        return Counters(
            num_steps=self.num_steps - before.num_steps,
            num_prompt_tokens=self.num_prompt_tokens - before.num_prompt_tokens,
            num_hit_tokens=self.num_hit_tokens - before.num_hit_tokens,
            num_preemptions=self.num_preemptions - before.num_preemptions,
            num_evicted_blocks=self.num_evicted_blocks - before.num_evicted_blocks,
            peak_running=self.peak_running,
            peak_used_blocks=self.peak_used_blocks,
            num_usable_blocks=self.num_usable_blocks,
            num_draft_tokens=self.num_draft_tokens - before.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - before.num_accepted_tokens,
        )

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache. O(1)."""
        return self.num_hit_tokens / self.num_prompt_tokens

    @property
    def acceptance_rate(self) -> float:
        """The share of the drafts that held. O(1)."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Versus:
    """A peer beside us.

    Attributes:
        name: which.
        numbers: of its turn of median duration.
        ratio: our output throughput over its own, the median of the rounds.
        ratio_low: the lowest of a round.
        ratio_high: the highest.
        ttft_ratio: our mean time to first token over its own, likewise; None: it has none.
    """

    name: str
    numbers: Mapping[str, float]
    ratio: float
    ratio_low: float
    ratio_high: float
    ttft_ratio: float | None

    @classmethod
    def between(
        cls, name: str, ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]
    ) -> Self:
        """Compare the turns of the same rounds. O(rounds * log(rounds))."""
        ratios = [
            our["output_throughput"] / their["output_throughput"]
            for our, their in zip(ours, theirs, strict=True)
        ]
        firsts = [
            our["mean_ttft_ms"] / their["mean_ttft_ms"]
            for our, their in zip(ours, theirs, strict=True)
            if "mean_ttft_ms" in their
        ]
        ordered = sorted(theirs, key=lambda numbers: numbers["duration"])
        return cls(
            name=name,
            numbers=ordered[(len(ordered) - 1) // 2],
            ratio=statistics.median(ratios),
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            ttft_ratio=statistics.median(firsts) if firsts else None,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's result: what ran, our turn of median duration, the peers, our first steps."""

    about: Mapping[str, object]
    numbers: Mapping[str, float]
    counters: Counters
    peers: Sequence[Versus]
    steps: StepStats | None = None


def document(report: Report) -> dict[str, object]:
    """The whole report as one JSON document: our numbers at the top. O(peers)."""
    return {
        **report.about,
        **report.numbers,
        **asdict(report.counters),
        "hit_rate": report.counters.hit_rate,
        "acceptance_rate": report.counters.acceptance_rate,
        "peers": [asdict(peer) for peer in report.peers],
        **({} if report.steps is None else {"steps": asdict(report.steps)}),
    }


def table(report: Report) -> str:
    """The report as aligned lines. O(peers)."""
    about, numbers, counters = report.about, report.numbers, report.counters
    used = f"{counters.peak_used_blocks:,} of {counters.num_usable_blocks:,} at the peak"
    evicted = f"{counters.num_evicted_blocks:,} evicted, {counters.num_preemptions:,} preemptions"
    hits = f"{counters.num_hit_tokens:,} of {counters.num_prompt_tokens:,} prompt tokens"
    tokens = f"{numbers['total_input_tokens']:,.0f} in, {numbers['total_output_tokens']:,.0f} out"
    what = f"{about['model']} in {about['dtype']} on {about['device']}, {about['network']}"
    rows = {
        "workload": f"{about['workload']}, {what}",
        "requests": f"{numbers['completed']:,.0f} in {numbers['duration']:.2f} s, {tokens}",
        "steps": f"{counters.num_steps:,}, at most {counters.peak_running:,} requests at once",
        "request throughput": f"{numbers['request_throughput']:,.2f} requests/s",
        "output throughput": f"{numbers['output_throughput']:,.0f} tokens/s",
        "total throughput": f"{numbers['total_token_throughput']:,.0f} tokens/s",
        "prefix hit rate": f"{counters.hit_rate:.1%} ({hits})",
        "blocks": f"{used}, {evicted}",
        "start-up": f"ready {about['startup_s']:.1f} s after the process began, "
        f"its first token after {about['first_token_s']:.1f}",
        "collector": f"{about['num_gc_pauses']:,} pauses, the longest "
        f"{about['max_gc_pause_ms']:.1f} ms",
    }
    if counters.num_draft_tokens:
        held = f"{counters.num_accepted_tokens:,} of {counters.num_draft_tokens:,} draft tokens"
        rows["drafts that held"] = f"{counters.acceptance_rate:.1%} ({held})"
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines.append(f"{'ms':<{width}}  {'mean':>10} {'median':>10} {'p99':>10}")
    for name, meaning in (
        ("ttft", "to first token"),
        ("tpot", "a token"),
        ("itl", "between two"),
        ("e2el", "to the last"),
    ):
        values = [numbers[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p99")]
        cells = " ".join(f"{value:>10,.2f}" for value in values)
        lines.append(f"{f'{name}, {meaning}':<{width}}  {cells}")
    for peer in report.peers:
        speed = f"{peer.numbers['output_throughput']:,.0f} tokens/s"
        spread = f"ours {peer.ratio:.2f}x ({peer.ratio_low:.2f}-{peer.ratio_high:.2f})"
        first = "" if peer.ttft_ratio is None else f", time to first token {peer.ttft_ratio:.2f}x"
        lines.append(f"{peer.name:<{width}}  {speed}, {spread}{first}")
    if report.steps is not None:
        lines += ["", step_table(report.steps)]
    return "\n".join(lines)
