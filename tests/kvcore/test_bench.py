"""The benchmarks measure what they say, peers are driven fairly, and lies are caught."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from tests.bench.allocator import command
from tests.bench.allocator.ours import our_subjects
from tests.bench.allocator.requests import decode_case, life_case, play, w5
from tests.bench.allocator.trace import ChatShape, chat_trace
from tests.bench.measure import BenchError, Case, Round, Subject, measure

ROOT = Path(__file__).parents[2]
TREE = Path(kvcore.__file__).parents[1]
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
            if len(request) % self.block_size == 0:
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
    peer = ("--peer", "tests.kvcore.test_bench:Toy")
    code, out, _ = run("allocator", "--quick", "--json", "--workload", "W3", "W8", *peer)
    assert code == 0
    report = json.loads(out)
    assert [key for key in [*report, *report["rows"][0]] if f"`{key}`" not in PAGE] == []
    ours, lists, toy = report["rows"][3:6]
    assert [row["subject"] for row in (ours, lists, toy)] == ["kvcore", "kvcore, list[int]", "toy"]
    assert ours["hit_rate"] == ours["wanted_hit_rate"] == toy["hit_rate"] == 240 / 256
    assert 0 < ours["ratios"]["toy"][1] <= ours["ratios"]["toy"][0] <= ours["ratios"]["toy"][2]
    assert {row["subject"] for row in report["rows"][6:]} == {"kvcore"}  # a toy has no events


def test_the_quick_run_says_what_is_measured_and_ends_with_a_summary():
    code, out, _ = run("allocator", "--quick", "--workload", "W1", "W14", "W15")
    assert code == 0
    assert out.startswith("date ")
    assert command.HEADINGS["W14"] in out
    assert "In short:\n  take and free a block: " in out


def test_the_page_names_the_workloads_and_every_command():
    first, *_, last = command.HEADINGS
    assert f"{first} to {last}" in PAGE
    code, out, _ = run("--help")
    assert code == 0
    commands = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert len(commands) == 12
    assert [name for name in commands if f"| `{name}` |" not in PAGE] == []


def test_another_tree_is_measured_in_turns():
    options = ("--workload", "W1", "--quick", "--json", "--processes", "2")
    code, out, errors = run("allocator", *options, "--against", str(TREE))
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
        (["allocator", "--peer", "tests.kvcore.test_bench:PAGE"], "no factory PAGE"),
        (["allocator", "--peer", "tests.kvcore.test_bench:ROOT"], "has no factory ROOT"),
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
    shape = ChatShape(20, num_open=4, max_running=4, mean_system=60, mean_message=40, mean_pause=20)
    trace = chat_trace(3, shape)
    running, latest, ended, num_given = [], {}, set(), [0] * 20
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
