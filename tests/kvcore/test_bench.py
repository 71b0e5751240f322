"""The benchmark: its workloads are what they say, a peer is driven fairly, and lies are caught."""

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore
from kvcore.bench import PeerError
from kvcore.bench.__main__ import main
from kvcore.bench.engines import w7, w8, w9, w11
from kvcore.bench.measure import Case, Round, Run, measure
from kvcore.bench.mixed import w12
from kvcore.bench.ours import OurCache, OurPeer, our_subjects
from kvcore.bench.peer import WORKLOADS, load_peer, subject_of
from kvcore.bench.pools import w1, w2, w6
from kvcore.bench.prompts import VOCABULARY, random_tokens, seeded, shared_prompts
from kvcore.bench.requests import decode_case, life_case, play, w5
from kvcore.bench.tail import w10
from kvcore.bench.trace import ChatShape, chat_trace

SMALL_CHAT = ChatShape(num_requests=40, num_open=8, max_running=4)


class ToyCache:
    """An endless cache of whole blocks, by exact prefixes; counts the calls it is given."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.prefixes = {}  # (the prefix before, a block): the prefix
        self.hits = 0
        self.calls = {"start": 0, "decode": 0, "finish": 0}

    def walk(self, tokens, *, publish):
        """Return how many tokens are known; make the rest known, or stop before the last."""
        prefix = known = 0
        stop = len(tokens) + publish
        for end in range(self.block_size, stop, self.block_size):
            edge = (prefix, tuple(tokens[end - self.block_size : end]))
            if edge not in self.prefixes:
                if not publish:
                    break
                self.prefixes[edge] = len(self.prefixes) + 1
            prefix = self.prefixes[edge]
            known = end
        return known

    def start(self, tokens):
        assert isinstance(tokens, list)
        self.calls["start"] += 1
        self.hits += self.walk(tokens, publish=False)
        self.walk(tokens, publish=True)
        return [list(tokens)]

    def decode(self, requests, tokens):
        self.calls["decode"] += 1
        for request, token in zip(requests, tokens, strict=True):
            request[0].append(token)
            if len(request[0]) % self.block_size == 0:
                self.walk(request[0], publish=True)

    def finish(self, request):
        self.calls["finish"] += 1

    def num_hit_tokens(self):
        return self.hits


class Toy:
    name = "toy"
    tokens = "list"
    workloads = frozenset({"W3", "W4", "W5"})
    cache = ToyCache

    def __init__(self):
        self.made = []

    def make_cache(self, num_blocks, block_size):
        self.made.append(self.cache(block_size))
        return self.made[-1]


class Liar(Toy):
    """Says that every token hits."""

    class cache(ToyCache):  # noqa: N801
        def start(self, tokens):
            request = super().start(tokens)
            self.hits += len(tokens)
            return request


class Misser(Toy):
    """Never finds anything."""

    class cache(ToyCache):  # noqa: N801
        def num_hit_tokens(self):
            return 0


class Handless(Toy):
    class cache(ToyCache):  # noqa: N801
        decode = None


def toy_subjects(peer):
    return [*our_subjects(), subject_of(peer, "here")]


@pytest.fixture
def toys(monkeypatch):
    module = types.ModuleType("toys")
    module.Toy, module.Liar, module.Misser, module.Handless = Toy, Liar, Misser, Handless
    module.number = 3
    module.Nameless = type("Nameless", (), {"tokens": "list", "workloads": frozenset()})
    monkeypatch.setitem(sys.modules, "toys", module)


# The command.


def test_the_quick_run_prints_json_with_every_documented_key(capsys, toys):
    assert main(["--quick", "--json", "--peer", "toys:Toy", "--workload", "W1", "W4", "W5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"kvcore", "build", "python", "cpus", "quick", "rows"}
    assert report["kvcore"] == kvcore.__version__
    assert report["build"] in {"python", "compiled"}
    assert report["quick"] is True
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "how-to" / "benchmark.md").read_text(encoding="utf-8")
    assert [key for key in [*report, *report["rows"][0]] if f"`{key}`" not in page] == []
    for row in report["rows"]:
        assert set(row) == {
            "workload", "case", "unit", "subject", "tokens", "cost", "hit_rate",
            "wanted_hit_rate", "speedup",
        }  # fmt: skip
        for spread in [row["cost"], *row["speedup"].values()]:
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    ours = [row for row in report["rows"] if row["subject"] == "kvcore"]
    assert {row["workload"] for row in ours} == {"W1", "W4", "W5"}
    assert [set(row["speedup"]) for row in ours] == [set(), {"toy"}, {"toy"}, {"toy"}]
    assert all(row["hit_rate"] == row["wanted_hit_rate"] == 1 for row in ours[1:3])


def test_the_table_has_a_line_for_each_subject_of_each_case(capsys):
    assert main(["--quick", "--workload", "W2", "W6"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line[:3].strip() for line in lines] == ["W2"] * 3 + ["W6"] * 4
    assert all("kvcore" in line for line in lines)


def test_the_profile_times_every_verb_and_names_functions(capsys):
    assert main(["--quick", "--profile"]) == 0
    out = capsys.readouterr().out
    assert "reserve_step" in out
    header = next(line for line in out.splitlines() if line.startswith("case"))
    assert header.split()[1:] == ["pack", "open", "reserve", "commit", "close", "life", "collector"]
    assert sum(line.startswith("256 tokens") for line in out.splitlines()) == 3
    assert out.count("functions by own time") == 3


def test_an_unknown_workload_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--workload", "W99"])
    assert "W99" in capsys.readouterr().err


# Peers.


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("toys", "wanted MODULE:FACTORY, got 'toys'"),
        ("no_such_module:Peer", "cannot import no_such_module"),
        ("toys:Peer", "toys has no factory Peer"),
        ("toys:number", "toys has no factory number"),
        ("toys:Nameless", "a peer has an attribute 'name'"),
    ],
)
def test_a_peer_that_cannot_be_loaded_says_why(toys, capsys, where, message):
    with pytest.raises(PeerError, match=message):
        load_peer(where)
    assert main(["--quick", "--peer", where]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_with_a_wrong_attribute_is_refused():
    peer = Toy()
    peer.tokens = "bytes"
    with pytest.raises(PeerError, match="tokens: wanted 'packed' or 'list', got 'bytes'"):
        subject_of(peer, "toy")
    peer.tokens, peer.workloads = "list", {"W3", "W99"}
    with pytest.raises(PeerError, match=r"workloads: .* got \['W99'\]"):
        subject_of(peer, "toy")


def test_a_peer_without_a_method_that_its_workload_needs_is_an_error_that_names_it(toys, capsys):
    assert main(["--quick", "--workload", "W4", "--peer", "toys:Handless"]) == 2
    assert "need a method 'decode' of its cache" in capsys.readouterr().err
    peer = Toy()
    peer.workloads = frozenset(WORKLOADS)
    with pytest.raises(PeerError, match="W1 and W2 need a method 'make_pool' of its peer"):
        list(w1([subject_of(peer, "toy")], quick=True))


def test_a_workload_that_a_peer_lacks_is_measured_without_it():
    for case in (*w1(toy_subjects(Toy()), quick=True), *w2(toy_subjects(Toy()), quick=True)):
        assert [run.subject.label for run in case.runs] == ["kvcore"]


def test_a_peer_that_hits_what_was_never_written_is_caught(toys, capsys):
    assert main(["--quick", "--workload", "W3", "--peer", "toys:Liar"]) == 2
    assert "toy: W3, 20 tokens, 0 % shared" in capsys.readouterr().err
    (case,) = w5([subject_of(Liar(), "liar")], quick=True)
    with pytest.raises(PeerError, match="at most were there to hit"):
        measure(case)


def test_misses_are_shown_beside_the_time():
    rows = measure(life_case(toy_subjects(Misser()), 256, 50, 256, quick=True))
    assert [row.hit_rate for row in rows] == [0.5, 0.5, 0.0]
    assert {row.wanted_hit_rate for row in rows} == {0.5}


def test_every_request_that_a_peer_is_given_is_ended():
    peer = Toy()
    measure(life_case([subject_of(peer, "toy")], 256, 0, 256, quick=True))
    (case,) = w5([subject_of(peer, "toy")], quick=True)
    measure(case)
    for cache in peer.made:
        assert cache.calls["start"] == cache.calls["finish"] > 0


# Measuring.


def test_subjects_take_turns_and_ratios_are_taken_within_a_round():
    played = []
    costs = {"kvcore": iter([9.0, 1.0, 2.0, 4.0]), "toy": iter([9.0, 3.0, 8.0, 8.0])}
    ours, _, toy = toy_subjects(Toy())

    def measured(label):
        played.append(label)
        return Round(next(costs[label]))

    runs = [
        Run(ours, lambda: measured("kvcore")),
        Run(toy, lambda: measured("toy")),
    ]
    mine, theirs = measure(Case("W1", "by hand", "us", runs, num_rounds=3))
    assert played == ["kvcore", "toy", "toy", "kvcore", "kvcore", "toy", "toy", "kvcore"]
    assert (mine.cost.median, mine.cost.low, mine.cost.high) == (2.0, 1.0, 4.0)
    speedup = mine.speedup["toy"]
    assert (speedup.median, speedup.low, speedup.high) == (3.0, 2.0, 4.0)
    assert theirs.speedup == {}
    assert mine.hit_rate is None


# Workloads.


@given(
    length=st.integers(1, 100),
    percent=st.sampled_from([0, 50, 100]),
    num_rounds=st.integers(1, 3),
    per_round=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_prompts_share_exactly_their_beginning(length, percent, num_rounds, per_round, seed):
    made = [shared_prompts(seeded(seed), length, percent, num_rounds, per_round) for _ in range(2)]
    assert made[0] == made[1]
    prompts = [made[0].first, *[prompt for some in made[0].rounds for prompt in some]]
    assert len(prompts) == 1 + num_rounds * per_round
    assert {len(prompt) for prompt in prompts} == {length}
    shared = length * percent // 100
    assert len({prompt[:shared].tobytes() for prompt in prompts}) == 1
    if length - shared >= 8:
        assert len({prompt[shared : shared + 8].tobytes() for prompt in prompts}) == len(prompts)
    assert made[0].hits(16) == min(shared, length - 1) // 16 * 16


@given(seed=st.integers(0, 2**32), count=st.integers(0, 200))
def test_token_ids_are_seeded_and_below_the_vocabulary(seed, count):
    tokens = random_tokens(seeded(seed), count)
    assert tokens == random_tokens(seeded(seed), count)
    assert len(tokens) == count
    assert all(token < VOCABULARY for token in tokens)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    num_open=st.integers(1, 12),
    max_running=st.integers(1, 6),
    mean_pause=st.sampled_from([1, 20, 300]),
)
def test_a_trace_is_a_schedule_that_could_have_happened(seed, num_open, max_running, mean_pause):
    shape = replace(SMALL_CHAT, num_open=num_open, max_running=max_running, mean_pause=mean_pause)
    trace = chat_trace(seed, shape)
    assert trace == chat_trace(seed, shape)
    running, given_tokens, latest, ended = [], {}, {}, set()
    order = []
    for step in trace.steps:
        for index in step.started:
            turn = trace.turns[index]
            before = latest.get(turn.conversation)
            if before is not None:
                # No turn starts before the previous one of its conversation has ended.
                assert before in ended
                history = trace.turns[before].prompt + trace.turns[before].answer
                assert turn.prompt[: len(history)] == history
                assert len(turn.prompt) > len(history) == turn.num_shareable
            latest[turn.conversation] = index
            given_tokens[index] = []
            running.append(index)
            order.append(index)
        assert 0 < len(running) <= max_running
        assert len(step.tokens) == len(running)
        for index, token in zip(running, step.tokens, strict=True):
            given_tokens[index].append(token)
        assert step.finished == sorted(step.finished, reverse=True)
        for place in step.finished:
            ended.add(running.pop(place))
    assert running == []
    assert order == list(range(shape.num_requests))
    assert all(given_tokens[n] == turn.answer.tolist() for n, turn in enumerate(trace.turns))


def test_the_chat_trace_has_the_shape_that_is_documented():
    trace = chat_trace(5, ChatShape())
    assert len(trace.turns) == 5000
    assert trace.num_prompt_tokens / 5000 == pytest.approx(2219, rel=0.01)
    answers = sum(len(turn.answer) for turn in trace.turns)
    assert answers / 5000 == pytest.approx(138, rel=0.01)
    assert answers == sum(len(step.tokens) for step in trace.steps)
    conversations = {turn.conversation for turn in trace.turns}
    assert len(conversations) < 2500  # several turns each
    # The pool of 32,768 blocks holds whatever runs, and far from everything.
    blocks = [-(-(len(turn.prompt) + len(turn.answer)) // 16) for turn in trace.turns]
    running, most = [], 0
    for step in trace.steps:
        running += step.started
        most = max(most, sum([blocks[index] for index in running]))
        for place in step.finished:
            running.pop(place)
    assert most < 32_768 / 2
    fresh = trace.num_prompt_tokens - trace.num_shareable_tokens + answers
    assert fresh > 4 * 32_768 * 16


def test_no_cache_hits_more_of_a_trace_than_is_shareable():
    trace = chat_trace(1, replace(SMALL_CHAT, num_requests=15, num_open=3))
    toy = ToyCache(block_size=1)
    play(toy, trace, [turn.prompt.tolist() for turn in trace.turns])
    assert toy.hits == trace.num_shareable_tokens


def test_each_new_block_of_a_life_evicts_one():
    (ours, _) = our_subjects()
    made = []

    class Spy:
        name, tokens, workloads = "spy", "packed", frozenset(WORKLOADS)

        def make_cache(self, num_blocks, block_size):
            made.append(OurCache(num_blocks, block_size))
            return made[-1]

    spy = replace(ours, peer=Spy())
    case = life_case([spy], 1024, 0, 256, quick=True)
    before = made[0].manager.stats()
    case.runs[0].measure()
    after = made[0].manager.stats()
    taken = after.num_allocated_blocks - before.num_allocated_blocks
    assert taken == 8 * 64
    assert after.num_evicted_blocks - before.num_evicted_blocks == taken
    case = decode_case([spy], 32, num_rounds=1)
    before = made[1].manager.stats()
    case.runs[0].measure()
    after = made[1].manager.stats()
    # One block for each request; the probe at the end takes one more.
    assert after.num_allocated_blocks - before.num_allocated_blocks == 32 + 1
    assert after.num_evicted_blocks - before.num_evicted_blocks == 32 + 1


def test_a_pool_costs_some_bytes_a_block_and_more_when_it_is_full():
    costs = [measure(case)[0].cost.median for case in w6(our_subjects(), quick=True)]
    later, at_once, empty, full = costs
    assert 0 < later < at_once
    assert 0 < empty < full


class Watched(OurPeer):
    """kvcore, and the caches that it was asked for."""

    def __init__(self):
        super().__init__()
        self.made = []

    def make_cache(self, num_blocks, block_size, **options):
        cache = super().make_cache(num_blocks, block_size, **options)
        self.made.append((options, cache, block_size))
        return cache


def watched(cases):
    """Measure our part of some cases; return what was asked for, and the rows."""
    peer = Watched()
    subject = replace(our_subjects()[0], peer=peer)
    rows = [row for case in cases([subject], quick=True) for row in measure(case)]
    return peer.made, rows


def test_window_groups_are_groups_of_their_own():
    made, rows = watched(w7)
    assert {options["windows"] for options, *_ in made} == {(1024,), (512, 1024)}
    for options, cache, _ in made:
        assert len(cache.manager.groups) == 1 + len(options["windows"])
        assert cache.manager.stats().num_evicted_blocks > 0
    decoding = [seq for _, cache, _ in made for seq in cache.manager.sequences.values()]
    assert len(decoding) == 2 * 2 * 32  # by `decode_step`, and by `step`
    tables = [[s.block_tables for s in c.manager.sequences.values()] for _, c, _ in made]
    by_step = [bool(options.get("by_step")) for options, *_ in made]
    assert tables[by_step.index(True)] == tables[by_step.index(True) - 1]
    for seq in decoding:  # what decodes is longer than its windows: they move
        assert all(table.num_null > 0 for table in seq.tables[1:])
    assert all(row.hit_rate == row.wanted_hit_rate for row in rows)


def test_events_are_recorded_and_taken():
    made, _ = watched(w8)
    for options, cache, _ in made:
        assert options == {"events": True}
        assert cache.manager.events.number > 50
        assert cache.take_events() == ()


def test_requests_are_decoded_by_their_own_calls_and_come_out_the_same():
    made, rows = watched(w9)
    assert [row.hit_rate == row.wanted_hit_rate for row in rows] == [True, True, False, False]
    assert 0.2 < rows[3].hit_rate < rows[2].hit_rate < 1  # of a chat trace; of larger blocks
    assert rows[2].hit_rate > 0.5
    assert [size for *_, size in made][-2:] == [256, 256]
    assert all(options["by_request"] for options, *_ in made)
    (_, by_request, _), *_ = made
    step = OurCache(by_request.manager.num_blocks, 16)
    alone = OurCache(by_request.manager.num_blocks, 16, by_request=True)
    for cache in (step, alone):
        requests = [cache.start(list(range(n, n + 20))) for n in range(3)]
        for _ in range(40):
            cache.decode(requests, [1, 2, 3])
    tables = [[seq.block_table for seq in c.manager.sequences.values()] for c in (step, alone)]
    assert tables[0] == tables[1]


def test_the_slowest_calls_are_at_least_the_median_ones():
    made, rows = watched(w10)
    costs = {row.case: row.cost.median for row in rows}
    for kind in ("start", "decode", "finish"):
        assert costs[f"{kind}, median"] <= costs[f"{kind}, 99 %"] <= costs[f"{kind}, slowest"]
    for verb in ("open", "reserve", "commit", "append", "close"):
        assert 0 < costs[f"`{verb}`, median"] <= costs[f"`{verb}`, 99 %"]
        assert costs[f"`{verb}`, 99 %"] <= costs[f"`{verb}`, slowest"]
    assert sum(not options.get("prefault") for options, *_ in made) == 1  # blocks "made then"
    slide = [cache.manager for options, cache, _ in made if options.get("caching") is False]
    assert [len(manager.groups) for manager in slide] == [2, 2, 2, 2]
    assert len(slide[0].pool.empty_blocks) > slide[0].num_blocks / 2  # what an exchange might copy


def test_a_mixed_step_keeps_as_many_running_and_publishes_every_prompt():
    made, rows = watched(w12)
    assert [options for options, *_ in made] == [
        {},
        {"by_request": True},
        {"windows": (512,)},
        {"windows": (512,), "by_request": True},
    ]
    assert [row.hit_rate == row.wanted_hit_rate > 0.99 for row in rows] == [True] * 4
    for _, cache, _ in made:
        assert len(cache.manager.sequences) == 20
        assert cache.manager.stats().num_evicted_blocks > 0


def test_one_call_for_a_mixed_step_gives_what_the_calls_of_requests_give():
    prompts = [[list(range(n, n + 40 + n)), list(range(7 * n, 7 * n + 33))] for n in range(9)]
    tables = []
    for by_request in (False, True):
        cache = OurCache(400, 16, by_request=by_request)
        running = [cache.start(list(range(900, 920)))]
        cache.decode(running, [1])
        for step, new in enumerate(prompts):
            tokens = list(range(step, step + len(running)))
            if by_request:
                cache.decode(running, tokens)
                running += [cache.start(prompt) for prompt in new]
            else:
                running += cache.mixed(running, tokens, new)
        cache.decode(running, [3] * len(running))
        tables.append([(seq.num_tokens, len(seq.block_table)) for seq in running])
        written = [
            cache.manager.plan(prompt).num_cached_tokens for new in prompts for prompt in new
        ]
        tables.append(written)
    assert tables[:2] == tables[2:]
    assert all(tables[1])


def test_what_a_peer_has_no_option_for_is_measured_without_it():
    class Plain(Toy):
        workloads = frozenset({"W9", "W12"})
        options = frozenset({"by_request"})

        def make_cache(self, num_blocks, block_size, **options):
            assert set(options) <= self.options
            return super().make_cache(num_blocks, block_size)

    subjects = [our_subjects()[0], subject_of(Plain(), "here")]
    for cases, able in ((w9, [True, False, True, True]), (w12, [True, True, False, False])):
        found = [[run.subject.label for run in case.runs] for case in cases(subjects, quick=True)]
        assert found == [["kvcore", "toy"] if can else ["kvcore"] for can in able]
    Plain.options = frozenset({"wings"})
    with pytest.raises(PeerError, match=r"options: wanted some of .* got \['wings'\]"):
        subject_of(Plain(), "here")


def test_larger_blocks_are_as_large():
    made, rows = watched(w11)
    assert {size for _, _, size in made} == {16, 32, 64}
    assert all(row.hit_rate == row.wanted_hit_rate for row in rows)
    weights = [row.cost.median for row in rows if row.unit == "bytes/block"]
    assert weights[0] < weights[1]


def test_a_peer_that_promises_events_and_has_none_is_told():
    class Mute(Toy):
        workloads = frozenset({"W8"})

        def make_cache(self, num_blocks, block_size, **_):
            return ToyCache(block_size)

    with pytest.raises(PeerError, match="W8 need a method 'take_events'"):
        list(w8([subject_of(Mute(), "here")], quick=True))
