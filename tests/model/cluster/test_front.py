"""The face beside replicas that are lost and clients that go away, without Ray: handles are played.

So are its errors, whether or not it is installed.
"""

import asyncio
import contextlib
import copy
from types import SimpleNamespace

import pytest

from model.async_engine import EngineState
from model.cluster.config import ClusterConfig
from model.cluster.sent import Facts, Piece, Taken
from model.control.request import FinishReason
from model.control.submission import Submission
from model.errors import GrammarError
from model.serve.errors import api_error
from model.token_stream import Delta

DEADLINE_S = 30
ASKED = Submission([1, 2, 3])


@pytest.fixture
def front(played, monkeypatch):
    found = played(
        "model.cluster.front",
        {
            "ray.exceptions": ["RayError"],
            "ray.serve": [],
            "ray.serve.exceptions": ["RayServeException"],
        },
    )
    monkeypatch.setattr(found, "_PAUSE_S", 0)
    return found


class Answer:
    """What a replica sends: messages, errors, or WAIT for a time without end."""

    WAIT = object()

    def __init__(self, script, cancelled):
        self._script = list(script)
        self._cancelled = cancelled
        self._is_over = asyncio.Event()

    @property
    def is_called_back(self):
        return self._is_over.is_set()

    def cancel(self):
        self._is_over.set()

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._script:
            raise StopAsyncIteration
        step = self._script.pop(0)
        if step is self.WAIT:
            await self._is_over.wait()
            raise self._cancelled
        if isinstance(step, Exception):
            raise step
        return step


class Handle:
    """Replicas: each request gets the next script, each question for facts the next error."""

    def __init__(self, front, scripts=(), errors=()):
        self._scripts, self._errors = list(scripts), list(errors)
        self._cancelled = front.RayServeException("cancelled")
        self.answers = []
        self.num_asked = 0
        self.was_sent_again = asyncio.Event()

    def options(self, method_name, **_):
        return SimpleNamespace(remote=self._tell if method_name == "facts" else self._generate)

    async def _tell(self):
        self.num_asked += 1
        if self._errors:
            raise self._errors.pop(0)
        return Facts(100, 100, 16, 8)

    def _generate(self, _):
        self.answers.append(Answer(self._scripts.pop(0), self._cancelled))
        if len(self.answers) > 1:
            self.was_sent_again.set()
        return self.answers[-1]


def run(front, handle, then):
    async def main():
        async with asyncio.timeout(DEADLINE_S):
            codec = SimpleNamespace(encode=list)
            engine = front.ReplicatedEngine(handle, lambda: codec, ClusterConfig())
            with contextlib.suppress(Exception):  # what it says then is tested
                await engine.ready()
            await then(engine)
            await engine.stop()

    asyncio.run(main())


def test_the_error_of_a_requests_grammar_comes_through_as_what_it_is(front):
    error = GrammarError("grammar: wanted at most 0.1 s")
    piece = Piece(Delta(0, "", (), FinishReason.ERROR, error), 0)
    handle = Handle(front, scripts=[[Taken(), copy.deepcopy(piece)]])

    async def then(engine):
        async with await engine.submit(ASKED) as stream:
            [delta] = await stream.whole()
        assert (delta.finish_reason, str(delta.error)) == (FinishReason.ERROR, str(error))
        assert type(delta.error) is GrammarError
        assert api_error(delta.error, {"grammar": "guided_json"}).param == "guided_json"

    run(front, handle, then)


def test_what_there_is_to_know_is_asked_again_where_a_replica_is_lost(front):
    handle = Handle(front, errors=[front.RayError("gone"), ConnectionError("gone")])

    async def then(engine):
        assert engine.health.state is EngineState.READY
        assert handle.num_asked == 3

    run(front, handle, then)


@pytest.mark.parametrize("kind", ["lost", "other"])
def test_a_face_that_cannot_learn_says_so(front, kind):
    errors = [front.RayError("gone")] * 20 if kind == "lost" else [ValueError("no such file")]

    async def then(engine):
        assert engine.health.state is EngineState.STOPPED
        assert str(errors[-1]) in engine.health.last_fault
        with pytest.raises(type(errors[-1])):
            await engine.ready()

    run(front, Handle(front, errors=errors), then)


def test_who_goes_away_while_it_is_sent_again_is_not_sent_once_more(front):
    lost = [Taken(), front.RayError("gone")]
    handle = Handle(front, [lost, [Answer.WAIT], [Answer.WAIT]])

    async def then(engine):
        stream = await engine.submit(ASKED)
        await handle.was_sent_again.wait()
        stream.close()
        await asyncio.gather(*engine._tasks)
        assert len(handle.answers) == 2
        assert handle.answers[1].is_called_back

    run(front, handle, then)


def test_a_wait_that_is_cancelled_as_the_request_is_taken_leaves_nothing(front, monkeypatch):
    handle = Handle(front, [[Taken(), Answer.WAIT]])
    begin = front._Call.begin

    async def then(engine):
        async def goes_at_once(call):
            await begin(call)
            asyncio.get_running_loop().call_soon(waiting.cancel)

        monkeypatch.setattr(front._Call, "begin", goes_at_once)
        waiting = asyncio.create_task(engine.submit(ASKED))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert handle.answers[0].is_called_back
        assert not engine._open

    run(front, handle, then)
