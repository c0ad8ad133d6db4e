"""Serves the pages until Ctrl-C."""

import errno
import logging
import socket
from importlib.resources import files

import uvicorn
from fastapi import FastAPI, Query
from nicegui import ui
from starlette.middleware.gzip import GZipMiddleware

from coordinator.views.dashboard import (
    compare_page,
    device_page,
    devices_page,
    enrol_page,
    front_page,
    round_page,
    run_page,
    runs_page,
    service_page,
    submit_page,
)
from coordinator.views.dashboard.access import AccessGuard, ContentPolicy
from coordinator.views.dashboard.connections import BoundedProtocol
from coordinator.views.dashboard.frame import Site
from fedvit.errors import ConfigError

ANSWER_S = 60.0
"""Longest time to make a page: on a busy machine, from a long run."""
_RUNS, _METHODS = Query([]), Query([])  # arguments that may come several times


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


def serve(site: Site, opened: socket.socket, secret: str, *, by_address: bool, proxies: str | None) -> None:
    """Serve the pages on an open socket until the process is asked to end.

    `secret` is a password or, `by_address`, a token. `proxies` are the addresses of proxies whose X-Forwarded headers
    name the client.
    """
    logging.getLogger("nicegui").setLevel(logging.ERROR)  # on a busy machine it warns that it is slow
    _register(site)
    style = "".join(
        files(package).joinpath(name).read_text()
        for package, name in (("profiles.report", "style.css"), ("coordinator.views.dashboard", "dashboard.css"))
    )
    ui.add_head_html(f"<style>{style}</style>", shared=True)
    script = files("coordinator.views.dashboard").joinpath("dashboard.js").read_text()
    ui.add_head_html(f"<script>{script}</script>", shared=True)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        app, title="fedvit", favicon="data:,", dark=None, language="en-US", tailwind=False,
        binding_refresh_interval=None, show_welcome_message=False, gzip_middleware_factory=None,
    )  # fmt: skip
    config = uvicorn.Config(
        AccessGuard(GZipMiddleware(ContentPolicy(app)), secret, by_address), http=BoundedProtocol, ws="wsproto",
        log_level="error", access_log=False, timeout_graceful_shutdown=2, server_header=False,
        proxy_headers=proxies is not None, forwarded_allow_ips=proxies or "",
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[opened])


def _register(site: Site) -> None:
    """Each page under its address; what follows `?` are the arguments of its function."""

    async def at_front() -> None:
        await front_page.show(site)

    async def at_runs(text: str = "", status: str = "", order: str = "", page: int = 1) -> None:
        await runs_page.show(site, runs_page.Choice(text, status, order, page))

    async def at_run(run: str) -> None:
        await run_page.show(site, run)

    async def at_round(run: str, number: int) -> None:
        await round_page.show(site, run, number)

    async def at_devices(run: str | None = None) -> None:
        await devices_page.show(site, run)

    async def at_device(device: str, run: str | None = None, until: int | None = None) -> None:
        await device_page.show(site, run, device, until)

    async def at_service() -> None:
        await service_page.show(site)

    async def at_submit() -> None:
        await submit_page.show(site)

    async def at_enrol() -> None:
        await enrol_page.show(site)

    async def at_compare(run: list[str] = _RUNS, method: list[str] = _METHODS) -> None:
        await compare_page.show(site, run, method)

    for address, show in (
        ("/", at_front), ("/runs", at_runs), ("/run", at_run), ("/round", at_round), ("/devices", at_devices),
        ("/device", at_device), ("/service", at_service), ("/submit", at_submit), ("/enrol", at_enrol),
        ("/compare", at_compare),
    ):  # fmt: skip
        ui.page(address, response_timeout=ANSWER_S)(show)
