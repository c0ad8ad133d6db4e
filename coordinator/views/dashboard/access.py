"""Access to the pages: by the password, a token of the API, or the token that the dashboard made at its start.

An address of this machine is no protection: every user of the machine can open it.
"""

import asyncio
import base64
import hashlib
import re
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from coordinator.security.api_tokens import ApiUser
from coordinator.security.credentials import ApiCredentials, TooManyAttempts, Way
from coordinator.views.dashboard.frame import SESSION, templates
from fedvit.hosts import is_loopback, network_of

COOKIE = "fedvit_dashboard"
TOKEN = "token"
"""Name of the token in an address."""
SESSION_S = 12 * 3600.0
BODY_S = 10.0
"""Longest time that a form may take to arrive."""
LONGEST_FORM = 4096
MOST_SESSIONS = 100
_INLINE_SCRIPT = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # with no-referrer forms are sent without their origin
    (b"x-frame-options", b"DENY"),
]


Scope = MutableMapping[str, Any]


class PageSession(NamedTuple):
    """Somebody who has opened the pages."""

    identity: ApiUser
    ends_at: float  # monotonic

    def is_valid(self, credentials: ApiCredentials) -> bool:
        """Return whether the session has not ended, and its token was not removed."""
        return self.ends_at > time.monotonic() and credentials.are_valid(self.identity)


@dataclass
class AccessGuard:
    """An ASGI application that passes on what is allowed, pages and live connections alike."""

    app: Any
    credentials: ApiCredentials
    _sessions: dict[str, PageSession] = field(default_factory=dict)  # by token

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on if it has a session."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or self.find_session(HTTPConnection(scope)):
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        request, send = Request(scope, receive), _add_headers(send)
        if not self._is_expected(request):
            answer: Response = PlainTextResponse("This address is not served.", 403)
        elif self._is_by_address and TOKEN in request.query_params:
            answer = await self._open_by_address(request)
        elif session := self.find_session(request):
            await self.app({**scope, SESSION: session}, receive, send)
            return
        elif scope["path"] == "/login" and scope["method"] == "POST":
            answer = await self._log_in(request)
        else:
            answer = self._login_page() if scope["path"] == "/" else RedirectResponse("/", 303)
        name, policy = policy_header(bytes(answer.body))
        answer.headers.update({"cache-control": "no-store", name.decode(): policy.decode()})
        await answer(scope, receive, send)

    @property
    def _is_by_address(self) -> bool:
        """An address of this machine opens the pages, which are served under its names only."""
        return self.credentials.address_token is not None

    def find_session(self, request: HTTPConnection) -> PageSession | None:
        """Return the session of a request; None if it has none that is valid."""
        session = self._sessions.get(request.cookies.get(_cookie_name(request), ""))
        return session if session and self._is_expected(request) and session.is_valid(self.credentials) else None

    def find_identity(self, request: HTTPConnection) -> ApiUser | None:
        """Return who has the session of a request."""
        session = self.find_session(request)
        return session.identity if session else None

    def _is_expected(self, request: HTTPConnection) -> bool:
        """Refuse requests that a page of another origin made and, without a password, names of other machines."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        try:
            if origin and urlsplit(origin).netloc != host:
                return False
            return not self._is_by_address or is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:  # no address, such as "http://["
            return False

    async def _open_by_address(self, request: Request) -> Response:
        """Turn the token of an address into a session, and lead to the same address without it."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != TOKEN]
        target = f"/{quote(request.scope['path'].lstrip('/'))}{f'?{urlencode(rest)}' if rest else ''}"
        return await self._enter(request, request.query_params[TOKEN], target, "address")

    async def _log_in(self, request: Request) -> Response:
        try:
            form = await asyncio.wait_for(_read_form(request), BODY_S)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("The form did not arrive.", 408)
        return await self._enter(request, parse_qs(form).get("password", [""])[0], "/", "form")

    async def _enter(self, request: Request, secret: str, target: str, way: Way) -> Response:
        """Begin a session if the secret is right. Only attempts from the same address wait for each other."""
        try:
            client = network_of(request.client.host if request.client else None)
            identity = await self.credentials.check(secret, client, way)
        except TooManyAttempts as error:
            return PlainTextResponse(f"{str(error).capitalize()}.", 429)
        if identity is None:
            return self._login_page(wrong=True)
        answer = RedirectResponse(target, 303)
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(
            _cookie_name(request), self._begin_session(identity), max_age=int(SESSION_S), httponly=True,
            samesite="strict", secure=secure,
        )  # fmt: skip
        return answer

    def _login_page(self, *, wrong: bool = False) -> Response:
        name = TOKEN if self._is_by_address else "password"
        page = templates().get_template("login.html").render(wrong=wrong, name=name)
        return HTMLResponse(page, 403 if wrong else 200)

    def _begin_session(self, identity: ApiUser) -> str:
        """Begin a session; return its token."""
        token = secrets.token_urlsafe(32)
        valid = [(name, session) for name, session in self._sessions.items() if session.is_valid(self.credentials)]
        begun = PageSession(identity, time.monotonic() + SESSION_S)
        self._sessions = dict([*valid[1 - MOST_SESSIONS :], (token, begun)])
        return token


@dataclass
class ContentPolicy:
    """An ASGI application that adds a Content-Security-Policy to the pages of another one."""

    app: Any

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Hold a page back until it is whole, since the policy lists its scripts."""
        start: dict[str, Any] = {}
        body = bytearray()

        async def send_on(message: dict[str, Any]) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"")
                if kind.startswith(b"text/html"):
                    start = message
                    return
            elif start and message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if message.get("more_body", False):
                    return
                await send({**start, "headers": [*start["headers"], policy_header(bytes(body))]})
                await send({"type": "http.response.body", "body": bytes(body)})
                return
            await send(message)

        await self.app(scope, receive, send_on if scope["type"] == "http" else send)


def policy_header(page: bytes) -> tuple[bytes, bytes]:
    """Return the policy of a page: of inline scripts only those run that the server wrote into it, no handlers."""
    digests = {hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(page)}
    scripts = "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in sorted(digests))
    # NiceGUI compiles templates in the browser, which needs unsafe-eval, and sets styles of elements
    return b"content-security-policy", (
        f"default-src 'self'; script-src 'self' 'unsafe-eval'{scripts}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ).encode()


def _cookie_name(request: HTTPConnection) -> str:
    """Return the name of the cookie: browsers send it to all ports, so that each dashboard needs its own."""
    return f"{COOKIE}_{request.scope['server'][1]}"


async def _read_form(request: Request) -> str:
    """Return the body of a request; "" if it is longer than any form of the dashboard."""
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > LONGEST_FORM:
            return ""
    return content.decode("utf-8", "replace")


def _add_headers(send: Any) -> Any:
    """Add the headers that every answer has."""

    async def send_on(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return send_on
