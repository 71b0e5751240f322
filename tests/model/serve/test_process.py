"""A server that ends by a signal while it loads, or by a lost rank, logs nothing of it."""

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from types import SimpleNamespace

import pytest
import uvicorn

from model.async_engine import AsyncEngine
from model.control.params import SamplingParams
from model.engine import Engine
from model.errors import ModelNotFoundError, RankLostError, UsageError
from model.serve import process
from model.serve.app import create_app
from model.serve.args import parse_args
from model.serve.config import ServeConfig
from model.serve.listener import listen
from tests.hang import HANG_S


def run(engine, monkeypatch, client=None):
    """Run a server until it ends; a client may talk to its engine, and `asked.set()` ends it."""
    config = ServeConfig(port=0)
    asked = SimpleNamespace()

    @contextlib.contextmanager
    def stopping(notify):
        asked.set = notify
        yield

    monkeypatch.setattr(process, "stopping", stopping)

    async def main():
        server = process.Server(
            uvicorn.Config(create_app(engine, config), lifespan="on", log_config=None)
        )
        with listen(config) as listener:
            task = asyncio.create_task(client(asked)) if client is not None else None
            await process._run(server, engine, config, listener)
            del task

    asyncio.run(main())


def lost():
    error = RankLostError("rank 1 of the processes that share the network is gone")
    error.was_told = True
    return error


def warnings_in(caplog):
    """The warnings and errors of a log; other tests may have turned on its usual lines."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


class StoppedWhenSeenReady(AsyncEngine):
    """Between the moment it is ready and the moment that is seen, it has ended."""

    async def ready(self):
        await super().ready()
        await self.ended()


@pytest.mark.parametrize("kind", [AsyncEngine, StoppedWhenSeenReady])
def test_a_rank_that_is_lost_in_a_step_ends_the_server(kind, make_engine, monkeypatch, caplog):
    engine = kind(make_engine)

    def step(_):
        raise lost()

    async def ask(_):
        await AsyncEngine.ready(engine)
        monkeypatch.setattr(Engine, "step", step)
        await engine.add("A tuple is", SamplingParams(max_tokens=4))

    with pytest.raises(RankLostError):
        run(engine, monkeypatch, ask)
    assert not warnings_in(caplog)


def test_a_rank_that_is_lost_when_a_signal_drains_ends_the_server_too(
    make_engine, monkeypatch, caplog
):
    engine = AsyncEngine(make_engine)

    def end(_, **__):
        raise lost()

    async def ask(asked):
        await engine.ready()
        monkeypatch.setattr(Engine, "end", end)
        asked.set()

    with pytest.raises(RankLostError):
        run(engine, monkeypatch, ask)
    assert not warnings_in(caplog)


def test_a_rank_that_is_lost_while_the_engine_is_made_ends_the_server(monkeypatch, caplog):
    def make():
        raise lost()

    with pytest.raises(RankLostError):
        run(AsyncEngine(make), monkeypatch)
    assert not warnings_in(caplog)


def test_a_signal_while_the_model_loads_ends_the_server_without_a_traceback(monkeypatch, caplog):
    loads, ended = threading.Event(), threading.Event()

    def make():
        loads.set()
        ended.wait(HANG_S)
        raise lost()

    async def ask(asked):
        await asyncio.to_thread(loads.wait)
        asked.set()

    run(AsyncEngine(make), monkeypatch, ask)
    ended.set()
    assert not warnings_in(caplog)


def test_a_broken_chat_template_is_refused_before_a_model_is_loaded():
    flags = ["--model", "/no/such/model", "--port", "0", "--chat-template", "{{ messages"]
    options, interval_s = parse_args(flags), sys.getswitchinterval()
    try:
        with (
            listen(options.serve) as listener,
            pytest.raises(UsageError, match=r"^--chat-template: the template is broken: "),
        ):
            process.serve(options, listener, threading.Event())
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


def test_what_waits_for_pytorch_goes_on_before_a_model_is_loaded():
    options = parse_args(["--model", "/no/such/model", "--port", "0"])
    has_torch, interval_s = threading.Event(), sys.getswitchinterval()
    try:
        with listen(options.serve) as listener, pytest.raises(ModelNotFoundError):
            process.serve(options, listener, has_torch)
        assert has_torch.is_set()
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)
