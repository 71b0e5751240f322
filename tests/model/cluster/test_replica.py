"""One replica, without Ray: what reaches its engine, and how a process that follows it ends."""

from types import SimpleNamespace

import pytest

from model.cluster.args import parse_args
from model.errors import RankLostError

RAY = {
    "ray.serve": [],
    "ray.serve.request_router": ["PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"],
    "ray.util": ["get_current_placement_group"],
    "ray.util.scheduling_strategies": ["PlacementGroupSchedulingStrategy"],
}


@pytest.fixture
def replica(played):
    return played("model.cluster.replica", RAY)


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

    start = SimpleNamespace(make_engine=lambda *_: "engine")
    monkeypatch.setattr(replica, "import_module", lambda _: start)
    monkeypatch.setattr(replica, "AsyncEngine", Engine)
    monkeypatch.delattr(replica.Replica, "__del__")  # Ray awaits it
    replica.Replica(parse_args(["--stream-share", "0.3", "--max-waiting", "7"]))
    assert made == [("engine", 0.3, 7)]
