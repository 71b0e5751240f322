"""LoRA adapters that are loaded and unloaded while the server runs, by vLLM's paths.

An adapter is read on a thread of its own and added between two steps. Requests that are under way
when their adapter is unloaded end with it.

Does not know: what an adapter is.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from model.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from model.serve.bounds import Strict, Text
from model.serve.errors import ApiError, api_error
from model.serve.large_bodies import LargeBodyRoute
from model.serve.service import Service


@runtime_checkable
class LoadsAdapters(Protocol):
    """An engine that loads adapters, as `model.engine.Engine` does; torch is not imported here."""

    def read_adapter(self, text: str) -> Any:  # noqa: ANN401
        """Read `NAME=PATH`, on any thread."""

    def add_adapter(self, adapter: Any) -> None:  # noqa: ANN401
        """Let requests ask for it; between two steps."""

    def remove_adapter(self, name: str) -> None:
        """Take no more requests for it; between two steps."""


class LoadRequest(Strict):
    """`POST /v1/load_lora_adapter`: the folder is one that the server can read."""

    lora_name: Text
    lora_path: Text


class UnloadRequest(Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Text


def adapters(service: Service) -> APIRouter:
    """The routes. O(1)."""
    router = APIRouter(route_class=LargeBodyRoute)
    readers = ThreadPoolExecutor(1, "adapter")  # a disk may be slow

    @router.post("/v1/load_lora_adapter")
    async def load(body: LoadRequest) -> PlainTextResponse:
        """Let requests name an adapter as their model."""
        engine, name = _engine(service), body.lora_name
        if name in service.names or "=" in name:
            raise ApiError(
                400,
                f"lora_name: wanted a new name without '=', got {name!r:.100}",
                param="lora_name",
            )
        try:
            loop = asyncio.get_running_loop()
            asked = f"{name}={body.lora_path}"
            read = await loop.run_in_executor(readers, engine.read_adapter, asked)
            await service.engine.call(lambda _: engine.add_adapter(read))
        except (ModelNotFoundError, UnsupportedModelError) as error:
            status = 404 if isinstance(error, ModelNotFoundError) else 400
            raise ApiError(status, str(error), param="lora_path") from error
        except ModelError as error:
            raise api_error(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(body: UnloadRequest) -> PlainTextResponse:
        """Take no more requests for an adapter."""
        engine, name = _engine(service), body.lora_name
        try:
            await service.engine.call(lambda _: engine.remove_adapter(name))
        except ModelError as error:
            raise api_error(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router


def _engine(service: Service) -> LoadsAdapters:
    """The engine, if it takes requests and loads adapters. O(1)."""
    engine = service.serving()
    if not isinstance(engine, LoadsAdapters):
        raise ApiError(400, "lora_name: this engine loads no adapters", param="lora_name")
    return engine
