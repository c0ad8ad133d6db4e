"""Registers endpoints: each has a role, and the types of its body and its answer."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar, get_type_hints

from fastapi import APIRouter, Depends
from starlette.requests import Request

from coordinator.http_api.answers import as_json, describe_content, describe_failure
from coordinator.http_api.site import ApiSite
from coordinator.security.api_tokens import ROLES, ApiUser, UserRole
from coordinator.security.credentials import Forbidden

IDENTITY = "fedvit.identity"
"""Key of a request's scope: who sent it."""

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


async def _find_site(request: Request) -> ApiSite:
    found: ApiSite = request.app.state.site
    return found


Site = Annotated[ApiSite, Depends(_find_site)]


class Routes:
    """Endpoints of one subject. There is no way to add one without a role."""

    def __init__(self) -> None:
        self.router = APIRouter()
        self.kinds: list[Any] = []  # types of bodies and answers

    def add(
        self, method: str, path: str, role: UserRole, *, answer: Any = None, media: str | None = None
    ) -> Callable[[Handler], Handler]:
        """Add a function as an endpoint for a role and those above it.

        Its parameter `body` has the type of the request's JSON, and its return type is that of the answer, unless
        `answer` names another; an endpoint that streams something else names its `media` type. The first line of the
        function's docstring describes the endpoint.
        """

        def add(handler: Handler) -> Handler:
            types = get_type_hints(handler)
            extra: dict[str, Any] = {"x-role": role, "security": [{"token": []}]}
            if body := types.get("body"):
                extra["requestBody"] = {"content": self._describe(body), "required": True}
            content = {media: {"schema": {"type": "string"}}} if media else self._describe(answer or types["return"])
            self.router.add_api_route(
                path,
                as_json(handler),
                methods=[method],
                dependencies=[Depends(_require(role))],
                summary=(handler.__doc__ or "").strip().split("\n")[0],
                description="",
                name=handler.__name__,
                operation_id=handler.__name__,
                response_model=None,
                responses={
                    200: {"description": "The answer", "content": content},
                    "default": describe_failure(),
                    422: describe_failure(),
                },
                openapi_extra=extra,
            )
            return handler

        return add

    def _describe(self, kind: Any) -> dict[str, Any]:
        self.kinds.append(kind)
        return describe_content(kind)


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
