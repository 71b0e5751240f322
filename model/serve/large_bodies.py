"""Bodies, read in the turn of their client, large ones on another thread.

Decides: from which size a body is large, and how many lists and objects it may begin. The parser of
JSON holds the interpreter from end to end, so what it makes at once must be little.

Invariants: a large body means what it would mean on the event loop; an error of it is the same, but
for its words where it is no JSON.

Does not know: which fields there are.
"""

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope

from model.serve.bounds import Strict
from model.serve.errors import ApiError, RefusedBodyError, in_body
from model.turns import ClientGoneError, in_turn

LARGE_BYTES = 32_768
MAX_BRACKETS = 131_072
"""Of lists and objects that begin in a body, those in its texts included."""


class LargeBodyRoute(APIRoute):
    """A route whose body is read elsewhere if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request. O(1)."""
        handle = super().get_route_handler()
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        if not (isinstance(kind, type) and issubclass(kind, Strict)):
            return handle

        async def read(request: Request) -> Response:
            return await handle(_LargeRequest(request.scope, request.receive, kind))

        return read


class _LargeRequest(Request):
    """A request whose JSON is its model already, if it is large."""

    def __init__(self, scope: Scope, receive: Receive, kind: type[Strict]) -> None:
        super().__init__(scope, receive)
        self._kind = kind

    async def json(self) -> Any:  # noqa: ANN401
        """The body, read and checked.

        Raises:
            RefusedBodyError: it is no JSON, or something is wrong with it.
        """
        body = await self.body()
        try:
            if len(body) <= LARGE_BYTES:
                return await in_turn(partial(json.loads, body), is_long=False)
            return await in_turn(partial(read_body, body, self._kind))
        except (ApiError, RequestValidationError, ClientGoneError) as error:
            raise RefusedBodyError(error) from error


def read_body(body: bytes, kind: type[Strict]) -> object:
    """What a body says, checked and prepared; where it is no object, its JSON. O(body).

    Raises:
        ApiError: it is no JSON, has too much in it, or something is refused.
        RequestValidationError: a field is wrong.
    """
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_BRACKETS:
        raise ApiError(
            400,
            f"body: wanted at most {MAX_BRACKETS:,} lists and objects, got {count:,} '[' and '{{'",
        )
    try:
        data = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"body: wanted JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        return data
    try:
        made = kind.model_validate(data)
    except ValidationError as error:
        raise in_body(error) from error
    made.prepare()
    return made
