"""`python -m model.bench`: what it serves, how it compares, what it prints."""

import functools
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import EngineConfig, InvalidArgumentError, RequestTooLongError
from model.attention.attention import IMPLEMENTATION
from model.bench import host, peers
from model.bench.args import parse_args
from model.bench.networks import Wordless, load
from model.bench.process import CollectorWatch
from model.bench.report import Versus
from model.bench.serve import Arrivals, serve
from model.bench.session import execute, measure
from model.bench.workloads import BenchRequest, Shape, Span, make_requests
from model.engine import Engine
from model.errors import ModelError, UsageError
from model.load.text import TextStream
from tests.model.networks import build, greedy_and_margin
from tests.model.reference import ReferenceBackend

ROOT = Path(__file__).parents[2]
TINY = ["--backend", "numba", "--num-requests", "5", "--input-len", "6:20", "--output-len", "3:5"]


@functools.cache
def network():
    return build("qwen3", 25)


def engine(**sizes):
    return Engine(network(), ReferenceBackend(), EngineConfig(num_blocks=80, block_size=4, **sizes))


def small(**fields):
    shape = Shape(num_requests=7, input_len=Span(3, 9), output_len=Span(2, 5), **fields)
    return make_requests(shape, vocab_size=320)


def is_idle(engine):
    return not engine.has_unfinished and engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def test_every_request_gets_its_own_prompt_and_exactly_its_tokens_in_order():
    ours = engine()
    answered = []
    served = serve(ours, small(), Arrivals(), on_finish=lambda: answered.append(None))
    assert [tuple(one.prompt) for one in served] == [request.tokens for request in small()]
    assert [len(one.output) for one in served] == [request.max_tokens for request in small()]
    assert [len(one.timeline.token_s) for one in served] == [len(one.output) for one in served]
    assert len(answered) == 7
    assert is_idle(ours)


def test_times_of_a_request_only_grow():
    for one in serve(engine(), small(), Arrivals(rate=2000.0)):
        moments = [0.0, one.timeline.arrival_s, *one.timeline.token_s]
        assert moments == sorted(moments)


def test_a_turn_is_sent_with_the_answer_before_it_and_finds_it_in_the_cache():
    requests = small(prefix_len=8, turns=3)
    served = serve(engine(), requests, Arrivals())
    followers = [number for number, r in enumerate(requests) if r.follows is not None]
    assert len(followers) == 4
    for number in followers:
        before = served[requests[number].follows]
        known = [*before.prompt, *before.output]
        assert served[number].prompt == [*known, *requests[number].tokens]
        # All whole blocks but the one that holds the last token, which is never computed.
        assert served[number].timeline.num_cached_tokens == (len(known) - 1) // 4 * 4
        assert served[number].timeline.arrival_s == before.timeline.token_s[-1]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_requests_are_in_flight_than_allowed(limit, monkeypatch):
    ours, most = engine(), []
    step = ours.step
    monkeypatch.setattr(
        ours, "step", lambda: most.append(len({*ours._scheduler._unfinished})) or step()
    )
    served = serve(ours, small(), Arrivals(max_concurrency=limit))
    assert max(most) == limit
    if limit == 1:
        ends = [one.timeline.token_s[-1] for one in served]
        assert [one.timeline.arrival_s for one in served] == [0.0, *ends[:-1]]


def test_a_refused_request_leaves_nothing_in_the_engine():
    ours = engine()
    requests = [*small(), BenchRequest(tuple(range(300)), 50)]
    with pytest.raises(RequestTooLongError):
        serve(ours, requests, Arrivals())
    assert is_idle(ours)


@pytest.mark.parametrize("name", ["generate", "generate_batch_sized"])
def test_a_peer_generates_the_tokens_asked_for_and_gives_the_attention_back(name):
    model = network()
    engine()  # switches the attention
    jobs = [peers.Job(list(range(5, 5 + length)), tokens) for length, tokens in ((4, 3), (9, 5))]
    finished = []
    settings = peers.PeerSettings(temperature=0.0, batch_size=2)
    seconds = peers.PEERS[name](model, jobs, settings, finished.append)
    assert seconds > 0
    assert sum(finished) == 2
    assert model.network.config._attn_implementation == IMPLEMENTATION


