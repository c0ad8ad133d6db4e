"""Watch a program over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for a supervisor.

`/readyz` answers in JSON, with 503 while the program cannot do its work.

Served in threads of their own; the program's state is only read.
"""

import base64
import errno
import hmac
import importlib.util
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import msgspec

from fedvit.errors import ConfigError
from fedvit.files import private_files
from fedvit.timings import LoopWatch

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

VARIABLE = "FEDVIT_PROMETHEUS"
"""In the environment: the same as the option, for units and containers."""
PASSWORD_VARIABLE = "FEDVIT_PROMETHEUS_PASSWORD_FILE"
SHORTEST_PASSWORD = 16
"""Characters; long enough that guesses need not be slowed down."""
LOOPBACK = "127.0.0.1"
_UNIX = "unix:"
HUNG_S = 60.0
"""A loop that has not turned for this time hangs."""
AT_ONCE = 16
"""Requests that are served at a time; further ones are dropped."""
SILENT_S = 10.0
"""A connection that sends nothing for this time is closed."""

Role = Literal["leader", "standby", "run", "device"]
"""Part of a program: a service that leads or stands by, the coordinator of one run, or a device."""
CauseKind = Literal[
    "starting", "broker", "record", "leadership", "disk", "files", "object_store", "operator", "folder"
]  # fmt: skip


class Cause(msgspec.Struct, frozen=True):
    """One reason why a program, or one of its runs, cannot work now."""

    cause: CauseKind
    reason: str  # for people
    run: str | None = None  # None: the whole program


class Condition(msgspec.Struct, frozen=True):
    """The answer of `/readyz`."""

    ready: bool
    role: Role | None = None  # None: the program is starting
    causes: tuple[Cause, ...] = ()  # a program may be ready although one of its runs is stopped


STARTING = Condition(ready=False, causes=(Cause("starting", "the program is starting"),))


class ListenAddress(NamedTuple):
    """A TCP port, or the path of a Unix socket, which only its owner can open."""

    host: str = ""
    port: int = 0
    socket_path: Path | None = None
    password_file: Path | None = None


