"""What every request passes before its route: its name, its key, the size and pace of its body.

And what is written of it when it is answered.

Decides: who may come in without a key (who asks for health, version or metrics, and what has no
secrets: the page), and how long a client may take. A body that is too large is read to its end
where that is near, so that the client reads the answer and not a broken pipe.

Does not know: what a request asks.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.serve.config import ServeConfig
from model.serve.errors import ApiError
from model.turns import ClientGoneError, Turns, in_turn

OPEN_PATHS = frozenset({"/", "/health", "/version", "/metrics", "/favicon.ico"})
OPEN_PREFIXES = ("/page/",)
"""Paths for which no key is asked, and what such paths begin with."""

LINE_BEGINS = '{"time": "'
"""What a line of the log begins with."""

_READ_ANYWAY = 16
"""A body of up to this many times the limit is read to its end and dropped."""

_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def ids() -> Iterator[str]:
    """Names that are given out once in the world: a random beginning, and a count.

    Not `uuid4`: each would ask the system for numbers, and the interpreter is the engine's then.
    """
    return map(f"{secrets.token_hex(12)}{{:08x}}".format, itertools.count())


def given_key(headers: Headers) -> str:
    """The key that a request shows, as OpenAI's clients or Anthropic's send it; empty: none."""
    scheme, _, key = headers.get(
        "authorization", f"bearer {headers.get('x-api-key', '')}"
    ).partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def client_of(scope: Scope, headers: Headers, config: ServeConfig) -> str | None:
    """Return the client that a request is from: its key or its address; None: unknown. O(1).

    A caller can invent names and, with the 2**64 addresses of an IPv6 network, addresses too; it
    cannot invent keys.
    """
    if len(config.api_keys) > 1:  # the key itself is not passed on
        key = given_key(headers)
        return f"key {hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
    if not scope.get("client"):
        return None
    try:
        address = ipaddress.ip_address(scope["client"][0])
    except ValueError:  # of a Unix socket
        return None
    if isinstance(address, ipaddress.IPv6Address):
        whole = address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False)
        return str(whole)
    return str(address)


def _nothing() -> None:
    """Do nothing: many requests of one client come to the application one by one."""


def _stays() -> bool:
    """Return False: it is not known whether the client has left."""
    return False


class Gate:
    """An application before the application.

    Args:
        app: what comes after it.
        config: limits and keys.
        log: takes a line for each request; None: none is made.
        turns: of the clients, for what is computed beside the engine.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        log: Callable[[str], None] | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._app = app
        self._config = config
        self._log = log
        self._keys = [key.encode() for key in config.api_keys]
        self._ids = ids()
        self._turns = Turns() if turns is None else turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else next(self._ids)
        passage = _Passage(request_id, send)
        body = _Body(receive, self._config)
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, send=send)
        client = client_of(scope, headers, self._config)
        try:
            if self._is_open(scope) or self._has_key(headers):
                self._turns.work_for(client, state.get("has_left", _stays))
                with suppress(ClientGoneError):  # the application finds it, too
                    await in_turn(_nothing, is_long=False)
                await self._app(scope, body.receive, passage.send)
            else:
                refusal = ApiError(401, "Authorization: wanted Bearer and a key of this server")
                await refusal.response()(scope, receive, passage.send)
        finally:
            if self._log is not None:
                self._log(passage.line(scope))

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        is_asked_for = scope["method"] == "OPTIONS"  # CORS asks first, without a key
        return (
            not self._keys or is_asked_for or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)
        )

    def _has_key(self, headers: Headers) -> bool:
        shown = given_key(headers).encode("latin-1", "replace")
        # All keys are compared, so that the time says nothing.
        return sum([hmac.compare_digest(shown, one) for one in self._keys]) > 0 and shown != b""


class _Body:
    """The body of one request, as it comes."""

    def __init__(self, receive: Receive, config: ServeConfig) -> None:
        self._receive = receive
        self._limit = config.max_request_bytes
        self._timeout_s = config.request_timeout_s
        self._deadline_s: float | None = None
        self._size = 0
        self._is_whole = False

    async def receive(self) -> Message:
        """The next piece of it, or that the client has gone.

        Raises:
            HTTPException: it is too large, or takes too long.
        """
        if self._is_whole:
            return await self._receive()
        message = await self._next()
        if self._size > self._limit:
            await self._drop()
            raise HTTPException(
                413, f"body: wanted at most {self._limit} bytes (--max-request-bytes)"
            )
        return message

    async def _drop(self) -> None:
        while not self._is_whole and self._size <= _READ_ANYWAY * self._limit:
            await self._next()

    async def _next(self) -> Message:
        loop = asyncio.get_running_loop()
        if self._deadline_s is None:
            self._deadline_s = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"body: wanted all of it within {self._timeout_s:g} s"
            ) from None
        self._size += len(message.get("body", b""))
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message


class _Passage:
    """What becomes of one request."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._request_id = request_id
        self._send = send
        self._began_s = time.perf_counter()
        self._at = datetime.now(UTC)
        self._status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a piece of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)["X-Request-Id"] = self._request_id
        await self._send(message)

    def line(self, scope: Scope) -> str:
        """A line of JSON for the log."""
        client = scope.get("client")
        state = scope.get("state", {})
        told: dict[str, object] = {
            "time": self._at.isoformat(timespec="milliseconds"),
            "request_id": self._request_id,
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": self._status,
            "duration_ms": round((time.perf_counter() - self._began_s) * 1000, 3),
        }
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        return json.dumps(told | {name: state[name] for name in names if name in state})
