"""The engine's benchmarks send what they say, count it, and every command runs."""

import argparse
import json

import pytest

import kvcore
from tests.bench.engine import capacity, paging
from tests.bench.engine.requests import SHAPES, BenchRequest, make_requests, serve, total_lengths
from tests.kvcore.test_bench import run


def test_the_uniform_workload_is_nano_vllms():
    requests = make_requests(SHAPES["uniform"], 151_936)
    assert sum(one.max_tokens for one in requests) == 133_966
    assert max(token for one in requests for token in one.tokens) == 10_000
    chat = make_requests(SHAPES["chat"], 500)
    assert [one.follows for one in chat[31:34]] == [None, 0, 1]
    assert total_lengths(chat)[32] == sum(len(chat[n].tokens) + chat[n].max_tokens for n in (0, 32))


def test_a_replay_counts_idle_slots_by_hand_and_sends_what_follows_after_it():
    replayed = paging.Replay(kvcore.KVCacheManager(9, 4))
    requests = [BenchRequest([1, 2, 3, 4, 5], 2), BenchRequest([6], 1, follows=0)]
    served = serve(replayed, requests)
    assert [len(one.output) for one in served] == [2, 1]
    assert served[1].prompt == [*served[0].prompt, *served[0].output, 6]
    assert served[1].sent_s >= served[0].token_s[-1]
    assert replayed.samples == [(1, 8, 3), (1, 8, 2), (1, 8, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "subjects"),
    [
        (["engine", "--peer", "generate", "--peer", "generate_batch", "--max-concurrency", "2"],
         {"engine", "generate", "generate_batch"}),
        (["engine", "--workload", "chat", "--peer", "no-prefix-cache"],
         {"engine", "no-prefix-cache"}),
        (["engine", "--batch-invariant", "--peer", "no-batch-invariant"],
         {"engine", "no-batch-invariant"}),
        (["host"], {"engine", "kvcore"}),
        (["recurrent", "--model", "tiny-qwen3.5", "--num-requests", "3", "--context", "20",
          "--kv-gigabytes", "0.1"],
         {"tiny-qwen3.5", "tiny-qwen3.5-attending"}),
        (["wire"], {"events published", "events taken", "no events", "kvcore.wire"}),
        (["start"], {"here"}),
    ],
)  # fmt: skip
def test_every_command_runs(arguments, subjects):
    code, out, errors = run(*arguments, "--quick", "--json")
    assert code == 0, errors
    assert {row["subject"] for row in json.loads(out)["rows"]} == subjects


def test_a_memory_holds_more_requests_of_a_hybrid_model_the_shorter_they_are():
    options = argparse.Namespace(layout=["LFM2-1.2B"], gigabytes=0.3, peer=[], quick=False)
    long, short, kept = [row.cost.median for row in capacity.rows(options)]
    assert 0 < long < short
    assert kept == 0  # 64 running requests do not fit
    options.gigabytes = 7.0
    *_, kept = [row.cost.median for row in capacity.rows(options)]
    assert kept % 2000 == 0 < kept  # each conversation is cached up to its last whole block