def test_generates_groups_are_padded_so_that_each_row_says_what_it_says_alone(monkeypatch):
    model = network()
    engine()
    prompts = [list(range(40, 61)), [200, 100, 5]]
    rows = []
    generate = type(model.network).generate

    def kept(self, **arguments):
        output = generate(self, **arguments)
        rows.extend(output[:, arguments["input_ids"].shape[1] :].tolist())
        return output

    monkeypatch.setattr(type(model.network), "generate", kept)
    jobs = [peers.Job(prompt, 6) for prompt in prompts]
    peers.run_generate(model, jobs, peers.PeerSettings(temperature=0.0, batch_size=2))
    monkeypatch.undo()
    alone = [greedy_and_margin(model, prompt, 6) for prompt in prompts]
    assert min(margin for _, margin in alone) > 1e-3
    assert rows == [tokens for tokens, _ in alone]


def test_a_peer_that_gives_too_few_tokens_is_an_error(monkeypatch):
    model = network()
    engine()
    monkeypatch.setattr(
        type(model.network), "generate", lambda self, input_ids, **_: input_ids[:, :-1]
    )
    with pytest.raises(ModelError, match="generate: wanted 3 tokens a row, got 0"):
        peers.run_generate(model, [peers.Job([1, 2, 3], 3)], peers.PeerSettings(0.0, 1))
    assert model.network.config._attn_implementation == IMPLEMENTATION


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    ours = [{"output_throughput": value, "mean_ttft_ms": 2.0} for value in (100.0, 90.0, 30.0)]
    theirs = [
        {"output_throughput": value, "duration": 1 / value, "mean_ttft_ms": first}
        for value, first in ((50.0, 4.0), (30.0, 8.0), (20.0, 5.0))
    ]
    versus = Versus.between("peer", ours, theirs)
    assert (versus.ratio, versus.ratio_low, versus.ratio_high) == (2.0, 1.5, 3.0)
    assert versus.ttft_ratio == 0.4
    assert versus.numbers["output_throughput"] == 30.0


def test_json_has_vllms_names_and_what_ran_beside_us(checkpoint, capsys):
    argv = ["--model", str(checkpoint), *TINY, "--peer", "generate", "--json", "--rounds", "2"]
    execute(parse_args([*argv, "--peer", "no-prefix-cache"]))
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p99"):
            assert document[f"{kind}_{name}_ms"] >= 0
    assert document["completed"] == document["num_prompts"] == 5
    tokens = document["total_output_tokens"]
    assert document["output_throughput"] == pytest.approx(tokens / document["duration"])
    assert (document["num_gc_pauses"] > 0) == (document["max_gc_pause_ms"] > 0)
    assert [peer["name"] for peer in document["peers"]] == ["generate", "no-prefix-cache"]
    assert all(p["ratio_low"] <= p["ratio"] <= p["ratio_high"] for p in document["peers"])
    assert captured.err == ""


def test_trace_and_stats_are_of_our_first_turn(checkpoint, capsys, tmp_path):
    file = tmp_path / "trace.json"
    argv = ["--model", str(checkpoint), *TINY, "--rounds", "2", "--peer", "no-prefix-cache"]
    execute(parse_args([*argv, "--json", "--stats", "--trace", str(file)]))
    document = json.loads(capsys.readouterr().out)
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "step" for event in events) == document["steps"]["num_steps"]
    assert document["steps"]["num_steps"] == document["num_steps"]
    assert document["steps"]["num_queried_tokens"] == document["total_input_tokens"]


def test_the_table_shows_the_numbers_of_the_document(checkpoint, capsys):
    execute(
        parse_args(
            ["--model", str(checkpoint), *TINY, "--workload", "shared-prefix", "--prefix-len", "9"]
        )
    )
    out = capsys.readouterr().out
    assert "shared-prefix" in out
    assert re.search(r"^requests +5 in \d+\.\d\d s, [\d,]+ in, \d+ out$", out, re.MULTILINE)
    assert re.search(r"^ttft, to first token( +[\d,]+\.\d\d){3}$", out, re.MULTILINE)
    assert re.search(r"^collector +\d+ pauses, the longest \d+\.\d ms$", out, re.MULTILINE)


