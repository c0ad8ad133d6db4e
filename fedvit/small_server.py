"""A small HTTP server for programs with little memory: bounded threads and bounded requests.

It listens on a TCP port, or on a Unix socket that only its owner can open. Each connection has one request, which must
arrive within seconds.
"""

import errno
import io
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, ClassVar, NamedTuple

from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.hosts import network_of

LOOPBACK = "127.0.0.1"
REQUEST_S = 10.0
"""Time in which a request must arrive, and in which its answer must be taken."""
LONGEST_REQUEST = 32768
"""Bytes of a request, with its head, unless the handler says otherwise."""
_UNIX = "unix:"


class ListenAddress(NamedTuple):
    """A TCP port, or the path of a Unix socket, which only its owner can open."""

    host: str = ""
    port: int = 0
    socket_path: Path | None = None
    password_file: Path | None = None


def parse_listen(text: str, option: str = "--prometheus", code: str = "FV1021") -> ListenAddress:
    """Read the address in the value of an option. Raises ConfigError with this code.

    >>> [parse_listen(text)[:2] for text in ("9108", "0.0.0.0:9108", "[::1]:0")]
    [('127.0.0.1', 9108), ('0.0.0.0', 9108), ('::1', 0)]
    >>> parse_listen("unix:/run/fedvit.socket").socket_path
    PosixPath('/run/fedvit.socket')
    """
    if (path := text.removeprefix(_UNIX)) != text and path:
        return ListenAddress(socket_path=Path(path))
    found = re.fullmatch(r"(?:([^:\[\]]+):|\[(.+)\]:)?(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(
            code,
            f"{option} {text!r}: expected unix:PATH, PORT or HOST:PORT, with a port from 0 (a free one) to 65535",
        )
    return ListenAddress(found[1] or found[2] or LOOPBACK, int(found[3]))


class SmallServer(ThreadingMixIn, TCPServer):
    """Serves each connection in a thread; connections beyond the bounds are closed. Raises OSError if it cannot listen.

    `address` is the URL without a path, or the socket.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    at_once: ClassVar[int] = 16
    at_once_of_one_address: ClassVar[int] = 16

    def __init__(self, listen: ListenAddress, handler: type["SmallHandler"]) -> None:
        self._open = Counter[str]()  # connections by network; "": Unix socket
        self._lock = threading.Lock()
        self.socket_path = listen.socket_path
        if listen.socket_path is not None:
            self.address_family = socket.AF_UNIX
        elif ":" in listen.host:
            self.address_family = socket.AF_INET6
        where: Any = str(listen.socket_path) if listen.socket_path else (listen.host, listen.port)
        super().__init__(where, handler)
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.address = f"{_UNIX}{listen.socket_path}" if listen.socket_path else f"http://{host}:{self.port}"

    @property
    def port(self) -> int:
        """The TCP port; 0 of a Unix socket."""
        return 0 if self.socket_path else int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind; a Unix socket is for its owner only from its first moment on, and replaces one that nobody serves."""
        if self.socket_path is None:
            super().server_bind()
            return
        with socket.socket(socket.AF_UNIX) as former, suppress(ConnectionRefusedError, FileNotFoundError):
            former.connect(str(self.socket_path))
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if self.socket_path.is_socket():
            self.socket_path.unlink()
        with private_files():
            super().server_bind()
        self.socket_path.chmod(0o600)

    def server_close(self) -> None:
        """Stop listening."""
        super().server_close()
        if self.socket_path is not None:
            self.socket_path.unlink(missing_ok=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        client = self._client(client_address)
        with self._lock:
            most_here = self.at_once_of_one_address if client else self.at_once
            is_served = self._open.total() < self.at_once and self._open[client] < most_here
            if is_served:
                self._open[client] += 1
        if not is_served:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget(client_address)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(client_address)

    def _forget(self, client_address: Any) -> None:
        client = self._client(client_address)
        with self._lock:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def _client(self, client_address: Any) -> str:
        return "" if self.socket_path else network_of(client_address[0])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle needs no line in the log."""


class SmallHandler(BaseHTTPRequestHandler):
    """One connection with one request."""

    timeout = REQUEST_S
    longest_request: ClassVar[int] = LONGEST_REQUEST
    server_version, sys_version = "fedvit", ""

    def setup(self) -> None:
        """Bound the time and the size of the request."""
        super().setup()
        self.rfile = io.BufferedReader(_BoundedInput(self.connection, self.longest_request))

    def answer(self, status: int, kind: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> None:
        """Send an answer with its head."""
        self.connection.settimeout(REQUEST_S)  # sendall takes no longer in all
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


class _BoundedInput(socket.SocketIO):
    """The bytes of a connection. Raises TimeoutError, which ends it, if its request takes too long or is too large."""

    def __init__(self, connection: socket.socket, longest: int) -> None:
        super().__init__(connection, "r")
        self._connection = connection
        self._ends_at = time.monotonic() + REQUEST_S
        self._left = longest

    def readinto(self, buffer: Any) -> int | None:
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0 or self._left <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining_s)
        read = super().readinto(memoryview(buffer)[: self._left])
        self._left -= read or 0
        return read
