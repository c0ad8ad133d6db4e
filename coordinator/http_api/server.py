"""Serves the API, and the pages of the dashboard if there are any, at one port until Ctrl-C."""

import asyncio
import errno
import socket
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn

from coordinator.http_api.app import ROOT, ApiGuard, Scope, make_app
from coordinator.http_api.site import ApiSite
from coordinator.operations.submitting import Submission, submit
from coordinator.views.dashboard.connections import HEAD_S, BoundedProtocol
from coordinator.views.dashboard.experiments import Experiments
from fedvit.errors import ConfigError


@dataclass
class Server:
    """An ASGI application that passes requests on to the API, all others to the pages."""

    api: ApiGuard
    pages: Any

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        is_api = scope["type"] == "http" and f"{scope['path']}/".startswith(f"{ROOT}/")
        await (self.api if is_api else self.pages)(scope, receive, send)


def listen_on(address: str, port: int) -> socket.socket:
    """A socket at this address; port 0 takes a free one. Raises ConfigError if it cannot be used."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(where)
        opened.listen()
        return opened
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                "FV1802",
                f"port {port} on {address} is in use by another program, or by another dashboard; choose another with "
                "--port (0: a free one)",
            ) from error
        raise ConfigError(
            "FV1802", f"the dashboard cannot listen on {address}, port {port}: {error.strerror or error}"
        ) from error


def _submit(folder: Path, values: dict[str, Any], name: str | None, places: bool) -> tuple[str, str | None]:
    """Put a run from a page into the queue; return its name, and a warning. Raises ConfigError."""
    submitted = submit(folder, Submission(values, "run.toml", name), places=places)
    return submitted.run, submitted.warning


def serve(
    site: ApiSite,
    opened: socket.socket,
    experiments: Experiments | None,
    *,
    certificate: tuple[Path, Path] | None,
    proxies: str | None,
) -> None:
    """Serve on an open socket until the process is asked to end; without `experiments` the API alone.

    `certificate` and its key encrypt. `proxies` are the addresses of proxies whose X-Forwarded headers name the client.
    """
    served: Any = ApiGuard(make_app(site), site.credentials)
    if experiments is not None:
        pages = import_module("coordinator.views.dashboard.server")  # late: NiceGUI
        guard = pages.make_pages(
            site.reader, site.folder, site.credentials, site.deployment, experiments, partial(_submit, site.folder)
        )
        served.find_session = guard.find_identity
        served = Server(served, guard)
    config = uvicorn.Config(
        served, http=BoundedProtocol, ws="none" if experiments is None else "wsproto",
        log_level="error", access_log=False, timeout_graceful_shutdown=2, server_header=False,
        proxy_headers=proxies is not None, forwarded_allow_ips=proxies or "",
        ssl_certfile=certificate and certificate[0], ssl_keyfile=certificate and certificate[1],
    )  # fmt: skip
    make_loop = config.get_loop_factory() or asyncio.new_event_loop

    def make_bounded_loop() -> asyncio.AbstractEventLoop:
        loop = make_loop()
        if certificate:  # a connection is counted after its handshake, for which 60 s are usual
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=HEAD_S)  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=make_bounded_loop) as runner:
        runner.run(uvicorn.Server(config).serve(sockets=[opened]))
