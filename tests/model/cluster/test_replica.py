"""One replica, without Ray: its answers, and how a process that follows it ends."""

import asyncio
import copy
import json
from types import SimpleNamespace

import pytest
import torch

from model import LLM
from model.async_engine import AsyncEngine
from model.cluster.args import parse_args
from model.cluster.forwarded import FIRST_TOKEN, TAKEN, AdapterTable, Forwarded
from model.errors import RankLostError
from model.forward.lora import read_versions
from model.load.loader import load_model
from model.serve.app import create_app
from model.tiny import CHECKPOINT_DIR
from tests.hang import HANG_S as DEADLINE_S

RAY = {
    "ray.serve": [],
    "ray.serve.request_router": ["PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"],
    "ray.util": ["get_current_placement_group"],
    "ray.util.scheduling_strategies": ["PlacementGroupSchedulingStrategy"],
}


@pytest.fixture
def replica(played, monkeypatch):
    made = played("model.cluster.replica", RAY)
    monkeypatch.delattr(made.Replica, "__del__")  # Ray awaits it
    return made


class GoneError(BaseException):
    """The process has ended."""


@pytest.mark.parametrize("error", [RankLostError("a rank is gone"), KeyboardInterrupt()])
def test_a_process_that_follows_ends_by_whatever_goes_wrong(replica, monkeypatch, capsys, error):
    def follow(*_):
        raise error

    def leave(code):
        raise GoneError(code)

    monkeypatch.setattr(replica, "import_module", lambda _: SimpleNamespace(follow=follow))
    monkeypatch.setattr(replica.os, "_exit", leave)
    with pytest.raises(GoneError, match="3"):
        replica._Follower(parse_args([]), {}).follow()
    assert type(error).__name__ in capsys.readouterr().err


def test_a_process_that_follows_to_the_end_does_not_end_itself(replica, monkeypatch):
    given = []

    def follow(model, engine):
        given.append((model.check_ranks, engine.num_blocks))
        return 0

    monkeypatch.setattr(replica, "import_module", lambda _: SimpleNamespace(follow=follow))
    options = parse_args(["--tp", "2", "--check-ranks", "--num-blocks", "40"])
    assert replica._Follower(options, {}).follow() == 0
    assert given == [(True, 40)]


def test_how_clients_are_met_reaches_each_replicas_engine(replica, monkeypatch):
    made = []

    class Engine:
        def __init__(self, engine, *, stream_share, max_waiting, announce):
            del announce
            made.append((engine, stream_share, max_waiting))

    core = object()
    start = SimpleNamespace(make_engine=lambda *_, **how: made.append(how) or core)
    monkeypatch.setattr(replica, "import_module", lambda _: start)
    monkeypatch.setattr(replica, "AsyncEngine", Engine)
    monkeypatch.setattr(replica, "create_app", lambda *_, **__: None)
    flags = (
        "--stream-share 0.3 --max-waiting 7 --generation-config vllm"  # no model's file is read,
    )
    flags += " --chat-template {{messages}}"  # nor its template
    replica.Replica(parse_args(flags.split()))
    assert made == [{"expects_grammars": True}, (core, 0.3, 7)]


@pytest.fixture
def asked_of(replica):
    """Run requests on a replica; each gives what the replica yields for it."""

    def run(then, **sizes):
        sizes = {"num_blocks": 400, "max_num_seqs": 16} | sizes

        def make():
            return LLM(CHECKPOINT_DIR, backend="numba", **sizes).engine

        async def main():
            async with asyncio.timeout(DEADLINE_S), AsyncEngine(make) as engine:
                made = replica.Replica.__new__(replica.Replica)
                made._engine = engine
                made._following, made._followed_ns = asyncio.Lock(), 0
                made._app = create_app(engine, parse_args([]).serve, has_page=False)

                def answer(path="/v1/completions", table=None, **asked):
                    body = json.dumps(asked).encode()
                    length = str(len(body)).encode()
                    scope = {
                        "type": "http", "method": "POST" if asked else "GET", "path": path,
                        "query_string": b"", "headers": [(b"content-type", b"application/json"),
                                                         (b"content-length", length)],
                    }  # fmt: skip
                    return made.answer(Forwarded(scope, body, table=table))

                await then(answer, engine)

        asyncio.run(main())

    return run


