"""A client of the server's application, without sockets: ASGI messages over a simulated connection.

What is left out is the kernel's sockets and uvicorn; `tests/model/serve/test_process.py` runs them.
"""

import asyncio
import json
from functools import cache

from model.serve.app import create_app
from model.serve.config import ServeConfig
from tests.simulation.device import ViolationError

_SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
    "query_string": b"", "root_path": "", "client": ("client", 1), "server": ("server", 80),
    "headers": [(b"content-type", b"application/json"), (b"host", b"server")],
}  # fmt: skip


class Front:
    """Stands before an application for the engine of the run that goes on: making one is slow."""

    def __getattr__(self, name):
        return getattr(self.behind, name)


@cache
def _app(number):
    front = Front()
    config = ServeConfig(generation_config="vllm")  # the simulated model has no such file
    return front, create_app(front, config, has_page=False)


def serve(engine, number):
    """The application that serves an engine, the `number`th of a run."""
    front, app = _app(number)
    front.behind = engine
    engine.observer = front.observer
    return app


class RefusedError(Exception):
    """An answer with another status than 200, or an error within one (status None)."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body[:200]}")
        self.status, self.body = status, body


class Connection:
    """One request and its answer.

    Args:
        app: the application.
        host: its process.
        body: what is sent, as JSON.
        pause_s: how long the client takes for each piece.
    """

    def __init__(self, app, host, path, body, pause_s=0.0):
        self._host = host
        self._incoming = asyncio.Queue()
        self._outgoing = asyncio.Queue(maxsize=2)
        self._pause_s = pause_s
        raw = json.dumps(body).encode()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        scope = {**_SCOPE, "method": "POST", "path": path, "raw_path": path.encode(), "state": {}}
        self.serving = asyncio.create_task(app(scope, self._incoming.get, self._outgoing.put))

    async def pieces(self):
        """The parts of the body, as they come."""
        start = await self._next()
        if start["status"] != 200:
            raise RefusedError(start["status"], (await self._next())["body"])
        goes_on = True
        while goes_on:
            message = await self._next()
            goes_on = message.get("more_body", False)
            if self._pause_s:
                await asyncio.sleep(self._pause_s)
            yield message.get("body", b"")

    async def _next(self):
        """The next message; what the application raises without an answer is raised here."""
        getting = asyncio.ensure_future(self._outgoing.get())
        try:
            await asyncio.wait({getting, self.serving}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done() or not self._outgoing.empty():
                return await getting
            self.serving.result()
            raise RefusedError(0, b"the connection was closed without an answer")
        finally:
            getting.cancel()

    async def close(self):
        """Go away, whether all has come or not, and wait until the server has seen it.

        A process that was killed sees nothing: what it was doing is over.
        """
        self._incoming.put_nowait({"type": "http.disconnect"})
        while not self.serving.done():
            if self._host.is_killed:
                self.serving.cancel()
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            await asyncio.wait([self.serving], timeout=0.001)


async def complete(app, host, body, pause_s=0.0):
    """Ask for completions: `(number of the sample, text, finish_reason)` as they come."""
    connection = Connection(app, host, "/v1/completions", body, pause_s)
    try:
        raw = b""
        async for piece in connection.pieces():
            raw += piece
            while body["stream"] and b"\n\n" in raw:
                event, _, raw = raw.partition(b"\n\n")
                for choice in _choices(event.removeprefix(b"data: ")):
                    yield choice
        if not body["stream"]:
            for choice in _choices(raw):
                yield choice
    finally:
        await connection.close()


def _choices(raw):
    if raw == b"[DONE]":
        return
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise ViolationError(f"the server sends what is no JSON: {raw!r}") from error
    if "error" in document:
        raise RefusedError(None, raw)
    for choice in document["choices"]:
        yield choice["index"], choice["text"], choice["finish_reason"]
