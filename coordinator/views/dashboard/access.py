"""Access to the pages: by the password or, without one, by the token that the dashboard made at its start.

An address of this machine is no protection: every user of the machine can open it.
"""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from coordinator.security.broker import is_loopback
from coordinator.views.dashboard.frame import templates

COOKIE = "fedvit_dashboard"
TOKEN = "token"
"""Name of the token in an address."""
SESSION_S = 12 * 3600.0
WRONG_S = 1.0
"""Time after a wrong password in which its address may make no further attempt."""
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


@dataclass
class AccessGuard:
    """An ASGI application that passes on what is allowed, pages and live connections alike."""

    app: Any
    secret: str  # the password, or the token
    by_address: bool  # the secret is a token, which an address may contain; served under names of this machine only
    _sessions: dict[str, float] = field(default_factory=dict)  # token -> monotonic end
    _busy: set[str] = field(default_factory=set)  # addresses that must wait after a wrong password

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on if it has a session."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or self._is_allowed(HTTPConnection(scope)):
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        request, send = Request(scope, receive), _add_headers(send)
        if not self._is_expected(request):
            answer: Response = PlainTextResponse("This address is not served.", 403)
        elif self.by_address and TOKEN in request.query_params:
            answer = await self._open_by_address(request)
        elif self._is_allowed(request):
            await self.app(scope, receive, send)
            return
        elif scope["path"] == "/login" and scope["method"] == "POST":
            answer = await self._log_in(request)
        else:
            answer = self._login_page() if scope["path"] == "/" else RedirectResponse("/", 303)
        name, policy = policy_header(bytes(answer.body))
        answer.headers.update({"cache-control": "no-store", name.decode(): policy.decode()})
        await answer(scope, receive, send)

    def _is_expected(self, request: HTTPConnection) -> bool:
        """Refuse requests that a page of another origin made and, without a password, names of other machines."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if origin and urlsplit(origin).netloc != host:
            return False
        return not self.by_address or is_loopback(urlsplit(f"//{host}").hostname or "")

    def _is_allowed(self, request: HTTPConnection) -> bool:
        token = request.cookies.get(_cookie_name(request), "")
        return self._is_expected(request) and self._sessions.get(token, 0.0) > time.monotonic()

    async def _open_by_address(self, request: Request) -> Response:
        """Turn the token of an address into a session, and lead to the same address without it."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != TOKEN]
        target = f"/{quote(request.scope['path'].lstrip('/'))}{f'?{urlencode(rest)}' if rest else ''}"
        return await self._enter(request, request.query_params[TOKEN], target)

    async def _log_in(self, request: Request) -> Response:
        try:
            form = await asyncio.wait_for(_read_form(request), BODY_S)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("The form did not arrive.", 408)
        return await self._enter(request, parse_qs(form).get("password", [""])[0], "/")

    async def _enter(self, request: Request, secret: str, target: str) -> Response:
        """Begin a session if the secret is right. Only attempts from the same address wait for each other."""
        address = _network(request)
        if address in self._busy:
            return PlainTextResponse("Another attempt is under way: try again in a second.", 429)
        if hmac.compare_digest(secret.encode(), self.secret.encode()):
            answer = RedirectResponse(target, 303)
            secure = request.scope["scheme"] == "https"
            answer.set_cookie(
                _cookie_name(request), self._begin_session(), max_age=int(SESSION_S), httponly=True, samesite="strict",
                secure=secure,
            )  # fmt: skip
            return answer
        self._busy.add(address)
        try:
            await asyncio.sleep(WRONG_S)
        finally:
            self._busy.discard(address)
        return self._login_page(wrong=True)

    def _login_page(self, *, wrong: bool = False) -> Response:
        page = templates().get_template("login.html").render(wrong=wrong, name=TOKEN if self.by_address else "password")
        return HTMLResponse(page, 403 if wrong else 200)

    def _begin_session(self) -> str:
        """Begin a session; return its token."""
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        valid = [(name, end) for name, end in self._sessions.items() if end > now]
        self._sessions = dict([*valid[1 - MOST_SESSIONS :], (token, now + SESSION_S)])
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


def _network(request: HTTPConnection) -> str:
    """Return the client's address; of IPv6 its network, of which one client has all addresses."""
    try:
        client = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return ""
    return str(client if client.version == 4 else ipaddress.ip_network((client, 64), strict=False))


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
