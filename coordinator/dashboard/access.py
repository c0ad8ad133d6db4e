"""Who may see the pages: anybody on this machine, or with a password, from elsewhere.

Without a password only requests to a name of this machine are answered, so that a page of somebody else in the same
browser cannot read them under a name of its own.
"""

import asyncio
import hmac
import ipaddress
import secrets
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coordinator.dashboard.frame import templates

COOKIE = "fedvit_dashboard"
SESSION_S = 12 * 3600.0
WRONG_S = 1.0
"""How long the next attempt waits after a wrong password; attempts are handled one after another."""
LONGEST_FORM = 4096
MOST_SESSIONS = 100

Scope = dict[str, Any]


@dataclass
class Guard:
    """An ASGI application that passes on what is allowed, pages and live connections alike."""

    app: Any
    password: str | None  # None: served to this machine only
    _sessions: dict[str, float] = field(default_factory=dict)  # token -> monotonic end
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif self.password is None or not _is_same_origin(scope):
            await _answer(send, 403, "This address is not served.", "text/plain")
        elif scope["path"] == "/login" and scope["method"] == "POST":
            await self._log_in(receive, send)
        elif scope["path"] == "/":
            await _answer(send, 200, templates().get_template("login.html").render(wrong=False))
        else:
            await _redirect(send)

    def _is_allowed(self, scope: Scope) -> bool:
        if not _is_same_origin(scope):
            return False
        if self.password is None:
            return is_loopback(urlsplit(f"//{_header(scope, b'host')}").hostname or "")
        return self._sessions.get(_cookie(scope), 0.0) > time.monotonic()

    async def _log_in(self, receive: Any, send: Any) -> None:
        given = parse_qs(await _form(receive)).get("password", [""])[0]
        async with self._one:
            right = hmac.compare_digest(given.encode(), (self.password or "").encode())
            if not right:
                await asyncio.sleep(WRONG_S)
        if not right:
            await _answer(send, 403, templates().get_template("login.html").render(wrong=True))
            return
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        valid = [(name, end) for name, end in self._sessions.items() if end > now]
        self._sessions = dict([*valid[1 - MOST_SESSIONS :], (token, now + SESSION_S)])
        await _redirect(send, f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SESSION_S:.0f}")


def is_loopback(address: str) -> bool:
    """Whether an address or name is that of this machine, for itself only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _is_same_origin(scope: Scope) -> bool:
    """False for a request that a page of another origin made."""
    origin = _header(scope, b"origin")
    return not origin or urlsplit(origin).netloc == _header(scope, b"host")


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _cookie(scope: Scope) -> str:
    pairs = (pair.strip().partition("=") for pair in _header(scope, b"cookie").split(";"))
    return next((value for name, _, value in pairs if name == COOKIE), "")


async def _form(receive: Any) -> str:
    """The body of a request; "" if it is longer than any form of ours."""
    content, more = b"", True
    while more and len(content) <= LONGEST_FORM:
        message = await receive()
        content, more = content + message.get("body", b""), message.get("more_body", False)
    return content.decode("utf-8", "replace") if len(content) <= LONGEST_FORM else ""


async def _answer(send: Any, status: int, text: str, kind: str = "text/html") -> None:
    headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _redirect(send: Any, cookie: str = "") -> None:
    headers = [(b"location", b"/"), *([(b"set-cookie", cookie.encode())] if cookie else [])]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