def test_every_turn_begins_with_an_empty_cache_and_the_cache_is_what_it_was(checkpoint):
    argv = ["--model", str(checkpoint), *TINY, "--workload", "shared-prefix", "--rounds", "2"]
    report = measure(parse_args([*argv, "--prefix-len", "64", "--peer", "no-prefix-cache"]))
    # 4 of 5 requests find the 4 blocks that the first one computes.
    assert report.counters.num_hit_tokens == 4 * 64
    assert report.peers[0].numbers["total_output_tokens"] == report.numbers["total_output_tokens"]


def test_a_configuration_without_weights_is_enough_for_dummy_ones(folder_of, checkpoint):
    numbers = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    argv = ["--model", folder_of(**numbers), "--dummy-weights", *TINY]
    assert measure(parse_args(argv)).numbers["completed"] == 5


def test_dummy_weights_repeat(checkpoint):
    backend = ReferenceBackend()
    (dtype,) = backend.capabilities.dtypes
    first, second = (
        load(str(checkpoint), backend.device, dtype, dummy_weights=True).network.state_dict()
        for _ in range(2)
    )
    assert first.keys() == second.keys()
    assert all((value == second[name]).all() for name, value in first.items())


@given(st.lists(st.integers(0, 10**6), max_size=20))
def test_without_a_tokenizer_each_token_is_text_at_once(tokens):
    stream = TextStream(Wordless().decode)
    for token in tokens:
        stream.add(token)
        assert stream.take() == f" {token}"
    stream.close()
    assert stream.text == Wordless().decode(tokens)


def test_a_configuration_by_name_wants_dummy_weights():
    with pytest.raises(UsageError, match=r"qwen3-0\.6b is a configuration: give --dummy-weights"):
        measure(parse_args(["--model", "qwen3-0.6b", "--backend", "numba"]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rounds", "0"], "--rounds: wanted an integer of at least 1, got 0"),
        (["--max-concurrency", "0"], "--max-concurrency: wanted an integer of at least 1, got 0"),
        (["--request-rate", "0"], "--request-rate: wanted a number above 0, got 0"),
        (["--request-rate", "nan"], "--request-rate: wanted a number above 0, got nan"),
        (["--num-requests", "0"], "--num-requests: wanted an integer of at least 1, got 0"),
        (["--output-len", "5:4"], "--output-len: wanted N or LOW:HIGH .*, got '5:4'"),
        (["--input-len", "x"], "--input-len: wanted N or LOW:HIGH .*, got 'x'"),
        (["--peer", "vllm"], "--peer"),
        (["--workload", "none"], "--workload"),
        (["--workload", "waste", "--stats"], "--stats has no meaning with --workload waste"),
        (["--workload", "host", "--trace", "x"], "--trace has no meaning with --workload host"),
        (["--workload", "host", "--steps", "0"], "--steps: wanted an integer of at least 1, got 0"),
        (["--no-prefix-cache", "--peer", "no-prefix-cache"], "has no meaning with"),
    ],
)
def test_a_wrong_flag_is_one_error_that_names_it(argv, message):
    with pytest.raises((UsageError, InvalidArgumentError), match=message):
        parse_args(argv)


def test_host_work_is_every_phase_but_the_networks(capsys):
    argv = ["--workload", "host", "--num-requests", "5", "--steps", "20", "--block-size", "4"]
    report = host.measure(parse_args(argv))
    assert (report.num_running, report.num_steps) == (5, 20)
    assert list(report.phases_us) == ["schedule", "prepare", "sample", "commit"]
    assert max(report.phases_us.values()) < report.host_us < 2 * sum(report.phases_us.values())
    assert report.allocator_us > 0
    host.execute(parse_args([*argv, "--json"]))
    assert json.loads(capsys.readouterr().out)["workload"] == "host"
    assert host.table(report).splitlines()[-2].startswith("host ")


def test_one_number_is_a_length_of_its_own():
    options = parse_args(["--input-len", "64", "--output-len", "3:9"])
    assert (options.shape.input_len, options.shape.output_len) == (Span(64, 64), Span(3, 9))


def test_help_and_wrong_flags_do_not_wait_for_torch():
    for argv, code in ((["--help"], 0), (["--rounds", "none"], 2)):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "model.bench", *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        assert "torch" not in done.stderr


def test_the_collectors_pauses_are_counted_while_it_is_watched_and_not_after():
    with CollectorWatch() as watch:
        gc.collect()
        gc.collect(0)
    gc.collect()
    assert watch.num_pauses >= 2
    assert 0 < watch.longest_s < 60
    assert watch._note not in gc.callbacks
