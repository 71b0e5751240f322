"""The server as a process: its loop, its signals, its end.

Decides: that the first stop signal drains the server (no new requests, running ones may end), the
second ends the process at once, and a model that does not load ends it too.

Does not know: how requests are answered.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from model.async_engine import AsyncEngine, EngineState
from model.cli.files import OutputFile
from model.cli.imports import importing
from model.cli.progress import say
from model.cli.signals import stopping
from model.errors import RankLostError, UsageError, shown, visible
from model.host import Event, log_age, part_of_start
from model.serve.app import create_app
from model.serve.args import ServeOptions
from model.serve.config import ServeConfig
from model.serve.gate import LINE_BEGINS
from model.serve.head import BoundedProtocol
from model.serve.listener import address_of
from model.serve.reading import reading_of

if TYPE_CHECKING:
    from model.engine_core import EngineCore
    from model.serve.kv_events import Announces

_NUM_WORKERS = 2
"""Threads for texts, images and bodies; the event loop waits for each of them to let go."""

_SWITCH_S = 0.001
"""How long one of them keeps the interpreter while others want it; Python's default is 0.005."""

_LAST_BYTES_S = 2
_KEEP_ALIVE_S = 75


def serve(options: ServeOptions, listener: socket.socket, has_torch: Event) -> int:
    """Serve until a signal ends it; the exit code.

    Args:
        options: all flags.
        listener: the socket to answer on.
        has_torch: is set when PyTorch is imported.

    Raises:
        ModelError: the model or the flags cannot be served.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    log_age("Python and the server's packages")

    def make() -> "EngineCore":
        with importing(), part_of_start("imports"):  # on the engine's thread
            import_module("torch")
            has_torch.set()
            start = import_module("model.cli.start")  # and Transformers
        options.serve.check_template()  # before the weights are read
        made: EngineCore = start.make_engine(
            options.model, options.engine, say, expects_grammars=True
        )
        options.serve.sampling_defaults(made)  # refused now or never
        options.serve.check_template(made)  # likewise
        warning = reading_of(made, options.serve).warning
        if warning is not None:
            say(warning)
        return made

    engine = AsyncEngine(
        make,
        max_waiting=options.serve.max_waiting,
        stream_share=options.serve.stream_share,
        announce=_announces(options.serve),
    )
    with _access_log(options) as log:
        app = create_app(engine, options.serve, log=log)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,
            ssl_certfile=options.serve.tls_certfile,
            ssl_keyfile=options.serve.tls_keyfile,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"--tls-certfile {shown(options.serve.tls_certfile)}, "
                f"--tls-keyfile {shown(options.serve.tls_keyfile)}: {error}"
            ) from error
        server = Server(config)
        say(f"{address_of(listener, options.serve)}: loading {options.model.path}")
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(server, engine, options.serve, listener))
    return 0


def _announces(config: ServeConfig) -> "Announces | None":
    """What opens the publisher of KV events; without the flag none of its packages is loaded."""
    if config.kv_events is None:
        return None
    made: Announces = import_module("model.serve.kv_events").announces(config, config.kv_events)
    return made


class _Visible(logging.Formatter):
    """Messages and tracebacks without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class Server(uvicorn.Server):
    """A server of uvicorn that leaves signals to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone. O(1)."""
        yield


async def _run(
    server: uvicorn.Server, engine: AsyncEngine, config: ServeConfig, listener: socket.socket
) -> None:
    began_s, loop, asked = time.monotonic(), asyncio.get_running_loop(), asyncio.Event()
    sys.setswitchinterval(_SWITCH_S)
    loop.set_default_executor(ThreadPoolExecutor(_NUM_WORKERS, "work"))
    with stopping(lambda: loop.call_soon_threadsafe(asked.set)):
        engine.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await _first_of(engine.ready(), asked.wait(), serving)
            if engine.health.state is not EngineState.STARTING:
                took_s = time.monotonic() - began_s
                say(f"{address_of(listener, config)}: ready in {took_s:.1f} s")
                await _first_of(asked.wait(), serving, _rank_lost(engine))
                say(f"draining: waiting for {engine.num_open} running requests")
                num_cut = await engine.drain(config.drain_timeout_s)
                say(f"drained: {num_cut} requests were aborted")
                _check_ranks(await engine.ended())
        finally:
            server.should_exit = True
            await serving


async def _rank_lost(engine: AsyncEngine) -> None:
    """Wait until the engine has ended because another process is lost, which is raised."""
    _check_ranks(await engine.ended())
    await asyncio.Event().wait()


def _check_ranks(fault: Exception | None) -> None:
    if isinstance(fault, RankLostError):
        raise fault


async def _first_of(*works: "Awaitable[object]") -> None:
    """Wait for one of them; what it raises is raised here. Others go on only if they are tasks."""
    tasks = [asyncio.ensure_future(work) for work in works]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, work in zip(tasks, works, strict=True):
        if task is not work:
            task.cancel()
    for task in done:
        task.result()


@contextlib.contextmanager
def _access_log(options: ServeOptions) -> Iterator[Callable[[str], None] | None]:
    """What writes lines to the file of `--access-log`, behind those that it has."""
    path = options.serve.access_log
    if path is None:
        yield None
        return
    with contextlib.ExitStack() as files:
        number = 1
        if path != "-":
            file = OutputFile("--access-log", path, LINE_BEGINS)
            serve = options.serve
            file.check(
                [options.model.path, options.engine.draft_model, serve.tls_certfile,
                 serve.tls_keyfile]
            )  # fmt: skip
            number = files.enter_context(Path(path).open("ab")).fileno()
        is_full = False

        def write(line: str) -> None:
            nonlocal is_full
            try:
                os.write(number, f"{line}\n".encode())
                is_full = False
            except OSError as error:  # requests are answered nevertheless
                if not is_full:
                    say(f"--access-log: cannot write {path!r}, lines are lost: {error.strerror}")
                is_full = True

        yield write
