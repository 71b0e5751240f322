"""The results of a run: numbers, an aligned table, a JSON document.

Decides: which numbers are shown and how. `flat` is the memory of a cache without blocks for the
same batch: a row for each request that ran at the peak, each row with room for the longest request.

Invariants: the table and the document show the same numbers.

Does not know: how they came about.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from model.caches.memory import show_bytes
from model.cli.verify import Mismatch
from model.control.request import FinishReason
from model.engine import Engine
from model.engine_core import Completion


@dataclass(frozen=True, slots=True)
class RunStats:
    """The numbers of a run; sizes in bytes, times in seconds."""

    num_requests: int
    num_stopped: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_new_tokens: int
    elapsed_s: float
    num_steps: int
    num_preemptions: int
    num_swaps: int
    num_forks: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    peak_running: int
    block_size: int
    num_usable_blocks: int
    peak_used_blocks: int
    num_evicted_blocks: int
    paged_kv_bytes: int
    flat_kv_bytes: int
    num_loaded_tokens: int = 0
    tiers: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, prefills included. O(1)."""
        return self.num_new_tokens / self.elapsed_s

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the prefix cache. O(1)."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def acceptance_rate(self) -> float:
        """The fraction of draft tokens that were accepted. O(1)."""
        return self.num_accepted_tokens / max(1, self.num_draft_tokens)


def measure(engine: Engine, completions: Sequence[Completion], elapsed_s: float) -> RunStats:
    """Collect the numbers of an engine that ran these requests and no others. O(num_blocks)."""
    requests = [completion.request for completion in completions]
    blocks, steps = engine.kv.stats(), engine.stats
    layout = engine.network.layout
    longest = max(request.max_total_tokens for request in requests)
    return RunStats(
        num_requests=len(requests),
        num_stopped=sum(request.finish_reason is FinishReason.STOP for request in requests),
        num_prompt_tokens=steps.num_prompt_tokens,
        num_hit_tokens=steps.num_hit_tokens,
        num_new_tokens=sum(request.num_output_tokens for request in requests),
        elapsed_s=elapsed_s,
        num_steps=steps.num_steps,
        num_preemptions=steps.num_preemptions,
        num_swaps=steps.num_swaps,
        num_forks=steps.num_forks,
        num_drafts=steps.num_drafts,
        num_draft_tokens=steps.num_draft_tokens,
        num_accepted_tokens=steps.num_accepted_tokens,
        peak_running=steps.peak_running,
        block_size=engine.kv.block_size,
        num_usable_blocks=engine.kv.num_usable_blocks,
        peak_used_blocks=blocks.peak_used_blocks,
        num_evicted_blocks=blocks.num_evicted_blocks,
        paged_kv_bytes=layout.kv_bytes(blocks.peak_used_blocks, engine.kv.block_size),
        flat_kv_bytes=steps.peak_running * longest * layout.token_bytes,
        num_loaded_tokens=sum(request.num_loaded_tokens for request in requests),
        tiers=_tiers(engine),
    )


def _tiers(engine: Engine) -> tuple[str, ...]:
    """Return a line for each tier with its counts of copies and faults. O(tiers)."""
    if engine.tiers is None:
        return ()
    return tuple(
        f"{tier.name}: {tier.stats.num_hits} copies loaded, {tier.stats.num_stored} stored"
        + (f", {sum(tier.stats.faults.values())} faults" if tier.stats.faults else "")
        for tier in engine.tiers.tiers.tiers
    )


def table(stats: RunStats) -> str:
    """Return the numbers as aligned lines. O(1)."""
    ratio = stats.flat_kv_bytes / max(1, stats.paged_kv_bytes)
    per_second = f"{stats.tokens_per_second:,.0f}"
    hits = f"{stats.num_hit_tokens} of {stats.num_prompt_tokens} prompt tokens"
    blocks = f"{stats.peak_used_blocks} of {stats.num_usable_blocks} at the peak"
    preempted = f"{stats.num_preemptions} preemptions, {stats.num_swaps} swapped"
    sizes = f"paged {show_bytes(stats.paged_kv_bytes)}, flat {show_bytes(stats.flat_kv_bytes)}"
    held = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens"
    often = f"in {stats.num_drafts} verifications"
    drafts = (
        {"draft tokens accepted": f"{stats.acceptance_rate:.1%} ({held}, {often})"}
        if stats.num_drafts
        else {}
    )
    loaded = (
        {"loaded from tiers": f"{stats.num_loaded_tokens} tokens ({'; '.join(stats.tiers)})"}
        if stats.tiers
        else {}
    )
    rows = {
        "requests": f"{stats.num_requests} ({stats.num_stopped} ended by a stop token or string)",
        "new tokens": f"{stats.num_new_tokens} in {stats.elapsed_s:.2f} s, {stats.num_steps} steps",
        "tokens per second": per_second,
        "prefix hit rate": f"{stats.hit_rate:.1%} ({hits})",
        **drafts,
        **loaded,
        "blocks used": f"{blocks}, {stats.block_size} tokens each",
        "blocks evicted": f"{stats.num_evicted_blocks} ({preempted})",
        "KV bytes": f"{sizes} ({ratio:.1f}x)",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def document(
    about: dict[str, str],
    completions: Sequence[Completion],
    stats: RunStats,
    mismatches: Sequence[Mismatch] | None,
    names: Sequence[str | None],
) -> dict[str, object]:
    """Return the whole run as one JSON document. O(all tokens).

    Args:
        about: the model, backend, device and dtype of the run.
        completions: in the order of the prompts, all samples of one after the other.
        stats: of the run.
        mismatches: of the verification; None: there was none.
        names: of the prompts, where their file gives them some.
    """
    return {
        **about,
        "requests": _requests(completions, names),
        "stats": {
            **asdict(stats),
            "tokens_per_second": round(stats.tokens_per_second, 1),
            "hit_rate": round(stats.hit_rate, 4),
            "acceptance_rate": round(stats.acceptance_rate, 4),
        },
        "verified": None if mismatches is None else not mismatches,
        "mismatches": [asdict(mismatch) for mismatch in mismatches or ()],
    }


def _requests(
    completions: Sequence[Completion], names: Sequence[str | None]
) -> list[dict[str, object]]:
    described: list[dict[str, object]] = []
    prompt = -1
    for completion in completions:
        prompt += completion.request.sample == 0
        name = names[prompt]
        custom = {} if name is None else {"custom_id": name}
        described.append(custom | _request(completion, prompt))
    return described


def _request(completion: Completion, prompt: int) -> dict[str, object]:
    request = completion.request
    reason = request.finish_reason
    told = {"logprobs": [token._asdict() for token in completion.tokens]}
    return {
        "prompt": prompt,
        "sample": request.sample,
        "text": completion.text,
        "tokens": request.output_tokens,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "finish_reason": None if reason is None else reason.value,
        **(told if request.params.logprobs is not None else {}),
    }
