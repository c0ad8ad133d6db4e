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
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

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
class Guard:
    """An ASGI application that passes on what is allowed, pages and live connections alike."""

    app: Any
    secret: str  # the password, or the token
    by_address: bool  # the secret is a token, which an address may contain; served under names of this machine only
    _sessions: dict[str, float] = field(default_factory=dict)  # token -> monotonic end
    _busy: set[str] = field(default_factory=set)  # addresses that must wait after a wrong password

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer a request, or pass it on if it has a session."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan" or self._is_allowed(scope):
                await self.app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        send = _with_headers(send)
        if not self._is_expected(scope):
            await _answer(send, 403, "This address is not served.", "text/plain")
        elif self.by_address and TOKEN in _query(scope):
            await self._open_by_address(scope, send)
        elif self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["path"] == "/login" and scope["method"] == "POST":
            await self._log_in(scope, receive, send)
        elif scope["path"] == "/":
            await _answer(send, 200, self._login_page())
        else:
            await _redirect(send, "/")

    def _is_expected(self, scope: Scope) -> bool:
        """Refuse requests that a page of another origin made and, without a password, names of other machines."""
        host, origin = _header(scope, b"host"), _header(scope, b"origin")
        if origin and urlsplit(origin).netloc != host:
            return False
        return not self.by_address or is_loopback(urlsplit(f"//{host}").hostname or "")

    def _is_allowed(self, scope: Scope) -> bool:
        return self._is_expected(scope) and self._sessions.get(_cookie(scope), 0.0) > time.monotonic()

    async def _open_by_address(self, scope: Scope, send: Any) -> None:
        """Turn the token of an address into a session, and lead to the same address without it."""
        given = _query(scope)[TOKEN]
        rest = [(name, value) for name, value in parse_qsl(scope["query_string"].decode()) if name != TOKEN]
        if await self._may_enter(scope, send, given):
            target = f"/{quote(scope['path'].lstrip('/'))}{f'?{urlencode(rest)}' if rest else ''}"
            await _redirect(send, target, self._session(scope))

    async def _log_in(self, scope: Scope, receive: Any, send: Any) -> None:
        try:
            form = await asyncio.wait_for(_form(receive), BODY_S)
        except TimeoutError:
            await _answer(send, 408, "The form did not arrive.", "text/plain")
            return
        if await self._may_enter(scope, send, parse_qs(form).get("password", [""])[0]):
            await _redirect(send, "/", self._session(scope))

    async def _may_enter(self, scope: Scope, send: Any, given: str) -> bool:
        """Compare a secret; answer if it is wrong. Only attempts from the same address wait for each other."""
        address = _network(scope)
        if address in self._busy:
            await _answer(send, 429, "Another attempt is under way: try again in a second.", "text/plain")
        elif hmac.compare_digest(given.encode(), self.secret.encode()):
            return True
        else:
            self._busy.add(address)
            try:
                await asyncio.sleep(WRONG_S)
            finally:
                self._busy.discard(address)
            await _answer(send, 403, self._login_page(wrong=True))
        return False

    def _login_page(self, *, wrong: bool = False) -> str:
        return templates().get_template("login.html").render(wrong=wrong, name=TOKEN if self.by_address else "password")

    def _session(self, scope: Scope) -> str:
        """Begin a session; return its cookie."""
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        valid = [(name, end) for name, end in self._sessions.items() if end > now]
        self._sessions = dict([*valid[1 - MOST_SESSIONS :], (token, now + SESSION_S)])
        secure = "; Secure" if scope["scheme"] == "https" else ""
        name = _cookie_name(scope)
        return f"{name}={token}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SESSION_S:.0f}{secure}"


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


def is_loopback(address: str) -> bool:
    """Return True for an address or name by which only this machine reaches itself."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _network(scope: Scope) -> str:
    """Return the client's address; of IPv6 its network, of which one client has all addresses."""
    try:
        client = ipaddress.ip_address(scope["client"][0] if scope.get("client") else "")
    except ValueError:
        return ""
    return str(client if client.version == 4 else ipaddress.ip_network((client, 64), strict=False))


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _query(scope: Scope) -> dict[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("ascii", "replace"), keep_blank_values=True))


def _cookie_name(scope: Scope) -> str:
    """Return the name of the cookie: browsers send it to all ports, so that each dashboard needs its own."""
    return f"{COOKIE}_{scope['server'][1]}"


def _cookie(scope: Scope) -> str:
    pairs = (pair.strip().partition("=") for pair in _header(scope, b"cookie").split(";"))
    return next((value for name, _, value in pairs if name == _cookie_name(scope)), "")


async def _form(receive: Any) -> str:
    """Return the body of a request; "" if it is longer than any form of the dashboard."""
    content, more = b"", True
    while more and len(content) <= LONGEST_FORM:
        message = await receive()
        content, more = content + message.get("body", b""), message.get("more_body", False)
    return content.decode("utf-8", "replace") if len(content) <= LONGEST_FORM else ""


def _with_headers(send: Any) -> Any:
    """Add the headers that every answer has."""

    async def send_on(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return send_on


async def _answer(send: Any, status: int, text: str, kind: str = "text/html") -> None:
    body = text.encode()
    headers = [
        (b"content-type", f"{kind}; charset=utf-8".encode()), (b"cache-control", b"no-store"), policy_header(body)
    ]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _redirect(send: Any, target: str, cookie: str = "") -> None:
    headers = [(b"location", target.encode()), (b"cache-control", b"no-store")]
    headers += [(b"set-cookie", cookie.encode())] if cookie else []
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
