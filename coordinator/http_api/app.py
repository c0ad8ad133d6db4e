"""The application of the HTTP API, and the guard in front of it."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import HTTPConnection, Request

from coordinator.http_api import admin_routes, device_routes, downloads, events, model_routes, run_routes
from coordinator.http_api.answers import add_error_handlers, describe_error, describe_types
from coordinator.http_api.routes import IDENTITY, Routes
from coordinator.http_api.site import ApiSite
from coordinator.record.audit import Actor, acting_as
from coordinator.security.api_tokens import ApiUser
from coordinator.security.credentials import ApiCredentials, Forbidden
from fedvit.errors import FedvitError
from fedvit.hosts import network_of

ROOT = "/api/v1"
"""Begins the path of every endpoint."""
DOCUMENT = "/openapi.json"
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

Scope = MutableMapping[str, Any]


class Unknown(FedvitError):
    """A request has no valid token."""

    general_code = "FV1811"


def make_app(site: ApiSite) -> FastAPI:
    """Make the application with all endpoints."""
    app = FastAPI(title="fedvit", version=version("fedvit"), docs_url=None, redoc_url=None, openapi_url=None)
    app.state.site = site
    add_error_handlers(app)
    for routes in SUBJECTS:
        app.include_router(routes.router)
    return app


own_routes = Routes()


@own_routes.add("GET", DOCUMENT, "viewer")
async def describe(request: Request) -> dict[str, Any]:
    """Return the OpenAPI document."""
    app: FastAPI = request.app
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        document["servers"] = [{"url": ROOT}]
        document["components"] = {
            "schemas": describe_types([kind for routes in SUBJECTS for kind in routes.kinds]),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        }
        app.openapi_schema = document
    made: dict[str, Any] = app.openapi_schema
    return made


SUBJECTS = (
    run_routes.routes, device_routes.routes, model_routes.routes, admin_routes.routes, events.routes,
    downloads.routes, own_routes,
)  # fmt: skip


@dataclass
class ApiGuard:
    """An ASGI application that passes on requests of people and programs that it recognises.

    `find_session` returns who has a session of the dashboard, which may read.
    """

    app: Any
    credentials: ApiCredentials
    find_session: Callable[[HTTPConnection], ApiUser | None] = lambda request: None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request whose sender is unknown, or pass it on in the sender's name."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request, send = Request(scope), _add_headers(send)
        try:
            sender = await self._recognise(request)
        except FedvitError as error:
            await describe_error(error)(scope, receive, send)
            return
        address = request.client.host if request.client else ""
        path = scope["path"].removeprefix(ROOT)
        inner = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace"), IDENTITY: sender}
        with acting_as(Actor(sender.name, f"API {address}")):
            await self.app(inner, receive, send)

    async def _recognise(self, request: Request) -> ApiUser:
        """Return who sent a request. Raises Unknown, TooManyAttempts."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            address = network_of(request.client.host if request.client else None)
            if found := await self.credentials.check(token.strip(), address, "header"):
                return found
            raise Unknown("FV1811", "the token is not valid: it is wrong, has expired, or was removed")
        if (found := self.find_session(request)) is not None:
            if request.method in ("GET", "HEAD"):
                return found
            raise Forbidden("FV1812", "a session of the dashboard may only read: use a token")
        raise Unknown("FV1811", "a token is missing: send the header `Authorization: Bearer TOKEN`")


def _add_headers(send: Any) -> Any:
    async def send_on(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return send_on
