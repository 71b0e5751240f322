"""The benchmarks measure what they say, peers are driven fairly, and lies are caught."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backends
import kvcore
from tests.bench.allocator import command
from tests.bench.allocator.ours import our_subjects
from tests.bench.allocator.requests import decode_case, life_case, play, w5
from tests.bench.allocator.trace import ChatShape, chat_trace
from tests.bench.engine import paging
from tests.bench.engine.requests import SHAPES, BenchRequest, make_requests, serve, total_lengths
from tests.bench.kernels.cases import DecodeCase
from tests.bench.kernels.gpu import decode_cases
from tests.bench.measure import BenchError, Case, Round, Subject, measure

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "benchmark.md").read_text(encoding="utf-8")


class ToyCache:
    """An endless cache of whole blocks, by exact prefixes."""

    def __init__(self, num_blocks, block_size, **options):
        self.block_size = block_size
        self.prefixes = {}  # (the prefix before, a block): the prefix
        self.hits = self.num_open = 0

    def walk(self, tokens, *, publish):
        """Return how many tokens are known; make the rest known, or stop before the last."""
        prefix = known = 0
        for end in range(self.block_size, len(tokens) + publish, self.block_size):
            edge = (prefix, tuple(tokens[end - self.block_size : end]))
            if edge not in self.prefixes and not publish:
                break
            prefix = self.prefixes.setdefault(edge, len(self.prefixes) + 1)
            known = end
        return known

    def start(self, tokens):
        assert isinstance(tokens, list)
        self.num_open += 1
        self.hits += self.walk(tokens, publish=False)
        self.walk(tokens, publish=True)
        return list(tokens)

    def decode(self, requests, tokens):
        for request, token in zip(requests, tokens, strict=True):
            request.append(token)
            self.walk(request, publish=True)

    def finish(self, request):
        self.num_open -= 1

    def num_hit_tokens(self):
        return self.hits


class Toy:
    name, packed, can = "toy", False, frozenset()
    factor = 1  # what it says that it hits, over what it does

    def make_cache(self, *sizes, **options):
        self.cache = ToyCache(*sizes, **options)
        hits = self.cache.num_hit_tokens
        self.cache.num_hit_tokens = lambda: self.factor * hits()
        return self.cache


def beside(peer):
    return [*our_subjects(), Subject(peer.name, peer)]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_json_has_every_key_that_the_page_names_and_a_row_for_each_subject():
    peer = ("--peer", "tests.test_bench:Toy")
    code, out, _ = run("allocator", "--quick", "--json", "--workload", "W4", "W8", *peer)
    assert code == 0
    report = json.loads(out)
    assert [key for key in [*report, *report["rows"][0]] if f"`{key}`" not in PAGE] == []
    ours, toy = report["rows"][:2]
    assert (ours["subject"], toy["subject"]) == ("kvcore", "toy")
    assert ours["hit_rate"] == ours["wanted_hit_rate"] == 1
    assert 0 < ours["ratios"]["toy"][1] <= ours["ratios"]["toy"][0] <= ours["ratios"]["toy"][2]
    assert {row["subject"] for row in report["rows"][2:]} == {"kvcore"}  # a toy has no events


def test_the_quick_run_says_what_is_measured_and_ends_with_a_summary():
    code, out, _ = run("allocator", "--quick", "--workload", "W1", "W14", "W15")
    assert code == 0
    assert out.startswith("date ")
    assert command.HEADINGS["W14"] in out
    assert "In short:\n  take and free a block: " in out


def test_the_page_names_every_workload_and_every_command():
    assert [name for name in command.HEADINGS if name not in PAGE] == []
    code, out, _ = run("--help")
    assert code == 0
    commands = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert len(commands) == 8
    assert [name for name in commands if f"| `{name}` |" not in PAGE] == []


def test_another_tree_is_measured_in_turns():
    options = ("--workload", "W1", "--quick", "--json", "--processes", "2")
    code, out, errors = run("allocator", *options, "--against", str(ROOT))
    assert code == 0, errors
    (row,) = json.loads(out)["rows"]
    (ratio,) = row["ratios"].values()
    assert 0.01 < ratio[1] <= ratio[0] <= ratio[2] < 100
    assert [line[:6] for line in errors.splitlines()] == ["turn 1", "turn 1", "turn 2", "turn 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allocator", "--peer", "toys"], "wanted vllm or MODULE:FACTORY, got 'toys'"),
        (["allocator", "--peer", "no_such_module:Peer"], "cannot import no_such_module"),
        (["allocator", "--peer", "tests.test_bench:PAGE"], "tests.test_bench has no factory PAGE"),
        (["allocator", "--peer", "tests.test_bench:ROOT"], "has no factory ROOT"),
        (["allocator", "--against", "/"], "wanted a folder that has kvcore, got /"),
        (["allocator", "--workload", "W99"], "invalid choice: 'W99'"),
        (["allocator", "--tp", "2"], "unrecognized arguments: --tp 2"),
    ],
)
def test_what_cannot_be_measured_is_an_error_that_says_why(arguments, message):
    code, _, errors = run(*arguments)
    assert code == 2
    assert message in errors


def test_subjects_take_turns_and_ratios_are_taken_within_a_round():
    played = []
    costs = {"ours": iter([9.0, 1.0, 2.0, 4.0]), "toy": iter([9.0, 3.0, 8.0, 8.0])}

    def runs(label):
        played.append(label)
        return Round(next(costs[label]))

    both = [(Subject(name, None, name == "ours"), lambda name=name: runs(name)) for name in costs]
    ours, toy = measure(Case("W1", "by hand", both, rounds=3))
    assert played == ["ours", "toy", "toy", "ours", "ours", "toy", "toy", "ours"]
    assert ours.cost == (2.0, 1.0, 4.0)
    assert ours.ratios == {"toy": (3.0, 2.0, 4.0)}
    assert toy.ratios == {}


def test_a_peer_that_hits_what_was_never_written_is_caught_and_misses_are_shown():
    toy = Toy()
    rows = measure(life_case(beside(toy), "W3", 256, 50, 256, quick=True))
    assert {row.hit_rate for row in rows} == {0.5}
    assert toy.cache.num_open == 0
    toy.factor = 0
    rows = measure(life_case(beside(toy), "W3", 256, 50, 256, quick=True))
    assert [row.hit_rate for row in rows] == [0.5, 0.5, 0.0]
    assert {row.wanted_hit_rate for row in rows} == {0.5}
    toy.factor = 3
    for case in (life_case(beside(toy), "W3", 256, 50, 256, quick=True), *w5(beside(toy), quick=1)):
        with pytest.raises(BenchError, match=f"toy: {case.group}, .*were there to hit"):
            measure(case)


@pytest.mark.parametrize("how", ["step", "requests", "whole", "ahead"])
def test_each_new_block_evicts_one_and_every_way_to_decode_fills_the_same(how, monkeypatch):
    made = []
    ours = our_subjects()[0]
    make = ours.peer.make_cache
    monkeypatch.setattr(
        ours.peer,
        "make_cache",
        lambda *a, **o: made.append(make(*a, **o)) or made[-1],
        raising=False,
    )
    case = decode_case([ours], "W4", 32, quick=True, how=how)
    stats = made[0].manager.stats
    case.runs[0][1]()
    before = stats()
    case.runs[0][1]()
    taken = stats().num_allocated_blocks - before.num_allocated_blocks
    assert taken == 32 + 1  # one block for each request; the probe at the end takes one more
    assert stats().num_evicted_blocks - before.num_evicted_blocks >= 32


def test_a_trace_is_a_schedule_that_could_have_happened():
    trace = chat_trace(3, ChatShape(num_requests=40, num_open=8, max_running=4, mean_pause=20))
    running, latest, ended, num_given = [], {}, set(), [0] * 40
    for step in trace.steps:
        for index in step.started:
            turn = trace.turns[index]
            before = latest.get(turn.conversation)
            if before is not None:  # it has ended, and its history comes first
                assert before in ended
                history = trace.turns[before].prompt + trace.turns[before].answer
                assert turn.prompt[: len(history)] == history
                assert len(turn.prompt) > len(history) == turn.num_shareable
            latest[turn.conversation] = index
            running.append(index)
        assert 0 < len(running) <= 4
        for index, token in zip(running, step.tokens, strict=True):
            assert token == trace.turns[index].answer[num_given[index]]
            num_given[index] += 1
        for place in step.finished:
            ended.add(running.pop(place))
    assert running == []
    assert num_given == [len(turn.answer) for turn in trace.turns]
    toy = ToyCache(0, 1)
    play(toy, trace, [turn.prompt.tolist() for turn in trace.turns])
    assert toy.hits == trace.num_shareable_tokens


# Kernels and the engine.


def test_the_kernels_of_a_cpu_are_measured_beside_their_yardsticks():
    code, out, errors = run("kernels", "--backend", "numba", "--quick", "--json")
    assert code == 0, errors
    rows = json.loads(out)["rows"]
    assert [row["group"] for row in rows] == [
        "decode",
        "prefill",
        "prefill",
        "movement",
        "movement",
    ]
    assert all(row["ratios"] and row["rates"]["GB/s"] > 0 for row in rows)
    code, _, errors = run("kernels", "--backend", "numbs")
    assert (code, errors.count("\n")) == (2, 1)
    assert "did you mean 'numba'" in errors


def test_a_mixed_step_counts_each_sequence_and_lays_it_out():
    case = DecodeCase(2, 40, 4, 2, 16, others=((8, 20),), what="mixed")
    assert case.name == "mixed, 4/2 heads d16, bfloat16"
    assert case.kv_bytes == 2 * (40 + 40 + 20) * 2 * 16 * 2
    assert case.flop == 4 * (40 + 40 + 8 * 12 + 36) * 4 * 16
    query, cache, batch = case.inputs(torch.device("cpu"))
    assert batch.query_start_loc.tolist() == [0, 1, 2, 10]
    assert batch.seq_lens.tolist() == [40, 40, 20]
    blocks = sorted(batch.block_table.flatten().tolist())
    assert blocks == [0, *range(1, len(cache.k))]  # the third sequence has two of three
    assert len(query) == 10


def test_a_gpu_is_timed_on_every_family_once():
    quantised = (torch.float8_e4m3fn,)
    can = backends.Capabilities((torch.bfloat16,), 256, 64, frozenset(), quantised, None, 576)
    names = [case.name for case in decode_cases(can)]
    assert len(set(names)) == len(names)
    for what in ("decode 64 x 4096, 32/8 heads d128", "decode 64 x 4096, 16 heads over latents"):
        assert sum(name.startswith(what) for name in names) >= 1
        assert any(name.startswith(what) and name.endswith("float8_e4m3fn") for name in names)


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
        (["host"], {"engine", "kvcore"}),
        (["wire"], {"events published", "events taken", "no events", "kvcore.wire"}),
        (["start"], {"here"}),
    ],
)  # fmt: skip
def test_every_command_runs(arguments, subjects):
    code, out, errors = run(*arguments, "--quick", "--json")
    assert code == 0, errors
    assert {row["subject"] for row in json.loads(out)["rows"]} == subjects
