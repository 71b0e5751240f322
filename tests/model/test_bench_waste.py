"""What `--workload waste` counts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import InvalidArgumentError, RequestTooLongError, SchedulerConfig
from model.bench import waste_session
from model.bench.args import parse_args
from model.bench.waste import hold, replay
from model.bench.workloads import BenchRequest, Shape, Span, make_requests
from model.errors import UsageError

LIMITS = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=100)


def request(num_tokens, max_tokens):
    return BenchRequest(tuple(range(num_tokens)), max_tokens)


def test_four_rows_of_1024_slots_with_2248_tokens_waste_45_percent_and_blocks_of_16_next_to_none():
    lengths = (1024, 640, 384, 200)
    flat, paged = hold(lengths, 1024), hold(lengths, 16)
    assert (flat.num_tokens, flat.num_slots) == (2248, 4096)
    assert (paged.num_tokens, paged.num_slots) == (2248, 2256)
    assert (round(flat.wasted, 3), round(paged.wasted, 4)) == (0.451, 0.0035)


@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), size=st.integers(1, 40))
def test_less_than_a_block_a_sequence_is_wasted(lengths, size):
    holding = hold(lengths, size)
    assert holding.num_tokens == sum(lengths)
    assert 0 <= holding.num_slots - holding.num_tokens < size * len(lengths)
    assert holding.num_slots % size == 0
    assert holding.wasted == 1 - holding.num_tokens / holding.num_slots


def test_one_request_is_counted_step_by_step():
    # Two blocks of 4 from the first step on: 5 tokens written, then 6, 7, 8; the ninth never is.
    row = replay([request(5, 4)], 4, 16, LIMITS)
    assert row.num_steps == 4
    assert row.fragmentation == (3 + 2 + 1 + 0) / (4 * 8)
    assert row.mean_occupancy == row.peak_occupancy == 8 / 16
    assert (row.mean_running, row.peak_running) == (1, 1)
    assert row.occupancy == (0.5, 0.5, 0.5, 0.5)


def test_a_chunk_that_is_planned_counts_as_written():
    row = replay([request(8, 1)], 8, 8, SchedulerConfig(max_num_batched_tokens=3))
    assert row.num_steps == 3
    assert row.fragmentation == (5 + 2 + 0) / (3 * 8)


def test_a_slot_that_two_share_is_used_once_and_idle_for_neither():
    shape = Shape(num_requests=2, input_len=Span(4, 4), output_len=Span(2, 2), prefix_len=16)
    row = replay(make_requests(shape, vocab_size=9999), 4, 400, LIMITS)
    # The first alone; then its 21st token in a sixth block, and of the second one block that is
    # its own; then the second's 21st token.
    assert row.hit_rate == 16 / 40
    assert row.peak_occupancy == (6 + 1) * 4 / 400
    assert row.fragmentation == (0 + 3 + 3) / (20 + 28 + 24)


def test_in_the_same_memory_small_blocks_run_more_requests_than_rows():
    requests = [request(length, 8) for length in (4, 9, 24, 3, 17, 11, 6, 24)]
    rows = [replay(requests, size, 2 * 32, LIMITS) for size in (1, 4, 16, 32)]
    assert rows[-1].peak_running == 2
    assert rows[0].peak_running > 2
    idle = [row.fragmentation for row in rows]
    assert idle == sorted(idle)
    assert idle[0] == 0
    assert rows[0].num_steps < rows[-1].num_steps


def test_a_request_that_no_row_holds_is_refused():
    with pytest.raises(RequestTooLongError):
        replay([request(30, 8)], 16, 32, LIMITS)


def test_the_command_prints_both_caches_and_a_row_for_each_block_size(capsys, checkpoint):
    argv = ["--workload", "waste", "--model", str(checkpoint), "--num-requests", "6"]
    argv += ["--input-len", "8:40", "--output-len", "4:24", "--block-sizes", "4,16", "--rows", "3"]
    options = parse_args(argv)
    waste_session.execute(options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["flat,", "rows", "of", "1,024", "2,248", "4,096", "1.0", "45.1%"]
    assert [line.split()[0] for line in lines[6:]] == ["4", "16", lines[-1].split()[0]]
    assert "flat" in lines[-1]
    waste_session.execute(parse_args([*argv, "--json", "--dtype", "float32"]))
    document = json.loads(capsys.readouterr().out)
    assert [row["block_size"] for row in document["rows"]][:2] == [4, 16]
    assert document["token_bytes"] == 2 * 2 * 2 * 16 * 4  # layers, pairs, heads, head_dim, float32
    assert document["rows"][2]["peak_running"] <= 3
    assert document["flat"]["num_slots"] == 4096


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lengths", "5,x"], "--lengths: wanted an integer of at least 1, got 'x'"),
        (["--lengths", "1025"], "lengths: wanted 1 to 1024, got 1025"),
        (["--lengths", "0"], "--lengths: wanted an integer of at least 1, got 0"),
        (["--rows", "0"], "--rows: wanted an integer of at least 1, got 0"),
        (["--row-slots", "0"], "--row-slots: wanted an integer of at least 1, got 0"),
        (["--block-sizes", "4,0"], "--block-sizes: wanted an integer of at least 1, got 0"),
    ],
)
def test_a_wrong_size_is_one_error_that_names_it(argv, message):
    with pytest.raises((UsageError, InvalidArgumentError), match=message):
        parse_args(["--workload", "waste", *argv])
