"""Twins in one process: what the first rank says is written down, and another one follows it."""

import contextlib
import dataclasses
import pickle

import pytest

from kvcore.tiers import DiskTier, TierInUseError
from model import EngineConfig, InvalidArgumentError, SamplingParams, StalledError, Submission
from model.control.step import Step
from model.engine import Engine, TwinEngine, engine_of
from model.errors import RanksDivergedError
from model.twins import _Aborted, _Emptied
from tests.model.networks import build
from tests.model.reference import ReferenceBackend

PROMPTS = ("a prompt of some length, ", "a prompt of some length, and more", "x")


class Tape:
    """The ranks of one process: the first one's words and tensors are kept for the second."""

    size = 2

    def __init__(self, rank, said=None):
        self.rank, self.leads = rank, rank == 0
        self.said = {"told": [], "shared": [], "all_of": []} if said is None else said
        self.places = dict.fromkeys(self.said, 0)
        self.has_let_go = False

    def all_reduce_min(self, number):
        return number

    def disarm(self):
        self.has_let_go = True

    def when_lost(self, tell):
        self.tell = tell

    def detecting_loss(self, *, or_fail=False):
        return contextlib.nullcontext()

    def next(self, kind, mine):
        """What the first one said at this place."""
        if self.leads:
            self.said[kind].append(pickle.dumps(mine))
            return mine
        self.places[kind] += 1
        return pickle.loads(self.said[kind][self.places[kind] - 1])  # noqa: S301  # our own

    def broadcast(self, message=None):
        return self.next("told", message)

    def broadcast_tensor(self, tensor):
        return self.next("shared", tensor.clone())

    def all_gather(self, content):
        return [self.next("all_of", content), content]


def twin(ranks, *, is_checked=True, **sizes):
    model = dataclasses.replace(build("qwen3", 25), ranks=ranks)
    sizes = {"num_blocks": 16, "block_size": 4, "record_events": True} | sizes
    config = EngineConfig(**sizes)
    return TwinEngine(model, ReferenceBackend(), config, is_checked=is_checked)


def state(engine):
    return engine.kv.stats(), [run.block_hashes for run in engine.kv.snapshot().stored]


def lead(tape, steps=60):
    """A life of some requests; return the engine and all its requests."""
    engine = twin(tape)
    requests = []
    sampled = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    for step in range(steps):
        if step < len(PROMPTS):
            requests += engine.submit(Submission(PROMPTS[step], SamplingParams(max_tokens=8)))
        if step == 4:
            requests += engine.submit(Submission(PROMPTS[1], dataclasses.replace(sampled, n=2)))
            assert engine.abort(requests[1])
            assert not engine.abort(requests[1])
        if step == 20:
            engine.empty_cache(enable_caching=False)
        if step == 22:
            requests += engine.submit(Submission(PROMPTS[0], SamplingParams(max_tokens=3)))
        if step == 30:
            engine.empty_cache(enable_caching=True)
        if step == 31:
            requests += engine.submit(Submission(PROMPTS[2], SamplingParams(max_tokens=3)))
        if engine.has_unfinished:
            engine.step()
    return engine, requests


def test_a_twin_takes_the_same_steps_and_holds_the_same_blocks():
    tape = Tape(0)
    engine, requests = lead(tape)
    engine.end()
    assert tape.has_let_go
    assert engine.leads
    other = twin(Tape(1, tape.said))
    assert not other.leads
    noted = []
    assert other.follow(noted.extend) is False
    assert other._ranks.has_let_go
    assert [one.output_tokens for one in noted] == [one.output_tokens for one in requests]
    assert [one.finish_reason for one in noted] == [one.finish_reason for one in requests]
    assert len(requests) == 7
    assert state(other) == state(engine)
    assert other._ranks.places == {kind: len(said) for kind, said in tape.said.items()}


def test_what_is_said_is_said_once_with_the_tokens_of_the_prompt():
    tape = Tape(0)
    engine = twin(tape)
    [request] = engine.submit(Submission("a text", SamplingParams(max_tokens=3)))
    assert tape.said["told"] == []
    engine.step()
    engine.step()
    engine.abort(request)
    engine.empty_cache(enable_caching=False)
    engine.step() if engine.has_unfinished else engine._ranks.broadcast(engine._said)
    said = [*map(pickle.loads, tape.said["told"])]
    assert said[0][0].prompt == list(request.tokens[: request.num_prompt_tokens])
    assert said[1:] == [None, [_Aborted(request.request_id), _Emptied(enable_caching=False)]]


def test_a_twin_may_be_used_again_after_an_end_that_goes_on():
    tape = Tape(0)
    engine, _ = lead(tape, steps=2)
    engine.end(goes_on=True)
    assert not tape.has_let_go
    other = twin(Tape(1, tape.said))
    assert other.follow() is True
    assert not other._ranks.has_let_go
    assert state(other) == state(engine)


