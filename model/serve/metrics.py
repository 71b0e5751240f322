"""Metrics for Prometheus: vLLM's, under `kvcore:` in place of `vllm:`.

Decides: which. What the engine counts itself is read when it is asked for, so that no step pays for
it; times are noted on the loop, for all tokens of a step that waited equally long at once.

Invariants: one registry an application; nothing global.

Does not know: routes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

import kvcore
from model.async_engine import AsyncEngine, NotServingError
from model.control.request import FinishReason
from model.control.tier_transfers import TierTransfers
from model.token_stream import Sample

if TYPE_CHECKING:  # torch is not loaded before an engine is made
    from kvcore.tiers import PeerServerStats, PeerTier
    from model.engine_core import EngineCore

_Values = Mapping[tuple[str, ...], float]
_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_WHOLE_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_OF_A_TIER: tuple[tuple[_Kind, str, str, str], ...] = (
    (CounterMetricFamily, "hits", "Copies that were loaded.", "num_hits"),
    (CounterMetricFamily, "stores", "Copies that were written.", "num_stored"),
    (CounterMetricFamily, "evictions", "Copies that gave way to others.", "num_evicted"),
    (CounterMetricFamily, "read_bytes", "Bytes loaded.", "read_bytes"),
    (CounterMetricFamily, "written_bytes", "Bytes written.", "written_bytes"),
    (GaugeMetricFamily, "copies", "Copies that a tier has.", "num_records"),
    (GaugeMetricFamily, "used_bytes", "Bytes that it takes.", "used_bytes"),
    (GaugeMetricFamily, "capacity_bytes", "The most that it may take.", "capacity_bytes"),
    (
        GaugeMetricFamily,
        "enabled",
        "0 while its device fails or its peer is away.",
        "is_enabled",
    ),
)
_LENGTHS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """The metrics of one server; the observer of its engine."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._name = model_name

        def histogram(name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"kvcore:{name}", says, ["model_name"], buckets=buckets, registry=self._registry
            )
            return made.labels(model_name)

        self._tokens = _Tokens(model_name)
        self._registry.register(self._tokens)
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "The mean of a request from one token to the next.",
            _BETWEEN_S,
        )
        self._whole = histogram(
            "e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_S
        )
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _LENGTHS)
        self._output = histogram(
            "request_generation_tokens", "Tokens that a request was given.", _LENGTHS
        )
        self._ended = Counter(
            "kvcore:request_success",
            "Requests that have ended, by the reason why.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in FinishReason:
            self._ended.labels(model_name, reason.value)  # a rate wants a zero before the first

    def read_from(self, engine: AsyncEngine) -> None:
        """Read what an engine counts whenever it is asked for. O(1)."""
        self._registry.register(_Counts(engine, self._name))

    def page(self) -> tuple[bytes, str]:
        """What Prometheus gets, and its media type. O(metrics)."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def token_came(self, waited_s: float, *, is_first: bool, count: int = 1) -> None:
        """Count tokens. O(log buckets)."""
        (self._tokens.first if is_first else self._tokens.between).note(waited_s, count)

    def sample_ended(self, sample: Sample) -> None:
        """Count a request. O(buckets)."""
        reason = sample.finish_reason or FinishReason.ABORTED
        self._ended.labels(self._name, reason.value).inc()
        if reason in {FinishReason.STOP, FinishReason.LENGTH}:
            count = len(sample.tokens)
            self._prompt.observe(sample.request.num_prompt_tokens)
            self._output.observe(count)
            self._whole.observe(sample.last_s - sample.arrived_s)
            if count > 1:
                self._per_token.observe((sample.last_s - sample.first_s) / (count - 1))


class _Times:
    """A histogram that costs next to nothing for each value; the loop alone touches it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total_s = 0.0

    @property
    def count(self) -> int:
        """How many values there are. O(buckets)."""
        return sum(self._counts)

    def note(self, value_s: float, count: int) -> None:
        """Count a value `count` times. O(log buckets)."""
        self._counts[bisect_left(self._bounds, value_s)] += count
        self._total_s += value_s * count

    def family(self, name: str, says: str, model_name: str) -> HistogramMetricFamily:
        """The lines that Prometheus scrapes. O(buckets)."""
        told = HistogramMetricFamily(f"kvcore:{name}", says, labels=["model_name"])
        names = (*map(str, self._bounds), "+Inf")
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        told.add_metric([model_name], buckets, self._total_s)
        return told


class _Tokens(Collector):
    """What is counted for each token."""

    def __init__(self, model_name: str) -> None:
        self._name = model_name
        self.first = _Times(_FIRST_S)
        self.between = _Times(_BETWEEN_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of this moment."""
        name = self._name
        yield self.first.family(
            "time_to_first_token_seconds", "From a request to its first token.", name
        )
        yield self.between.family(
            "inter_token_latency_seconds", "From one token to the next.", name
        )
        generated = CounterMetricFamily(
            "kvcore:generation_tokens", "Tokens generated.", labels=["model_name"]
        )
        generated.add_metric([name], self.first.count + self.between.count)
        yield generated


class _Counts(Collector):
    """What an engine counts itself."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._labels = [model_name]

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of this moment; only the engine's state while there is none."""
        health = self._engine.health
        yield self._gauge("engine_ready", "1 while requests are taken.", health.is_ready)
        yield from self._counters({"engine_faults": ("Steps that failed.", health.num_faults)})
        try:
            engine = self._engine.engine
        except NotServingError:
            return
        yield from self._of_requests(engine)
        yield from self._of_cache(engine)
        if engine.tiers is not None:
            yield from self._of_tiers(engine.tiers)

    def _of_requests(self, engine: EngineCore) -> Iterator[Metric]:
        steps = engine.stats
        yield self._gauge("num_requests_running", "Requests that hold a seat.", len(engine.running))
        yield self._gauge("num_requests_waiting", "Requests that wait.", len(engine.waiting))
        yield from self._counters({
            "num_preemptions": ("Requests that gave way.", steps.num_preemptions),
            "prompt_tokens": ("Tokens of the prompts that were started.", steps.num_prompt_tokens),
            "prompt_tokens_cached": ("Those found in the cache.", steps.num_hit_tokens),
            "engine_steps": ("Forward passes.", steps.num_steps),
        })  # fmt: skip
        if engine.is_speculative:
            accepted = steps.num_accepted_tokens
            yield from self._counters({
                "spec_decode_num_drafts": ("How often a request brought drafts.", steps.num_drafts),
                "spec_decode_num_draft_tokens": ("Tokens of drafts.", steps.num_draft_tokens),
                "spec_decode_num_accepted_tokens": ("Tokens of drafts that held.", accepted),
            })  # fmt: skip

    def _of_cache(self, engine: EngineCore) -> Iterator[Metric]:
        cache = engine.kv.stats()
        usable = engine.kv.num_usable_blocks
        share, cached = cache.num_used_blocks / usable, cache.num_cached_blocks
        yield self._gauge(
            "kv_cache_usage_perc", "The share of the blocks that is held; 1: all.", share
        )
        yield self._gauge("kv_blocks_cached", "Blocks whose content can be found.", cached)
        yield from self._counters({
            "prefix_cache_queries": ("Tokens looked for in the cache.", cache.num_queried_tokens),
            "prefix_cache_hits": ("Tokens found in the cache.", cache.num_hit_tokens),
            "kv_blocks_evicted": ("Cached blocks that were reused.", cache.num_evicted_blocks),
        })  # fmt: skip
        info = InfoMetricFamily("kvcore:cache_config", "Sizes of the cache.", labels=["model_name"])
        sizes = {"block_size": str(engine.kv.block_size), "num_gpu_blocks": str(usable)}
        info.add_metric(self._labels, sizes)
        yield info
        if cache.lifetimes is not None:
            yield from self._of_blocks(cache.lifetimes)

    def _of_tiers(self, transfers: TierTransfers) -> Iterator[Metric]:
        """What host memory and disk have, and what came from there."""
        stats, tiers = transfers.stats, transfers.tiers.tiers
        outcomes = {
            "whole": stats.num_loads, "failed": stats.num_failed_loads,
            "late": stats.num_late_loads, "not worth it": stats.num_not_worth,
        }  # fmt: skip
        yield self._labelled(
            CounterMetricFamily,
            "kv_tier_loads",
            "Loads of a prefix, by how they ended: whole, failed, late, or not worth it.",
            {(outcome,): count for outcome, count in outcomes.items()},
            "outcome",
        )
        yield from self._counters({
            "kv_tier_loaded_tokens": ("Tokens whose KV was loaded.", stats.num_loaded_tokens),
            "kv_tier_load_seconds": ("Seconds that loads took.", stats.loading_s),
            "kv_tier_store_seconds": ("Seconds that stores took.", stats.storing_s),
        })  # fmt: skip
        for kind, name, says, of in _OF_A_TIER:
            values: _Values = {(tier.name,): getattr(tier.stats, of) for tier in tiers}
            yield self._labelled(kind, f"kv_tier_{name}", says, values, "tier")
        yield self._labelled(
            CounterMetricFamily,
            "kv_tier_faults",
            "Copies that were not served or not written, by kind.",
            {
                (tier.name, fault): count
                for tier in tiers
                for fault, count in sorted(tier.stats.faults.items())
            },
            "tier",
            "kind",
        )
        peers = [cast("PeerTier", tier) for tier in tiers if not tier.keeps]
        if peers:
            yield self._labelled(
                CounterMetricFamily,
                "kv_peer_copies",
                "Copies loaded from a peer, by what carried them: tcp, or nixl.",
                {
                    (peer.name, transport): count
                    for peer in peers
                    for transport, count in peer.num_by_transport.items()
                },
                "tier",
                "transport",
            )
        if transfers.server is not None:
            yield from self._of_server(transfers.server.stats)

    def _of_server(self, stats: PeerServerStats) -> Iterator[Metric]:
        """What peers ask for."""
        yield self._gauge(
            "kv_peer_connections", "Connections of peers; each has two.", stats.num_connections
        )
        yield from self._counters({
            "kv_peer_served_copies": ("Copies sent to peers.", stats.num_served),
            "kv_peer_read_copies": ("Those that peers have read over NIXL.", stats.num_read),
            "kv_peer_served_bytes": ("Their bytes.", stats.served_bytes),
            "kv_peer_missing_copies": ("Copies asked for that were not there.", stats.num_missing),
            "kv_peer_refusals": ("Peers with another secret, or model.", stats.num_refused),
        })  # fmt: skip

    def _of_blocks(self, lives: kvcore.LifetimeStats) -> Iterator[Metric]:
        idle, gap = lives.idle_before_eviction, lives.reuse_gap
        for name, says, found in (
            ("lifetime", "Steps from a block's content to its eviction.", lives.lifetime),
            ("idle_before_evict", "Steps from a block's last use to its eviction.", idle),
            ("reuse_gap", "Steps from the end of a block's use to its next hit.", gap),
        ):
            family = HistogramMetricFamily(
                f"kvcore:kv_block_{name}_steps", says, labels=["model_name"]
            )
            ends = (str(2**bits - 1) for bits in range(len(found.buckets)))
            buckets = [*zip(ends, accumulate(found.buckets), strict=True), ("+Inf", found.count)]
            family.add_metric(self._labels, buckets, found.total)
            yield family

    def _labelled(
        self,
        kind: _Kind,
        name: str,
        says: str,
        values: _Values,
        *labels: str,
    ) -> Metric:
        """A metric with these values by what their labels beside the model's name are."""
        family = kind(f"kvcore:{name}", says, labels=["model_name", *labels])
        for each, value in values.items():
            family.add_metric([*self._labels, *each], value)
        return family

    def _gauge(self, name: str, says: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, says, {(): value})

    def _counters(self, named: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
        for name, (says, value) in named.items():
            yield self._labelled(CounterMetricFamily, name, says, {(): value})