def test_an_answer_is_the_servers_own_behind_the_news_of_its_first_token(asked_of):
    async def then(answer, _):
        news = [each async for each in answer(prompt="A tuple is", max_tokens=4, temperature=0)]
        assert news[:2] == [TAKEN, FIRST_TOKEN]
        [piece] = news[2:]
        assert piece.start[0] == 200
        assert piece.is_last
        assert json.loads(piece.body)["usage"]["completion_tokens"] == 4

    asked_of(then)


def test_a_stream_starts_with_its_first_token_and_ends_once(asked_of):
    async def then(answer, _):
        news = answer(prompt=[5, 6], max_tokens=40, stream=True, ignore_eos=True)
        taken, *pieces = [each async for each in news]
        assert taken == TAKEN
        assert [piece.start is not None for piece in pieces] == [True] + [False] * len(pieces[1:])
        assert pieces[0].body.startswith(b"data: {")
        assert [piece.is_last for piece in pieces] == [False] * len(pieces[1:]) + [True]
        assert pieces[-1].body.endswith(b"data: [DONE]\n\n")

    asked_of(then)


def test_a_refusal_and_a_page_that_is_not_there_are_answers_too(asked_of):
    async def then(answer, _):
        _, refused = [each async for each in answer(prompt="x", max_tokens=100_000, stream=True)]
        assert (refused.start[0], refused.is_last) == (400, True)
        _, missing = [each async for each in answer(path="/")]
        assert (missing.start[0], missing.is_last) == (404, True)

    asked_of(then)


@pytest.mark.parametrize("streams", [True, False])
def test_a_request_is_aborted_when_its_answer_is_cancelled(asked_of, streams):
    async def then(answer, engine):
        news = answer(prompt=[5], max_tokens=100, stream=streams, ignore_eos=True)
        assert [await anext(news), await anext(news)][0] == TAKEN
        assert engine.num_open == 1
        await news.aclose()
        assert await engine.drain(DEADLINE_S) == 0
        kv = engine.engine.kv
        assert kv.num_free_blocks == kv.num_usable_blocks

    asked_of(then)


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_a_replica_has_the_adapters_that_the_ingress_knew_last(asked_of, tmp_path, caplog):
    peft = pytest.importorskip("peft")
    network = load_model(str(CHECKPOINT_DIR), torch.device("cpu")).network
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    for name in ("one", "two"):
        peft.get_peft_model(copy.deepcopy(network), config).save_pretrained(tmp_path / name)

    async def then(answer, engine):
        async def status(model, *table):
            asked = {"model": model, "prompt": [5, 6], "max_tokens": 1}
            told = AdapterTable(*table) if table else None
            *_, piece = [each async for each in answer(table=told, **asked)]
            return piece.start[0]

        def at(name):
            place = str(tmp_path / name)
            return place, read_versions([f"a={place}"]).get("a")

        one, two, nowhere = map(at, ("one", "two", "nowhere"))
        assert await status("a") == 404
        assert await status("a", 10, {"a": one}) == 200
        assert engine.engine.adapter_versions == {"a": one[1]}
        assert await status("a", 20, {"a": two, "b": one}) == 200  # loaded again, with others
        assert engine.engine.adapter_versions == {"a": two[1], "b": one[1]}
        assert await status("b", 15, {}) == 200  # an older one changes nothing
        assert await status("a", 30, {"b": one}) == 404
        assert await status("b", 40, {"b": one, "c": nowhere}) == 200
        assert await status("c", 40, {"b": one, "c": nowhere}) == 404
        said = [one for one in caplog.records if one.name.startswith("model.")]
        assert len(said) == 2  # it is tried again
        assert await status("b", 50, {}) == 404

    asked_of(then, max_loras=2)
