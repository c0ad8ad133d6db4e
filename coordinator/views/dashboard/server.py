"""The application with all pages."""

import logging
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query
from nicegui import ui
from starlette.middleware.gzip import GZipMiddleware

from coordinator.security.credentials import ApiCredentials
from coordinator.security.folder import Deployment
from coordinator.views.dashboard import (
    compare_page,
    device_page,
    devices_page,
    enrol_page,
    front_page,
    models_page,
    round_page,
    run_page,
    runs_page,
    service_page,
    submit_page,
)
from coordinator.views.dashboard.access import AccessGuard, ContentPolicy
from coordinator.views.dashboard.experiments import Experiments
from coordinator.views.dashboard.frame import Site, Submit
from coordinator.views.dashboard.reader import RecordReader

ANSWER_S = 60.0
"""Longest time to make a page: on a busy machine, from a long run."""
_RUNS, _METHODS = Query([]), Query([])  # arguments that may come several times


def make_pages(
    reader: RecordReader,
    folder: Path,
    credentials: ApiCredentials,
    deployment: Deployment | None,
    experiments: Experiments,
    submit: Submit,
) -> AccessGuard:
    """Make the application with all pages, behind the guard that lets people in."""
    site = Site(reader, folder, experiments, deployment, credentials, submit)
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
    return AccessGuard(GZipMiddleware(ContentPolicy(app)), site.credentials)


def _register(site: Site) -> None:
    """Each page under its address; what follows `?` are the arguments of its function."""
    at: Callable[[str], Callable[[Any], Any]] = partial(ui.page, response_timeout=ANSWER_S)

    @at("/")
    async def at_front() -> None:
        await front_page.show(site)

    @at("/runs")
    async def at_runs(text: str = "", status: str = "", order: str = "", page: int = 1) -> None:
        await runs_page.show(site, runs_page.RunQuery(text, status, order, page))

    @at("/run")
    async def at_run(run: str) -> None:
        await run_page.show(site, run)

    @at("/round")
    async def at_round(run: str, number: int) -> None:
        await round_page.show(site, run, number)

    @at("/devices")
    async def at_devices(run: str | None = None) -> None:
        await devices_page.show(site, run)

    @at("/device")
    async def at_device(device: str, run: str | None = None, until: int | None = None) -> None:
        await device_page.show(site, run, device, until)

    @at("/models")
    async def at_models() -> None:
        await models_page.show(site)

    @at("/model")
    async def at_model(model: str) -> None:
        await models_page.show_one(site, model)

    @at("/service")
    async def at_service() -> None:
        await service_page.show(site)

    @at("/submit")
    async def at_submit() -> None:
        await submit_page.show(site)

    @at("/enrol")
    async def at_enrol() -> None:
        await enrol_page.show(site)

    @at("/compare")
    async def at_compare(run: list[str] = _RUNS, method: list[str] = _METHODS) -> None:
        await compare_page.show(site, run, method)