def test_a_loss_is_told_to_what_serves_the_engine():
    tape, told = Tape(0), []
    twin(tape).woken_by(lambda: None, told.append)
    tape.tell("a loss")
    assert told == ["a loss"]


def test_a_twin_goes_on_where_the_first_rank_cannot():
    tape = Tape(0)
    engine = twin(tape, num_blocks=8)
    held = engine.kv.open(range(40))
    engine.kv.reserve(held, 20)
    [request] = engine.submit(Submission("a prompt of some length, ", SamplingParams(max_tokens=2)))
    with pytest.raises(StalledError):
        engine.step()
    engine.kv.close(held)
    while engine.has_unfinished:
        engine.step()
    engine.end()
    other = twin(Tape(1, tape.said), num_blocks=8)
    held = other.kv.open(range(40))
    other.kv.reserve(held, 20)
    noted = []
    first = other._step

    def freed():
        try:
            return first()
        finally:
            if held.is_open:
                other.kv.close(held)

    other._step = freed
    other.follow(noted.extend)
    assert [one.output_tokens for one in noted] == [request.output_tokens]


def test_a_twin_that_has_ended_a_request_earlier_says_so():
    tape = Tape(1, {"told": [pickle.dumps([_Aborted(7)])], "shared": [], "all_of": []})
    with pytest.raises(RanksDivergedError, match="rank 1 has finished request 7, rank 0 has not"):
        twin(tape).follow()


@pytest.mark.parametrize("is_checked", [True, False])
def test_other_blocks_are_noticed_where_ranks_are_compared(is_checked):
    tape = Tape(0)
    engine, _ = lead(tape, steps=3)
    engine.end()
    other = twin(Tape(1, tape.said), is_checked=is_checked)
    taken = other.kv.open(range(9))
    other.kv.reserve(taken, 9)
    if is_checked:
        with pytest.raises(
            RanksDivergedError, match="rank 1 and rank 0 have different block tables"
        ):
            other.follow()
    else:
        assert other.follow() is False
        assert other._ranks.places["all_of"] == 0


@pytest.mark.parametrize("what", ["tokens", "number", "ids"])
def test_ranks_are_compared_by_requests_and_tokens_and_blocks(what):
    tape = Tape(0)
    engine, requests = lead(tape, steps=2)
    engine._compare(Step(()))
    if what == "tokens":
        requests[0].running_sequence.packed[0] ^= 1
    elif what == "number":
        requests[0].request_id += 50
    else:
        requests[0].running_sequence.tables[0].block_ids[0] += 1
    engine._compare(Step(()))
    same, changed = tape.said["all_of"][-2:]
    assert same != changed


def test_a_whole_model_has_no_twin_and_an_engine_for_it_is_alone():
    model, config = build("qwen3", 25), EngineConfig(num_blocks=9, block_size=4)
    with pytest.raises(
        InvalidArgumentError, match="model: it was not loaded for tensor parallelism"
    ):
        TwinEngine(model, ReferenceBackend(), config)
    assert type(engine_of(model, ReferenceBackend(), config)) is Engine
    cut = dataclasses.replace(model, ranks=Tape(0))
    for is_checked in (False, True):
        made = engine_of(cut, ReferenceBackend(), config, checks_ranks=is_checked)
        assert type(made) is TwinEngine
        assert made._is_checked == is_checked
    assert not engine_of(cut, ReferenceBackend(), config)._is_checked


@pytest.mark.parametrize("name", ["peer", "serve_kv"])
def test_ranks_have_no_peers(name):
    address = "127.0.0.1:0"
    sizes = {"peer": (address,)} if name == "peer" else {"serve_kv": address, "disk": "kv"}
    with pytest.raises(InvalidArgumentError, match=f"^{name}: cannot be used with --tp$"):
        twin(Tape(0), **sizes)


class Crowded(Tape):
    """The second rank finds its first two folders in use."""

    num_used = 2

    def all_gather(self, content):
        if len(content) > 1:
            return super().all_gather(content)
        self.num_used -= 1
        return [content, bytes([self.num_used < 0])]


def test_ranks_of_a_replica_take_folders_of_one_number(tmp_path):
    engine = twin(Crowded(0), disk=str(tmp_path), disk_bytes=1 << 20, shares_disk=True)
    [tier] = engine.tiers.tiers.tiers
    assert tier.stats.capacity_bytes == 1 << 19
    for number, is_free in enumerate((True, True, False)):
        other = DiskTier(tmp_path / f"replica-{number}" / "rank-0", 1 << 20)
        with contextlib.nullcontext() if is_free else pytest.raises(TierInUseError):
            other.start(engine.tiers.tiers.meaning, 1 << 10)
            other.close()
    engine.end()
