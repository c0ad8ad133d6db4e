"""Bodies, answers and errors of the HTTP API as JSON, and their schemas in the OpenAPI document."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from fedvit.errors import FedvitError, LinkDown, StorageFailed

log = logging.getLogger(__name__)

LONGEST_BODY = 1 << 20
"""Bytes; a configuration has a few thousand."""
BODY_S = 10.0
"""Longest time that a body may take to arrive."""
JSON = "application/json"
_STATUS = {
    "FV1306": 409, "FV1316": 404, "FV1318": 404, "FV1601": 404, "FV1610": 404, "FV1611": 409, "FV1612": 409,
    "FV1613": 409, "FV1615": 409, "FV1617": 409, "FV1618": 503, "FV1619": 503, "FV1620": 503, "FV1622": 409,
    "FV1623": 404, "FV1631": 404, "FV1641": 409, "FV1643": 409, "FV1651": 404, "FV1652": 409, "FV1811": 401,
    "FV1812": 403, "FV1813": 422, "FV1814": 429, "FV1816": 404, "FV1817": 404,
}  # fmt: skip
"""Code of an error -> status of its answer; others have that of their class."""

_COMPONENT = "#/components/schemas/{name}"

T = TypeVar("T")


class ErrorAnswer(Struct, frozen=True, kw_only=True):
    """The answer of a request that failed."""

    code: str  # `coordinator explain CODE`
    message: str


class BadRequest(FedvitError):
    """A request is malformed."""

    general_code = "FV1813"


def encode(value: Any, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def describe_error(error: FedvitError) -> Response:
    """Return the answer of a failed request."""
    status = _STATUS.get(error.code) or (503 if isinstance(error, StorageFailed | LinkDown) else 400)
    answer = encode(ErrorAnswer(code=error.code, message=str(error)), status)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer


def read_body(kind: type[T]) -> Callable[[Request], Awaitable[T]]:
    """Return a dependency that reads a bounded body of JSON. It raises BadRequest if it is not of this kind."""

    async def read(request: Request) -> T:
        content = b""

        async def receive() -> None:
            nonlocal content
            async for part in request.stream():
                content += part
                if len(content) > LONGEST_BODY:
                    raise BadRequest("FV1813", f"the body is longer than {LONGEST_BODY} bytes")

        try:
            await asyncio.wait_for(receive(), BODY_S)
            return msgspec.json.decode(content or b"{}", type=kind)
        except (TimeoutError, ClientDisconnect):
            raise BadRequest("FV1813", f"the body did not arrive within {BODY_S:.0f} s") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest("FV1813", f"body: {error}") from None

    return read


def as_json(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Response]]:
    """Encode what a handler returns, unless it is an answer already."""

    @wraps(handler)
    async def answer(*arguments: Any, **named: Any) -> Response:
        value = await handler(*arguments, **named)
        return value if isinstance(value, Response) else encode(value)

    return answer


def add_error_handlers(app: FastAPI) -> None:
    """Answer all errors with a code and a message."""

    async def answer_own(_: Request, error: Exception) -> Response:
        assert isinstance(error, FedvitError)
        return describe_error(error)

    async def answer_invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        return describe_error(BadRequest("FV1813", f"{name}: {first['msg']}"))

    async def answer_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = encode(ErrorAnswer(code="FV1813", message=str(error.detail)), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def answer_unexpected(request: Request, error: Exception) -> Response:
        log.error("request failed", exc_info=error, extra={"path": request.scope["path"]})
        return encode(ErrorAnswer(code="FV0001", message="unexpected failure; the server's log has it"), 500)

    app.add_exception_handler(FedvitError, answer_own)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer_unexpected)


def describe_content(kind: Any) -> dict[str, Any]:
    """Return the OpenAPI description of a body or an answer of this type."""
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_COMPONENT)
    return {JSON: {"schema": schema}}


def describe_failure() -> dict[str, Any]:
    """Return the OpenAPI description of the answer of a failed request."""
    return {"description": "The request failed", "content": describe_content(ErrorAnswer)}


def describe_types(kinds: list[Any]) -> dict[str, Any]:
    """Return the schemas of types by name, with those that they use."""
    _, components = msgspec.json.schema_components([ErrorAnswer, *kinds], ref_template=_COMPONENT)
    return components
