"""What a router gives: `python -m model.cluster.bench --routers prefix --routers ray-prefix`.

Decides: the workload: prompts that begin alike, a few at once, more of them than the caches hold;
each router gets replicas of its own, and the same prompts in the same order. Nothing is sent
before: the first request counts.

Does not know: how a replica is chosen.
"""

import asyncio
import random
import re
import statistics
import sys
from dataclasses import dataclass, replace
from urllib.parse import urlsplit
from urllib.request import urlopen

from model.cli.exits import leaves
from model.cli.options import ModelOptions
from model.cli.settings import Flags
from model.cli.signals import StopRequest
from model.cluster.config import ClusterConfig, ClusterOptions, Routing
from model.cluster.session import serving
from model.control.config import EngineConfig
from model.control.settings import check_settings, setting
from model.serve.config import ServeConfig
from model.serve.load import Job, run_load

_PATIENCE_S = 30
_COUNTS = {
    "requests": "router_requests_total",
    "prompt": "prompt_tokens_total",
    "cached": "prompt_tokens_cached_total",
    "decision_s": "router_decision_seconds_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is sent, for each router."""

    routers: tuple[Routing, ...] = setting(
        ("prefix", "power-of-two", "round-robin"), help="the routers, one after the other"
    )
    num_requests: int = setting(160, help="requests", least=1)
    at_once: int = setting(4, help="requests at once", least=1)
    prefixes: int = setting(8, help="different beginnings of prompts", least=1)
    prefix_tokens: int = setting(1024, help="tokens of a beginning", least=0)
    own_tokens: int = setting(24, help="tokens of a prompt after it", least=1)
    new_tokens: int = setting(8, help="tokens of an answer", least=1)
    seed: int = setting(0, help="of what is drawn")

    def __post_init__(self) -> None:
        check_settings(self)

    def prompts(self, vocab_size: int = 1000) -> list[list[int]]:
        """The prompts, the same for the same work. O(tokens)."""
        draw = random.Random(self.seed)  # noqa: S311  # a benchmark repeats
        begins = [
            [draw.randrange(1, vocab_size) for _ in range(self.prefix_tokens)]
            for _ in range(self.prefixes)
        ]
        return [
            draw.choice(begins) + [draw.randrange(1, vocab_size) for _ in range(self.own_tokens)]
            for _ in range(self.num_requests)
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it.

    Attributes:
        hit_rate: tokens of prompts that were found in a cache, of all.
        ttft_ms, ttft_p95_ms: to the first token: median, and what one in 20 exceeds.
        decision_us: for a choice, the mean, as `Sent.decision_ns` counts.
        num_failed: requests without a whole answer.
        duration_s: of all.
    """

    hit_rate: float
    ttft_ms: float
    ttft_p95_ms: float
    decision_us: float
    num_failed: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing(Job):
    """What the load sends: prompts that begin alike."""

    work: Work

    def prompts(self) -> list[list[int]]:
        """The prompts of the work. O(tokens)."""
        return self.work.prompts()


async def send(address: str, work: Work) -> Found:
    """Send the work to a server, and look at its counts before and after."""
    where = urlsplit(address)
    job = _Sharing(
        host=str(where.hostname), port=where.port or 80, num_requests=work.num_requests,
        concurrency=work.at_once, output_len=work.new_tokens, work=work,
    )  # fmt: skip
    before = _counts(address)
    loaded = await run_load(job)
    after = _counts(address)
    counts = {name: after[name] - before[name] for name in _COUNTS}
    told = sorted(1e3 * first for first in loaded.first_s) or [float("nan")]
    return Found(
        hit_rate=counts["cached"] / max(1, counts["prompt"]),
        ttft_ms=statistics.median(told),
        ttft_p95_ms=told[int(len(told) * 0.95)] if len(told) > 1 else told[0],
        decision_us=1e6 * counts["decision_s"] / max(1, counts["requests"]),
        num_failed=loaded.num_failed,
        duration_s=loaded.duration_s,
    )


def _counts(address: str) -> dict[str, float]:
    with urlopen(f"{address}/metrics", timeout=_PATIENCE_S) as answer:  # noqa: S310  # http, ours
        page = answer.read().decode()
    found = {}
    for name, metric in _COUNTS.items():
        value = re.search(rf"^kvcore:{metric} (\S+)", page, re.MULTILINE)
        found[name] = 0.0 if value is None else float(value.group(1))
    return found


def _run() -> None:
    flags = Flags("python -m model.cluster.bench", "What a router of replicas gives.", "")
    flags.add("what is sent", Work)
    flags.add("how many, and who takes what", ClusterConfig)
    flags.add("how clients are met", ServeConfig)
    flags.add("what runs in each replica", ModelOptions)
    flags.add("how large its cache and a step are, and how it runs", EngineConfig, num_blocks=320)
    said = flags.parse()
    work = said.of(Work)
    options = ClusterOptions(
        cluster=said.of(ClusterConfig),
        serve=said.of(ServeConfig, port=0, served_model_name="model"),
        model=said.of(ModelOptions),
        engine=said.of(EngineConfig, record_events=True),
    )
    print(
        f"{'router':<17}{'hit':>8}{'ttft ms':>10}{'p95':>10}{'choice us':>11}{'failed':>8}{'s':>8}"
    )
    asked = StopRequest()
    for router in work.routers:
        with serving(
            replace(options, cluster=replace(options.cluster, router=router)), asked
        ) as address:
            found = asyncio.run(send(address, work))
        print(
            f"{router:<17}{found.hit_rate:>8.1%}{found.ttft_ms:>10.1f}{found.ttft_p95_ms:>10.1f}"
            f"{found.decision_us:>11.1f}{found.num_failed:>8}{found.duration_s:>8.1f}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    with leaves():
        _run()
