"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}`.

Decides: which status an error of the runner has, and which field of the request it names: the word
before the first colon of its message, as everywhere in the runner.

Does not know: routes.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from model.async_engine import EngineFaultError, NotServingError, QueueFullError
from model.errors import (
    GrammarError,
    InvalidArgumentError,
    ModelError,
    NumericalError,
    RequestTooLongError,
    shown,
)
from model.turns import ClientGoneError

CLIENT_GONE = 499
"""The status in the access log of an answer whose client has gone, as in nginx."""

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1
_MOST_OF_PATH = 200
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
_UNNAMED = "invalid_request_error"


class ApiError(Exception):
    """The body of an error response.

    Attributes:
        status: of HTTP.
        message: for a reader.
        param: the field of the request that is wrong, None if it is none of them.
        code: for a program.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = _CODES.get(status) if code is None else code

    @property
    def body(self) -> dict[str, object]:
        """What is sent. O(1)."""
        return {
            "type": "error",  # as Anthropic's clients read it
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _UNNAMED),
                "param": self.param,
                "code": self.code,
            },
        }

    @property
    def headers(self) -> dict[str, str]:
        """What is sent with it. O(1)."""
        if self.status in {429, 503}:
            return {"Retry-After": str(_RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return the same error with the client's names of fields. O(message).

        Args:
            names: them; what is behind the name of a field has another form there.
        """
        param, message = self.param or "", self.message
        name = names.get(param.partition(".")[0])
        if name is not None:
            message = f"{name}{message.removeprefix(param)}"
        for own, other in names.items():
            message = message.replace(own, other) if "_" in own else message
        return ApiError(self.status, message, param=name or self.param, code=self.code)

    def response(self) -> Response:
        """The whole answer. O(message)."""
        content = json.dumps(self.body)  # ASCII: no message has text that UTF-8 lacks then
        return Response(content, self.status, self.headers, media_type="application/json")


class RefusedBodyError(HTTPException):
    """A body that was refused while it was read.

    Attributes:
        error: why.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(400)
        self.error = error


def in_body(
    error: ValidationError, names: Mapping[str, str] | None = None
) -> RequestValidationError:
    """Return the same error as FastAPI raises it for a field of a body. O(its fields).

    Args:
        error: of a request.
        names: as for `ApiError.renamed`.
    """

    def place(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        name = (names or {}).get(str(loc[0])) if loc else None
        return loc if name is None else (name,)

    every = error.errors(include_url=False)
    return RequestValidationError([{**one, "loc": ("body", *place(one["loc"]))} for one in every])


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """The response to an error of the engine.

    Args:
        error: as it was raised.
        names: the request's names for what the runner calls otherwise.
    """
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, InvalidArgumentError):
        field, colon, rest = message.partition(": ")
        if not colon or " " in field:
            is_length = isinstance(error, RequestTooLongError)
            field, rest = ("prompt" if is_length else ""), message
        field = (names or {}).get(field, field)
        codes = {RequestTooLongError: "context_length_exceeded", GrammarError: "grammar_failed"}
        code = codes.get(type(error))
        told = f"{field}: {rest}" if field else rest
        return ApiError(400, told, param=field or None, code=code)
    if isinstance(error, NumericalError):
        return ApiError(500, message, code="numerical_error")
    if isinstance(error, QueueFullError):
        return ApiError(429, f"{message}; retry later", code="queue_full")
    if isinstance(error, NotServingError):
        return ApiError(503, message, code="not_serving")
    if isinstance(error, EngineFaultError):
        return ApiError(500, message, code="engine_fault")
    if isinstance(error, ClientGoneError):
        return ApiError(CLIENT_GONE, "request: its client has left", code="client_gone")
    _log.error("a request failed; this is a bug in kvcore", exc_info=error)
    return ApiError(500, "internal error of the server", code="internal_error")


def handle_errors(app: FastAPI, field_names: Iterable[str]) -> None:
    """Have an application answer every error so. O(1).

    Args:
        app: it.
        field_names: all names of fields that requests have: what else stands in the place of a
            validation error is pydantic's.
    """
    names = frozenset(field_names)

    async def of_validation(_: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        return _invalid(error.errors(), names).response()

    async def of_http(request: Request, error: Exception) -> Response:
        if isinstance(error, RefusedBodyError):
            if isinstance(error.error, RequestValidationError):
                return await of_validation(request, error.error)
            return await of_ours(request, error.error)
        if not isinstance(error, HTTPException):
            raise error
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"{request.url.path[:_MOST_OF_PATH]}: this server has no such path"
        return ApiError(error.status_code, detail).response()

    async def of_ours(_: Request, error: Exception) -> Response:
        return api_error(error).response()

    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)
    for kind in (ApiError, ModelError, ClientGoneError, Exception):
        app.add_exception_handler(kind, of_ours)


def _invalid(errors: Sequence[Mapping[str, object]], names: frozenset[str]) -> ApiError:
    """The first field that is wrong, and all that is said of it."""
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    if first["type"] == "json_invalid":
        context = first.get("ctx")
        why = context.get("error") if isinstance(context, Mapping) else ""
        return ApiError(400, f"body: wanted JSON: {why}", code="invalid_json")
    place = _place(first, names)
    for error in errors:  # a list where there may be a text too: what is wrong inside of it
        inner = _place(error, names)
        if inner.startswith(f"{place}."):
            first, place = error, inner
    if isinstance(first.get("input"), bytes):  # it was not read as JSON
        return ApiError(415, "Content-Type: wanted application/json", code="unsupported_media_type")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place}: unknown field", param=place, code="unknown_field")
    said = [str(e["msg"]) for e in errors if _place(e, names) == place]
    wanted = ", or ".join(dict.fromkeys(text[:1].lower() + text[1:] for text in said))
    got = "" if first["type"] == "missing" else f", got {_shown(first.get('input'))}"
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    if place == "body":
        return ApiError(400, f"body: {wanted}{got}", code=code)
    return ApiError(400, f"{place}: {wanted}{got}", param=place, code=code)


def _place(error: Mapping[str, object], names: frozenset[str]) -> str:
    """The field of an error, as in `messages.0.content`."""
    where = error["loc"]
    path = where[1:] if isinstance(where, tuple) else ()
    if isinstance(where, tuple) and where[0] == "path":
        return ".".join(map(str, path))
    if error["type"] == "extra_forbidden" and len(path) == 1:
        return shown(path[0]).strip("'\"")
    known = [str(part) for part in path if isinstance(part, int) or part in names]
    return ".".join(known) or "body"


def _shown(value: object) -> str:
    """A value of JSON, not written in full to be cut. O(1)."""
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)}"
        case str():
            return shown(value[:1000])
    return shown(value)
