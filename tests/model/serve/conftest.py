"""One server for all tests of the package: the tiny model, on a thread, on a port of its own."""

import asyncio
import threading

import httpx
import pytest
import uvicorn

import backends
from model.async_engine import AsyncEngine
from model.control.config import EngineConfig
from model.engine import Engine
from model.load.loader import load_model
from model.serve.app import create_app
from model.serve.config import ServeConfig
from model.serve.head import BoundedProtocol
from model.serve.listener import address_of, listen
from model.serve.process import Server
from model.tiny import CHECKPOINT_DIR
from tests.hang import HANG_S as DEADLINE_S
from tests.model.serve.calls import TEMPLATE
from tests.model.serve.vllm_lacks import reason_to_skip


class Served:
    """A server on a thread."""

    def __init__(self, engine, config):
        self.engine = engine
        self.lines = []
        self.listener = listen(config)
        self.url = address_of(self.listener, config)
        self.app = create_app(engine, config, log=self.lines.append)
        self.server = Server(
            uvicorn.Config(
                self.app,
                http=BoundedProtocol,
                lifespan="on",
                ssl_certfile=config.tls_certfile,
                ssl_keyfile=config.tls_keyfile,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.loop = None
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()
        self.wait_for(lambda: self.engine.health.is_ready)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self.listener])

        asyncio.run(main())

    def run(self, coroutine):
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE_S)

    def call(self, function):
        """Run a function between two steps of the engine."""
        return self.run(self.engine.call(function))

    def num_free_blocks(self):
        return self.call(lambda engine: engine.kv.num_free_blocks)

    def wait_for(self, condition):
        """Wait until something is so, but not for long."""
        waits = threading.Event()
        for _ in range(DEADLINE_S * 200):
            if condition():
                return
            waits.wait(0.005)
        raise AssertionError("it did not come about")


class Elsewhere:
    """A server at a URL: `--base-url`. What it does inside is not seen."""

    def __init__(self, url):
        self.url = url.rstrip("/")

    def __getattr__(self, name):
        pytest.skip(f"looks inside the server ({name})")


def pytest_addoption(parser):
    parser.addoption("--base-url", help="ask the server there in place of one that is started")


def pytest_collection_modifyitems(config, items):
    if config.getoption("base_url", None) is None:
        return
    for item in items:
        if reason := reason_to_skip(item.name, item.path.stem):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def elsewhere(request):
    """The server of `--base-url`; None: tests start their own."""
    url = request.config.getoption("base_url", None)
    return url and Elsewhere(url)


@pytest.fixture(scope="session")
def tiny_model(elsewhere):
    if elsewhere:
        pytest.skip("starts a server of its own")
    return load_model(str(CHECKPOINT_DIR), backends.get_backend("numba").device)


@pytest.fixture(scope="session")
def make_engine(tiny_model):
    """Makes engines over the tiny model, small enough that blocks can run out."""

    def make(**config):
        sizes = {"num_blocks": 400, "max_num_seqs": 16, "record_lifetimes": True, **config}
        return Engine(tiny_model, backends.get_backend("numba"), EngineConfig(**sizes))

    return make


@pytest.fixture(scope="session")
def served(elsewhere, request):
    if elsewhere:
        yield elsewhere
        return
    make_engine = request.getfixturevalue("make_engine")
    config = ServeConfig(
        port=0, served_model_name="tiny", max_waiting=300, max_request_bytes=1 << 20
    )
    with Served(AsyncEngine(make_engine, max_waiting=config.max_waiting), config) as running:
        yield running


@pytest.fixture(scope="session")
def agents(elsewhere, request):
    """A server whose model has a chat template with tools."""
    if elsewhere:
        yield elsewhere
        return
    make_engine = request.getfixturevalue("make_engine")
    config = ServeConfig(port=0, served_model_name="tiny", chat_template=TEMPLATE)
    with Served(AsyncEngine(make_engine), config) as running:
        yield running


@pytest.fixture
def names(elsewhere):
    """Asserts that an error names a field; which one, other servers may leave out."""

    def check(error, param, kind="invalid_request_error"):
        assert error["message"]
        if not elsewhere:
            assert (error["param"], error["message"][: len(param)]) == (param, param)
            assert error["type"] == kind

    return check


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=DEADLINE_S) as client:
        yield client
