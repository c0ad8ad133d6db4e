"""Registers endpoints: each has a role, and the types of its body and its answer."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI
from starlette.requests import Request

from coordinator.http_api.answers import Schemas, as_json
from coordinator.security.api_tokens import ROLES, ApiUser, UserRole
from coordinator.security.credentials import Forbidden

IDENTITY = "fedvit.identity"
"""Key of a request's scope: who sent it."""


class Routes:
    """The endpoints of an application. There is no way to add one without a role."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.schemas = Schemas()

    def add(
        self,
        method: str,
        path: str,
        role: UserRole,
        handler: Callable[..., Awaitable[Any]],
        answer: Any = None,
        *,
        body: Any = None,
        media: str | None = None,
    ) -> None:
        """Add an endpoint for a role and those above it.

        `answer` and `body` are the types of its JSON; an endpoint that streams something else names its `media` type.
        The first line of the handler's docstring describes it.
        """
        content = {media: {"schema": {"type": "string"}}} if media else self.schemas.add(answer)
        extra: dict[str, Any] = {"x-role": role, "security": [{"token": []}]}
        if body is not None:
            extra["requestBody"] = {"content": self.schemas.add(body), "required": True}
        error = {"description": "The request failed", "content": self.schemas.error()}
        self._app.add_api_route(
            path,
            as_json(handler),
            methods=[method],
            dependencies=[Depends(_require(role))],
            summary=(handler.__doc__ or "").strip().split("\n")[0],
            description="",
            name=handler.__name__,
            operation_id=handler.__name__,
            response_model=None,
            responses={200: {"description": "The answer", "content": content}, "default": error, 422: error},
            openapi_extra=extra,
        )


def identity_of(request: Request) -> ApiUser:
    """Return who sent a request."""
    found: ApiUser = request.scope[IDENTITY]
    return found


def _require(role: UserRole) -> Callable[[Request], Awaitable[None]]:
    """Return a dependency that raises Forbidden unless the sender has a role, or one above it."""

    async def check(request: Request) -> None:
        sender = identity_of(request)
        if not sender.may(role):
            roles = " or ".join(ROLES[ROLES.index(role) :])
            raise Forbidden("FV1812", f"{sender.name} is {sender.role}: this needs the role {roles}")

    return check
