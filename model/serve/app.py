"""The application: every route over one engine.

Decides: which routes there are, and what stands before them. Here, and nowhere else, routers are
put in.

Does not know: sockets, processes, how the engine is made.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse

import kvcore
from model.async_engine import AsyncEngine, EngineState
from model.serve.about import about, status
from model.serve.adapters import adapters
from model.serve.answers import ErrorReport
from model.serve.chat import chat
from model.serve.completions import completions
from model.serve.config import ServeConfig
from model.serve.errors import handle_errors
from model.serve.gate import Gate
from model.serve.live import live
from model.serve.messages import messages
from model.serve.metrics import Metrics
from model.serve.protocol import field_names
from model.serve.responses import responses
from model.serve.service import Service
from model.turns import Turns

_DEFAULT_NAME = "model"


def create_app(
    engine: AsyncEngine,
    config: ServeConfig,
    *,
    log: Callable[[str], None] | None = None,
    has_page: bool = True,
) -> FastAPI:
    """An application that serves an engine; the engine starts with it.

    Args:
        engine: not started yet; this becomes its observer.
        config: how clients are met.
        log: takes a line of JSON for each request; None: none is made.
        has_page: whether the page of the pool is there.
    """
    service = Service(engine, config.served_model_name or (_DEFAULT_NAME,), config)
    metrics = Metrics(service.name)
    routers = [
        status(service, metrics), about(service), completions(service), chat(service),
        responses(service), messages(service), adapters(service),
    ]  # fmt: skip
    if has_page:
        routers.append(live(service, engine))
    metrics.read_from(engine)
    engine.observer = metrics

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        if engine.health.state is not EngineState.STARTING:  # else its thread ends with the process
            await engine.stop()

    app = FastAPI(
        title="kvcore",
        version=kvcore.__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,  # its page asks other servers for its scripts
        redoc_url=None,
        responses={400: {"model": ErrorReport}, 503: {"model": ErrorReport}},
    )
    app.state.metrics = metrics

    describing = asyncio.Lock()

    @app.api_route("/openapi.json", methods=["GET", "HEAD"], include_in_schema=False)
    async def described() -> JSONResponse:
        """It is long, made once, and kept: no start waits for it."""
        async with describing:
            return JSONResponse(await asyncio.to_thread(app.openapi))

    for router in routers:
        app.include_router(router)
    return meet_clients(app, config, log=log, turns=service.client_turns)


def meet_clients(
    app: FastAPI,
    config: ServeConfig,
    *,
    log: Callable[[str], None] | None = None,
    turns: Turns | None = None,
) -> FastAPI:
    """Put before an application what every request passes, and have it answer errors. O(1)."""
    handle_errors(app, field_names())
    if config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-api-key", "anthropic-version"],
        )
    app.add_middleware(Gate, config=config, log=log, turns=turns)
    return app
