"""Where a program can be watched over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for a supervisor.

Served in threads of their own; the program's state is only read.
"""

import importlib.util
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fedvit.errors import ConfigError
from fedvit.timings import LoopWatch

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

VARIABLE = "FEDVIT_METRICS"
"""In the environment: the same as the option, for units and containers."""
LOOPBACK = "127.0.0.1"
HUNG_S = 60.0
"""A loop that has not turned for this time hangs."""
AT_ONCE = 16
"""Requests that are served at a time; further ones are dropped."""
SILENT_S = 10.0
"""A connection that sends nothing for this time is closed."""

Check = Callable[[], str | None]
"""Returns the reason why something is not well; None if it is."""


class ListenAddress(NamedTuple):
    host: str
    port: int


def parse_listen(text: str) -> ListenAddress:
    """The address of `--metrics`. Raises ConfigError.

    >>> parse_listen("9108"), parse_listen("0.0.0.0:9108"), parse_listen("[::1]:0")
    (ListenAddress(host='127.0.0.1', port=9108), ListenAddress(host='0.0.0.0', port=9108), \
ListenAddress(host='::1', port=0))
    """
    found = re.fullmatch(r"(?:([^:\[\]]+):|\[(.+)\]:)?(\d{1,5})", text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(f"--metrics {text!r}: expected PORT or HOST:PORT, with a port from 0 (a free one) to 65535")
    return ListenAddress(found[1] or found[2] or LOOPBACK, int(found[3]))


def _read_option(_: click.Context, __: click.Parameter, text: str | None) -> ListenAddress | None:
    if not text:
        return None
    address = parse_listen(text)
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("--metrics needs the package prometheus-client: pip install 'fedvit[metrics]'")
    return address


OPTION: dict[str, Any] = {
    "envvar": VARIABLE,
    "metavar": "[HOST:]PORT",
    "callback": _read_option,
    "help": f"Serve metrics for Prometheus, /healthz and /readyz at this port, by default of {LOOPBACK}: without a "
    f"password, so beyond this machine for a trusted network only. Or set {VARIABLE}.",
}
"""Settings of the option `--metrics`."""


class Watched(NamedTuple):
    """What a program shows of itself."""

    collector: "Collector"
    loops: Callable[[], list[LoopWatch]]  # the program hangs if one of them does
    ready: Check


class Monitor:
    """Serves the metrics of a program that has `show`n itself; `url` is empty if it serves none."""

    def __init__(self, server: "_Server | None") -> None:
        self._server = server
        self.url = server.url if server else ""

    def show(self, watched: Callable[[], Watched]) -> None:
        """From now on serve what `watched()` returns, which is not called without a server."""
        if self._server:
            made = watched()
            self._server.registry.register(made.collector)
            self._server.watched = made


@contextmanager
def monitored(address: ListenAddress | None) -> Iterator[Monitor]:
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
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((address.host, address.port), _Handler)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"--metrics {address.host}:{address.port} cannot be opened: {reason}") from None
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self.server_address[1]}/metrics"

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
        return _answer(f"the program's loop has not turned for {silent_s:.0f} s" if silent_s > HUNG_S else None)

    def readyz(self) -> tuple[int, str, bytes]:
        return _answer(self.watched.ready() if self.watched else "the program is starting")


def _answer(trouble: str | None) -> tuple[int, str, bytes]:
    return 503 if trouble else 200, "text/plain; charset=utf-8", f"{trouble or 'ok'}\n".encode()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENT_S
    server_version, sys_version = "fedvit", ""

    def do_GET(self) -> None:
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

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""
