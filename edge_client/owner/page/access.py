"""Access to the page: by a password, or by a token in the address that the program printed.

An address of this machine is no protection, since every user of the machine can open it; a Unix socket is.
"""

import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from fedvit.errors import FedvitError
from fedvit.hosts import is_loopback, network_of

COOKIE = "fedvit_page"
SESSION_S = 12 * 3600.0
MOST_SESSIONS = 20
WRONG_S = 1.0
"""Time after a wrong secret in which its address may make no further attempt."""


class AttemptUnderWay(FedvitError):
    """The address of the client has just sent a wrong secret."""

    general_code = "FV1814"


@dataclass
class PageAccess:
    """Sessions of browsers, and the secrets that begin one."""

    password: str | None  # None: only names of this machine are served
    token: str | None  # of the address, without a password
    port: int = 0
    _sessions: dict[str, float] = field(default_factory=dict)  # token -> its end, monotonic
    _waiting: set[str] = field(default_factory=set)  # networks that sent a wrong secret
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_open(self) -> bool:
        """Return True without secrets: only the owner of a Unix socket can connect to it."""
        return self.password is None and self.token is None

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers send cookies to all ports, so that each page needs its own."""
        return f"{COOKIE}_{self.port}"

    def is_expected(self, method: str, host: str, origin: str | None) -> bool:
        """Refuse what a page of another origin sent, and without a password names of other machines.

        Browsers send the origin of each POST.
        """
        try:
            if (origin or method == "POST") and urlsplit(origin or "").netloc != host:
                return False
            return self.password is not None or is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:  # neither is an address
            return False

    def has_session(self, cookies: str) -> bool:
        """Return True if one of the cookies is a session."""
        if self.is_open:
            return True
        try:
            sent = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        with self._lock:
            return sent is not None and self._sessions.get(sent.value, 0.0) > time.monotonic()

    def enter(self, secret: str, client: str) -> str | None:
        """Return the cookie of a new session; None, after a delay, if the secret is wrong.

        Raises AttemptUnderWay while another attempt from this address waits.
        """
        network, expected = network_of(client), self.password or self.token or ""
        is_right = bool(expected) and hmac.compare_digest(secret.encode("utf-8", "replace"), expected.encode())
        with self._lock:
            if network in self._waiting:
                raise AttemptUnderWay("FV1814", "another attempt is under way: try again in a second")
            if is_right:
                return self._begin()
            self._waiting.add(network)
        try:
            time.sleep(WRONG_S)
        finally:
            with self._lock:
                self._waiting.discard(network)
        return None

    def _begin(self) -> str:
        now, token = time.monotonic(), secrets.token_urlsafe(32)
        valid = [(known, end) for known, end in self._sessions.items() if end > now]
        self._sessions = dict([*valid[1 - MOST_SESSIONS :], (token, now + SESSION_S)])
        return f"{self.cookie}={token}; Max-Age={SESSION_S:.0f}; Path=/; HttpOnly; SameSite=Strict"
