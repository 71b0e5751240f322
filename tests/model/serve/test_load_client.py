"""`python -m model bench` counts what it sends, and says what it could not."""

import json
from types import SimpleNamespace

import pytest

from model.bench import parse_args
from model.cli.benchmarks import measured, sized
from model.cli.load_client import send_load
from model.cli.measured import Report
from model.cli.options import LatencyOptions, LoadOptions, ThroughputOptions
from model.errors import UsageError


def load(served, **fields):
    sizes = {"num_prompts": 6, "input_len": 8, "output_len": 5, "max_concurrency": 3}
    return LoadOptions(base_url=served.url, **{**sizes, **fields})


@pytest.mark.parametrize("request_rate", [None, 200.0])
def test_each_request_gets_its_tokens_and_each_time_is_at_most_the_whole(served, request_rate):
    before = served.call(lambda engine: engine.stats.num_steps)
    told = send_load(load(served, request_rate=request_rate)).values
    assert (told["completed"], told["failed"]) == (6, 0)
    assert told["output_tokens_per_s"] * told["duration_s"] == pytest.approx(30)
    assert told["tokens_per_s"] * told["duration_s"] == pytest.approx(6 * 13)
    assert 0 < told["ttft_ms"]["median"] <= told["e2el_ms"]["p99"] <= 1000 * told["duration_s"]
    assert told["tpot_ms"]["mean"] * 4 <= told["e2el_ms"]["p99"]
    assert served.call(lambda engine: engine.stats.num_steps) - before >= 5


def test_what_a_server_refuses_and_a_server_that_is_not_there_are_told(served):
    with pytest.raises(UsageError, match="no request was answered: 404"):
        send_load(load(served, served_model_name="another"))
    with pytest.raises(UsageError, match="--base-url: no server lists its models there"):
        send_load(LoadOptions(base_url="http://127.0.0.1:9"))
    with pytest.raises(UsageError, match="--base-url: wanted http://HOST:PORT, got 'localhost'"):
        send_load(LoadOptions(base_url="localhost"))


def test_a_part_that_fails_is_counted_apart(served, monkeypatch):
    real, count = json.dumps, []

    def without_prompt(body):
        count.append(1)
        return real({**body, "prompt": ""} if len(count) == 2 else body)

    own = SimpleNamespace(**vars(json) | {"dumps": without_prompt})  # the server uses json too
    monkeypatch.setattr("model.cli.load_client.json", own)
    report = send_load(load(served))
    assert (report.values["completed"], report.values["failed"]) == (5, 1)
    assert any(line.startswith("failed: 400 ") for line in report.lines)


def test_an_engine_runs_all_requests_of_a_measurement(make_engine):
    engine = make_engine()
    batches = LatencyOptions(
        batch_size=3, input_len=4, output_len=6, num_iters=2, num_iters_warmup=1
    )
    assert sized(batches) == (9, 9, 9)
    told = measured(engine, batches).values
    assert engine.stats.num_steps == 3 * 6
    assert told["token_ms"]["mean"] * 6 == pytest.approx(told["latency_ms"]["mean"])
    many = ThroughputOptions(num_prompts=5, input_len=4, output_len=6)
    told = measured(engine, many).values
    assert told["tokens_per_s"] * told["duration_s"] == pytest.approx(50)
    assert engine.stats.num_steps == 3 * 6 + 6
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks


def test_a_spread_is_that_of_the_sorted_times():
    report = Report()
    report.add_times("x_ms", "x", [number / 1000 for number in range(100, 0, -1)])
    assert report.values["x_ms"] == {"mean": 50.5, "median": 50.5, "p90": 91.0, "p99": 100.0}


def test_the_command_line_names_measurements_and_its_result_is_json(forks):
    with pytest.raises(UsageError, match="measurement: wanted latency, throughput, serve, got"):
        parse_args(["fly"])
    command = ["-m", "model", "bench"]
    assert "python -m model.bench MEASUREMENT" in forks.run(*command).stdout
    sizes = ["--num-prompts", "2", "--input-len", "3", "--output-len", "2", "--json"]
    done = forks.run(*command, "throughput", *sizes)
    assert json.loads(done.stdout)["output_tokens_per_s"] > 0