def parse_listen(text: str) -> ListenAddress:
    """Read the address of `--prometheus`. Raises ConfigError.

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
            "FV1021",
            f"--prometheus {text!r}: expected unix:PATH, PORT or HOST:PORT, with a port from 0 (a free one) to 65535",
        )
    return ListenAddress(found[1] or found[2] or LOOPBACK, int(found[3]))


def _read_option(context: click.Context, _: click.Parameter, text: str | None) -> ListenAddress | None:
    if not text:
        return None
    address = parse_listen(text)._replace(password_file=context.meta.get(PASSWORD_VARIABLE))
    if address.socket_path is None and address.password_file is None:
        raise ConfigError(
            "FV1021",
            f"--prometheus {text} would answer every user of this machine: set --prometheus-password-file FILE, or use "
            "a socket that only you can open, --prometheus unix:PATH",
        )
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("FV1021", "--prometheus needs the package prometheus-client: pip install 'fedvit[trackers]'")
    return address


OPTION: dict[str, Any] = {
    "envvar": VARIABLE,
    "metavar": "[HOST:]PORT|unix:PATH",
    "callback": _read_option,
    "help": f"Serve metrics for Prometheus, /healthz and /readyz at this port, by default of {LOOPBACK}, to clients "
    f"with the password; or at a socket that only its owner can open. Or set {VARIABLE}.",
}
"""Settings of the option `--prometheus`, which needs `--prometheus-password-file` beside it."""


def _keep_password_file(context: click.Context, _: click.Parameter, file: Path | None) -> None:
    context.meta[PASSWORD_VARIABLE] = file


def _read_password(file: Path) -> str:
    """Read the password of the metrics. Raises ConfigError if it cannot be used."""
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FV1021", f"the password of the metrics cannot be read: {error}") from error
    if len(password) < SHORTEST_PASSWORD:
        raise ConfigError(
            "FV1021", f"the password of the metrics in {file} has fewer than {SHORTEST_PASSWORD} characters"
        )
    return password


PASSWORD_OPTION: dict[str, Any] = {
    "envvar": PASSWORD_VARIABLE,
    "type": click.Path(path_type=Path, dir_okay=False),
    "callback": _keep_password_file,
    "is_eager": True,  # before --prometheus
    "expose_value": False,
    "help": f"File with the password for --prometheus, as of HTTP basic authentication. Or set {PASSWORD_VARIABLE}.",
}
"""Settings of the option `--prometheus-password-file`."""


class Watched(NamedTuple):
    """State that a program shows."""

    collector: "Collector"
    loops: Callable[[], list[LoopWatch]]  # the program hangs if one of them does
    condition: Callable[[], Condition]


class Monitor:
    """Serves the metrics of a program that has `show`n itself; `url` is empty if it serves none.

    A program whose part changes shows itself again: a standby that leads now.
    """

    def __init__(self, server: "_Server | None") -> None:
        self._server = server
        self.url = server.url if server else ""

    def show(self, watched: Callable[[], Watched]) -> None:
        """From now on serve what `watched()` returns, which is not called without a server."""
        if self._server:
            self._server.show(watched())


@contextmanager
def serve_metrics(address: ListenAddress | None) -> Iterator[Monitor]:
    """Serve metrics within the block; without an address do nothing. Raises ConfigError if the port is taken."""
    if address is None:
        yield Monitor(None)
        return
    server = _Server(address)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield Monitor(server)
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: ListenAddress) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self.watched: Watched | None = None  # None while the program starts
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self.password = _read_password(address.password_file) if address.password_file else None
        self._socket_path = address.socket_path
        if address.socket_path is not None:
            self.address_family = socket.AF_UNIX
        elif ":" in address.host:
            self.address_family = socket.AF_INET6
        where = f"{_UNIX}{address.socket_path}" if address.socket_path else f"{address.host}:{address.port}"
        server_address: Any = str(address.socket_path) if address.socket_path else (address.host, address.port)
        try:
            super().__init__(server_address, _Handler)
        except OSError as error:
            raise ConfigError("FV1021", f"--prometheus {where} cannot be opened: {error.strerror or error}") from None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = where if address.socket_path else f"http://{host}:{self.server_address[1]}/metrics"

    def show(self, watched: Watched) -> None:
        """Serve another state from now on."""
        if self.watched:
            self.registry.unregister(self.watched.collector)
        self.registry.register(watched.collector)
        self.watched = watched

    def server_bind(self) -> None:
        """Bind; a Unix socket is for its owner only from its first moment on, and replaces one that nobody serves."""
        if self._socket_path is None:
            super().server_bind()
            return
        with socket.socket(socket.AF_UNIX) as former, suppress(ConnectionRefusedError, FileNotFoundError):
            former.connect(str(self._socket_path))
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if self._socket_path.is_socket():
            self._socket_path.unlink()
        with private_files():
            super().server_bind()
        self._socket_path.chmod(0o600)

    def server_close(self) -> None:
        """Stop listening."""
        super().server_close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle needs no line in the log."""

    def metrics(self) -> tuple[int, str, bytes]:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def healthz(self) -> tuple[int, str, bytes]:
        loops = self.watched.loops() if self.watched else []
        silent_s = max((loop.silent_s() for loop in loops), default=0.0)
        trouble = f"the program's loop has not turned for {silent_s:.0f} s" if silent_s > HUNG_S else ""
        return 503 if trouble else 200, "text/plain; charset=utf-8", f"{trouble or 'ok'}\n".encode()

    def readyz(self) -> tuple[int, str, bytes]:
        condition = self.watched.condition() if self.watched else STARTING
        return 200 if condition.ready else 503, "application/json", msgspec.json.encode(condition) + b"\n"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_S
    server_version, sys_version = "fedvit", ""

    def do_GET(self) -> None:
        """Answer a page, to clients that have the password."""
        if self.server.password is not None and not self._has(self.server.password):
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="fedvit"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        pages = {"/metrics": self.server.metrics, "/healthz": self.server.healthz, "/readyz": self.server.readyz}
        page = pages.get(self.path.partition("?")[0])
        try:
            status, kind, body = page() if page else (404, "text/plain", f"{' '.join(pages)}\n".encode())
        except Exception as error:  # the program itself must not be disturbed
            log.exception("metrics not served")
            status, kind, body = 500, "text/plain", f"{type(error).__name__}: {error}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _has(self, password: str) -> bool:
        """Return True if the request has the password, under any user name."""
        kind, _, encoded = self.headers.get("Authorization", "").partition(" ")
        try:
            given = base64.b64decode(encoded, validate=True).partition(b":")[2] if kind.lower() == "basic" else b""
        except ValueError:
            given = b""
        return hmac.compare_digest(given, password.encode())

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""
