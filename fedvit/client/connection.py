"""Requests to a coordinator's HTTP API, over HTTP or TLS, by the standard library."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from fedvit.errors import ConfigError, FedvitError, LinkDown, PeerRefused
from fedvit.hosts import hide_password

ROOT = "/api/v1"
TIMEOUT_S = 60.0
_KINDS: dict[int, type[FedvitError]] = {401: PeerRefused, 403: PeerRefused, 429: LinkDown, 503: LinkDown}
"""Status of an answer -> class of its error; others are errors of what was asked."""


class _Error(msgspec.Struct):
    code: str
    message: str


class Connection:
    """Sends each request over a connection of its own, with the token in its header.

    `ca_file` is the certificate of a deployment's authority, authority.pem; without it the system's are used.
    Raises ConfigError if the address or the file cannot be used.
    """

    def __init__(self, url: str, token: str, ca_file: Path | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:  # its text may have a part of a password
            raise ConfigError("FV1815", f"address {hide_password(url)!r}: host or port is not valid") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError("FV1815", f"address {hide_password(url)!r} must be written http(s)://HOST[:PORT]")
        if not token.isascii() or not token.isprintable() or not token:
            raise ConfigError("FV1815", "the token is empty, or has characters that no token has")
        self._secure, self._host = parts.scheme == "https", parts.hostname
        self._prefix, self._token, self.url = parts.path.rstrip("/") + ROOT, token, url
        try:
            self._context = ssl.create_default_context(cafile=ca_file) if self._secure else None
        except OSError as error:
            raise ConfigError("FV1815", f"the authority {ca_file} cannot be read: {error}") from error

    def ask(
        self,
        method: str,
        path: tuple[str, ...],
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> bytes:
        """Return the answer to a request. Raises the error that the server names; LinkDown if it does not answer."""
        with self.open(method, path, query, body, timeout_s) as answer:
            return answer.read()

    @contextmanager
    def open(
        self,
        method: str,
        path: tuple[str, ...],
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[http.client.HTTPResponse]:
        """Open the answer to a request, to be read by pieces; raises as `ask` does."""
        words = {name: value for name, value in (query or {}).items() if value not in (None, (), "")}
        target = f"{self._prefix}/{'/'.join(quote(part, safe='~') for part in path)}"
        target += f"?{urlencode(words, doseq=True)}" if words else ""
        link: http.client.HTTPConnection
        if self._context is not None:
            link = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        else:
            link = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        try:
            link.request(method, target, None if body is None else json.dumps(body), headers)
            answer = link.getresponse()
            if answer.status != 200:
                raise _make_error(answer.status, answer.read())
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise LinkDown("FV1815", f"no answer from {self.url}: {error}") from error
        finally:
            link.close()


def _make_error(status: int, content: bytes) -> FedvitError:
    kind = _KINDS.get(status, ConfigError)
    try:
        error = msgspec.json.decode(content, type=_Error)
    except msgspec.MsgspecError:
        return LinkDown("FV1815", f"the server answered with status {status}: is this the address of a coordinator?")
    return kind(error.code, error.message)
