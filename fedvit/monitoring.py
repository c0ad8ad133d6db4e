"""Watch a program over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for a supervisor.

`/readyz` answers in JSON, with 503 while the program cannot do its work.

Served in threads of their own; the program's state is only read.
"""

import base64
import hmac
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
import msgspec

from fedvit.errors import ConfigError
from fedvit.small_server import LOOPBACK, ListenAddress, SmallHandler, SmallServer, parse_listen
from fedvit.timings import LoopWatch

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

VARIABLE = "FEDVIT_PROMETHEUS"
"""In the environment: the same as the option, for units and containers."""
PASSWORD_VARIABLE = "FEDVIT_PROMETHEUS_PASSWORD_FILE"
SHORTEST_PASSWORD = 16
"""Characters; long enough that guesses need not be slowed down."""
HUNG_S = 60.0
"""A loop that has not turned for this time hangs."""

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
        raise ConfigError(
            "FV1021", "--prometheus needs the package prometheus-client: pip install 'fedvit[prometheus]'"
        )
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


class _Server(SmallServer):
    def __init__(self, listen: ListenAddress) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self.watched: Watched | None = None  # None while the program starts
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.password = _read_password(listen.password_file) if listen.password_file else None
        try:
            super().__init__(listen, _Handler)
        except OSError as error:
            where = f"unix:{listen.socket_path}" if listen.socket_path else f"{listen.host}:{listen.port}"
            raise ConfigError("FV1021", f"--prometheus {where} cannot be opened: {error.strerror or error}") from None
        self.url = self.address if listen.socket_path else f"{self.address}/metrics"

    def show(self, watched: Watched) -> None:
        """Serve another state from now on."""
        if self.watched:
            self.registry.unregister(self.watched.collector)
        self.registry.register(watched.collector)
        self.watched = watched

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


class _Handler(SmallHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer a page, to clients that have the password."""
        if self.server.password is not None and not self._has(self.server.password):
            self.answer(401, "text/plain", b"", [("WWW-Authenticate", 'Basic realm="fedvit"')])
            return
        pages = {"/metrics": self.server.metrics, "/healthz": self.server.healthz, "/readyz": self.server.readyz}
        page = pages.get(self.path.partition("?")[0])
        try:
            status, kind, body = page() if page else (404, "text/plain", f"{' '.join(pages)}\n".encode())
        except Exception as error:  # the program itself must not be disturbed
            log.exception("metrics not served")
            status, kind, body = 500, "text/plain", f"{type(error).__name__}: {error}\n".encode()
        self.answer(status, kind, body)

    def _has(self, password: str) -> bool:
        """Return True if the request has the password, under any user name."""
        kind, _, encoded = self.headers.get("Authorization", "").partition(" ")
        try:
            given = base64.b64decode(encoded, validate=True).partition(b":")[2] if kind.lower() == "basic" else b""
        except ValueError:
            given = b""
        return hmac.compare_digest(given, password.encode())
