"""What Prometheus is told is what happened; every name that the dashboard has is told."""

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from model.serve import metrics
from model.serve.metrics import Metrics

DASHBOARD = Path(__file__).parents[3] / "docs" / "reference" / "grafana.json"
VLLMS = {  # under `vllm:` there
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_count",
    "request_prompt_tokens_sum", "request_generation_tokens_sum", "kv_block_lifetime_steps_count",
    "kv_block_idle_before_evict_steps_count", "kv_block_reuse_gap_steps_count",
}  # fmt: skip


def samples(http):
    """The value of every sample, those of several labels added up."""
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_vllms_metrics_are_there_under_our_name(http):
    assert {f"kvcore:{name}" for name in VLLMS} <= samples(http).keys()


def test_what_is_counted_is_what_was_done(http, served):
    served.wait_for(lambda: served.engine.num_open == 0)
    before = samples(http)
    asked = {"prompt": [9] * 40, "max_tokens": 5, "ignore_eos": True, "cache_salt": "metrics"}
    for _ in range(2):
        assert http.post("/v1/completions", json=asked).status_code == 200
    after = samples(http)
    grown = {name: after[name] - before[name] for name in before}
    assert grown["kvcore:generation_tokens_total"] == 10
    assert grown["kvcore:request_success_total"] == 2
    assert grown["kvcore:time_to_first_token_seconds_count"] == 2
    assert grown["kvcore:inter_token_latency_seconds_count"] == 8
    assert grown["kvcore:request_prompt_tokens_sum"] == 80
    assert grown["kvcore:prefix_cache_queries_total"] == 80
    assert grown["kvcore:prefix_cache_hits_total"] == 32
    assert after["kvcore:kv_cache_usage_perc"] == after["kvcore:num_requests_running"] == 0


def test_how_long_blocks_lie_until_their_next_hit_is_told_in_steps(http):
    before = samples(http)
    asked = {"prompt": [11] * 33, "max_tokens": 2, "ignore_eos": True, "cache_salt": "gap"}
    between = {"prompt": "A list is", "max_tokens": 5, "ignore_eos": True}
    for body in (asked, between, asked):
        assert http.post("/v1/completions", json=body).status_code == 200
    after = samples(http)
    name = "kvcore:kv_block_reuse_gap_steps"
    assert after[f"{name}_count"] - before[f"{name}_count"] == 2
    assert after[f"{name}_sum"] - before[f"{name}_sum"] >= 2 * 5


def test_a_token_falls_into_the_bucket_that_prometheus_own_client_puts_it_into():
    ours = Metrics("x")
    own = Histogram("own", "Theirs.", buckets=metrics._BETWEEN_S, registry=CollectorRegistry())
    for waited_s in (0, 0.001, 0.0011, 0.02, 5, 80, 81, 1e9):
        ours.token_came(waited_s, is_first=False)
        own.observe(waited_s)
    (wanted,) = own.collect()
    found = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(ours.page()[0].decode())
        for sample in family.samples
        if sample.name == "kvcore:inter_token_latency_seconds_bucket"
    }
    assert found == {
        sample.labels["le"]: sample.value
        for sample in wanted.samples
        if sample.name == "own_bucket"
    }


def test_every_name_of_the_dashboard_is_told(http):
    text = DASHBOARD.read_text(encoding="utf-8")
    names = set(re.findall(r"kvcore:\w+", text))
    assert len(names) > 12
    assert names <= samples(http).keys()
    assert all(panel["targets"] for panel in json.loads(text)["panels"])
