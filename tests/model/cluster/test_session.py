"""How replicas are started and what is told where they are not; Ray is played."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from model.cli.exits import exits
from model.cluster.args import parse_args

RAY = {
    "ray.serve": ["RunTarget"],
    "ray.serve.config": ["HTTPOptions"],
    "model.cluster.app": ["app_of", "process_needs"],
    "model.cluster.replica": [],
}
TRACEBACK = "ray::Controller failed\n  File 'x', line 1\nActorDiedError: the actor died\n\n"


class Ray:
    """What a Ray of one machine does, as far as the session sees it.

    Attributes:
        proxy_after: how often its proxy does not answer before it does; None: it never does.
        fails: by the name of a call, what it raises.
        calls: their names.
    """

    def __init__(self, session, monkeypatch):
        self.proxy_after, self.fails, self.calls = 0, {}, []
        self.status = "RUNNING"
        self.message = ""
        self.num_looks = 0
        self.niceness = None
        for name in ("init", "shutdown"):
            monkeypatch.setattr(session.ray, name, self.called(name), raising=False)
        for name in ("start", "run_many", "delete", "shutdown"):
            monkeypatch.setattr(session.serve, name, self.called(f"serve.{name}"), raising=False)
        monkeypatch.setattr(session.serve, "status", self.look, raising=False)
        monkeypatch.setattr(session, "HTTPOptions", SimpleNamespace)
        monkeypatch.setattr(session.serve, "RunTarget", lambda *_, **__: None)
        monkeypatch.setattr(session, "app_of", lambda options: options)
        monkeypatch.setattr(session, "_check_resources", lambda options: None)
        monkeypatch.setattr(session, "_LOOK_S", 0.0)
        clock = iter(range(10**9))
        monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def called(self, name):
        def call(*_, **__):
            self.calls.append(name)
            if name == "init":
                self.niceness = os.environ.get("RAY_worker_niceness")  # noqa: SIM112  # Ray's name
            if name in self.fails:
                raise self.fails[name]

        return call

    def look(self):
        self.num_looks += 1
        is_there = self.proxy_after is not None and self.num_looks > self.proxy_after
        found = SimpleNamespace(status=self.status, message=self.message, deployments={})
        return SimpleNamespace(
            proxies={"node": "HEALTHY" if is_there else "STARTING"}, applications={"kvcore": found}
        )


@pytest.fixture
def session(played):
    sys.modules.pop("model.cluster.app", None)
    made = played("model.cluster.session", {**RAY, "model.cluster.replica": ["REFUSED"]})
    made.REFUSED = "refused: "
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ray(session, monkeypatch):
    for name in ("RAY_worker_niceness", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")  # so that it is undone also where it was not there
        monkeypatch.delenv(name)
    return Ray(session, monkeypatch)


@pytest.fixture
def outcome(session, capsys):
    """Starts replicas and ends them: the exit code, and the last line on stderr."""

    def run(*flags):
        asked = session.StopRequest()

        def serve():
            with session.serving(parse_args(["--port", "0", *flags]), asked) as address:
                assert address.startswith("http://")
            return 0

        with pytest.raises(SystemExit) as ending, exits():
            sys.exit(serve())
        err = capsys.readouterr().err
        assert "Traceback" not in err
        return ending.value.code, err.splitlines()[-1]

    return run


def test_a_proxy_that_is_slower_than_ray_waits_is_waited_for(ray, outcome):
    ray.proxy_after = 50
    slow = TimeoutError("HTTP proxies not available after 60s.")
    ray.fails = {"serve.start": slow, "serve.run_many": slow}
    code, line = outcome()
    assert (code, ray.num_looks) == (0, 51)
    assert "starting 2 replicas" in line
    assert ray.calls == ["init", "serve.start", "serve.run_many", "serve.delete", "shutdown"]


def test_a_proxy_that_never_answers_is_one_line_and_everything_is_stopped(ray, outcome):
    ray.proxy_after = None
    code, line = outcome("--start-timeout-s", "20")
    assert code == 3
    assert line == (
        "error: Ray Serve does not start: its proxy did not answer within 20 s (--start-timeout-s)"
    )
    assert ray.num_looks < 30
    assert ray.calls[-2:] == ["serve.delete", "shutdown"]


def test_replicas_that_load_for_long_are_waited_for_once_the_proxy_is_there(ray, outcome, session):
    ray.status = "DEPLOYING"
    look = session.serve.status

    def status():
        if ray.num_looks == 500:
            ray.status = "RUNNING"
        return look()

    session.serve.status = status
    assert outcome("--start-timeout-s", "20")[0] == 0
    assert ray.num_looks == 501


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("init", "Ray does not start on this machine: ActorDiedError: the actor died"),
        ("serve.start", "Ray Serve does not start: ActorDiedError: the actor died"),
        ("serve.run_many", "Ray Serve does not start: ActorDiedError: the actor died"),
    ],
)
def test_whatever_ray_raises_is_one_line_and_its_own_exit_code(ray, outcome, call, says):
    ray.fails = {call: RuntimeError(TRACEBACK)}
    assert outcome() == (3, f"error: {says}")


def test_replicas_that_fail_are_one_line_and_refused_input_is_bad_input(ray, outcome):
    ray.status, ray.message = "DEPLOY_FAILED", TRACEBACK
    line = "error: the replicas do not start: ActorDiedError: the actor died"
    assert outcome() == (3, line)
    ray.message = "refused: model: there is no folder './x'"
    assert outcome() == (2, "error: model: there is no folder './x'")


def test_a_cluster_of_our_own_runs_at_usual_priority_unless_the_user_has_said_otherwise(
    ray, outcome, monkeypatch
):
    outcome()
    assert ray.niceness == "0"
    monkeypatch.setenv("RAY_worker_niceness", "7")
    outcome()
    assert ray.niceness == "7"
