"""Endpoints of runs and of the service that serves them."""

from typing import Annotated, Any

import msgspec
from fastapi import Depends, Query, Request
from msgspec import Struct

from coordinator.http_api.answers import read_body
from coordinator.http_api.routes import Routes, Site, identity_of
from coordinator.http_api.site import ApiSite
from coordinator.operations.documents import ChangedRun, RunActivity, ServiceOverview, SubmittedRun
from coordinator.operations.runs import NEWEST, LocalRuns
from coordinator.operations.submitting import HIGHEST_PRIORITY, Submission, parse_time, submit
from coordinator.record.opening import newest_run
from coordinator.record.record import Record
from coordinator.record.retention import Removal, RetentionPolicy
from coordinator.record.tables import RunStatus
from coordinator.run_view import (
    DeviceView,
    RoundView,
    RunFilter,
    RunPage,
    RunProgress,
    RunView,
    Standing,
    list_page,
    read_devices,
    read_progress,
    read_rounds,
    read_run,
    read_sizes,
    read_standings,
    show_document,
)

MOST = 500
"""Most entries of one page."""
Offset = Annotated[int, Query(ge=0, le=2**31, description="Entries before the page.")]
Limit = Annotated[int, Query(ge=1, le=MOST, description="Most entries of the page.")]
Rounds = Annotated[int, Query(ge=0, le=2**31, description="Newest rounds with accuracies by device.")]
Word = Annotated[str, Query(max_length=200)]


class NewRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run to submit."""

    config: dict[str, Any] = {}  # keys of run.toml
    name: str | None = None  # by default date, time and method
    priority: Annotated[int, msgspec.Meta(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] = 0
    at: str | None = None  # begin not before: ISO 8601, or from now on, such as +8h


class Released(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices whose quarantine ends."""

    devices: list[str]


class CleanUp(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a clean-up, as those of `coordinator gc`."""

    keep_runs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    keep_rounds: Annotated[int, msgspec.Meta(ge=1)] | None = None
    dry_run: bool = False
    keep_mirrors: bool = False


class RoundPage(Struct, frozen=True, kw_only=True):
    """Some closed rounds of a run, the newest first."""

    rounds: list[RoundView]
    total: int


class RunDevicePage(Struct, frozen=True, kw_only=True):
    """Some devices of a run, by name."""

    devices: list[DeviceView]
    total: int


class Sizes(Struct, frozen=True, kw_only=True):
    """Bytes of the folders of runs."""

    bytes: dict[str, int]


def resolve(store: Record, site: ApiSite, run: str) -> str:
    """Return the name of a run; `NEWEST` stands for the newest."""
    return newest_run(store, site.folder) if run == NEWEST else run


def find_name(store: Record, site: ApiSite, run: str) -> str:
    """Return the name of an existing run. Raises ConfigError if there is none."""
    return store.runs.read(resolve(store, site, run)).id


routes = Routes()


def find_progress(store: Record, site: ApiSite, run: str) -> RunProgress:
    return read_progress(store, store.runs.read(resolve(store, site, run)))


def _find_rounds(store: Record, site: ApiSite, run: str, offset: int, limit: int) -> RoundPage:
    rounds = read_rounds(store, resolve(store, site, run))
    return RoundPage(rounds=rounds[::-1][offset : offset + limit], total=len(rounds))


def _find_devices(store: Record, site: ApiSite, run: str, offset: int, limit: int) -> RunDevicePage:
    name = resolve(store, site, run)
    store.runs.read(name)
    devices = read_devices(store, name)
    return RunDevicePage(devices=devices[offset : offset + limit], total=len(devices))


def _find_details(store: Record, site: ApiSite, run: str, accuracy_rounds: int | None) -> dict[str, Any]:
    return show_document(read_run(store, resolve(store, site, run), accuracy_of=accuracy_rounds))


def _find_standings(store: Record, site: ApiSite, run: str) -> list[Standing]:
    return read_standings(store, resolve(store, site, run))


async def _read_filter(
    status: Annotated[list[RunStatus], Query()] = [],  # noqa: B006 - FastAPI copies it
    method: Word = "",
    model: Word = "",
    name: Word = "",
) -> RunFilter:
    return RunFilter(tuple(status), method, model, name)


@routes.add("GET", "/runs", "viewer")
async def list_runs(
    site: Site, wanted: Annotated[RunFilter, Depends(_read_filter)], offset: Offset = 0, limit: Limit = 50
) -> RunPage:
    """List runs, the newest first: those of a status, method and model, whose name contains a text."""
    return await site.read(list_page, wanted, offset, limit)


@routes.add("GET", "/sizes", "viewer")
async def list_sizes(site: Site) -> Sizes:
    """Measure the folders of all runs."""
    return Sizes(bytes=await site.read(read_sizes, site.folder))


@routes.add("POST", "/runs", "operator")
async def submit_run(site: Site, request: Request, body: Annotated[NewRun, Depends(read_body(NewRun))]) -> SubmittedRun:
    """Put a run into the queue. Only an admin may name files and addresses of the server."""
    at = None if body.at is None else parse_time(body.at)
    asked = Submission(body.config, "config", body.name, body.priority, at)
    places = identity_of(request).may("admin")
    return await site.change_folder(lambda: submit(site.folder, asked, places=places))


@routes.add("GET", "/runs/{run}", "viewer")
async def show_run(site: Site, run: str) -> RunProgress:
    """Read the state, the progress and the settings of a run; ~newest stands for the newest."""
    return await site.read(find_progress, site, run)


@routes.add("GET", "/runs/{run}/details", "viewer", answer=RunView)
async def show_details(site: Site, run: str, accuracy_rounds: Rounds | None = None) -> dict[str, Any]:
    """Read all rounds, devices and refusals of a run."""
    return await site.read(_find_details, site, run, accuracy_rounds)


@routes.add("GET", "/runs/{run}/rounds", "viewer")
async def list_rounds(site: Site, run: str, offset: Offset = 0, limit: Limit = 50) -> RoundPage:
    """List closed rounds, the newest first."""
    return await site.read(_find_rounds, site, run, offset, limit)


@routes.add("GET", "/runs/{run}/devices", "viewer")
async def list_run_devices(site: Site, run: str, offset: Offset = 0, limit: Limit = 50) -> RunDevicePage:
    """List the devices of a run by name, with what they did in closed rounds."""
    return await site.read(_find_devices, site, run, offset, limit)


@routes.add("GET", "/runs/{run}/standings", "viewer")
async def list_standings(site: Site, run: str) -> list[Standing]:
    """List devices with strikes or in quarantine."""
    return await site.read(_find_standings, site, run)


@routes.add("POST", "/runs/{run}/release", "operator")
async def release_devices(
    site: Site, run: str, body: Annotated[Released, Depends(read_body(Released))]
) -> list[Standing]:
    """End the quarantine of devices, and reset their strikes."""
    return await site.change(lambda runs: runs.read_standings(run, body.devices))


@routes.add("GET", "/runs/{run}/activity", "viewer")
async def show_activity(site: Site, run: str) -> RunActivity:
    """Read what a run waits for."""
    return await site.read_run(lambda runs: runs.read_activity(run))


@routes.add("GET", "/service", "viewer")
async def show_service(site: Site) -> ServiceOverview:
    """Read what the service does: its runs, its queue, its devices."""
    return await site.read_run(LocalRuns.read_service)


@routes.add("POST", "/runs/{run}/cancel", "operator")
async def cancel_run(site: Site, run: str) -> ChangedRun:
    """End a run for good."""
    return await site.change(lambda runs: runs.change(run, "cancel"))


@routes.add("POST", "/runs/{run}/pause", "operator")
async def pause_run(site: Site, run: str) -> ChangedRun:
    """Let a run open no new round."""
    return await site.change(lambda runs: runs.change(run, "pause"))


@routes.add("POST", "/runs/{run}/unpause", "operator")
async def unpause_run(site: Site, run: str) -> ChangedRun:
    """Let a paused run open rounds again."""
    return await site.change(lambda runs: runs.change(run, "unpause"))


@routes.add("POST", "/runs/{run}/retry", "operator")
async def retry_run(site: Site, run: str) -> ChangedRun:
    """Let the service serve a failed run again."""
    return await site.change(lambda runs: runs.change(run, "retry"))


@routes.add("DELETE", "/runs/{run}", "admin")
async def remove_run(site: Site, run: str, force: bool = False, keep_mirrors: bool = False) -> list[Removal]:
    """Remove a run: its rows, its folder and its mirror."""
    return await site.change(lambda runs: runs.remove([run], force=force, keep_mirrors=keep_mirrors))


@routes.add("DELETE", "/runs", "admin")
async def remove_several(
    site: Site,
    run: Annotated[list[str], Query(min_length=1)],
    force: bool = False,
    keep_mirrors: bool = False,
) -> list[Removal]:
    """Remove all of these runs, or none."""
    names = list(dict.fromkeys(run))
    return await site.change(lambda runs: runs.remove(names, force=force, keep_mirrors=keep_mirrors))


@routes.add("POST", "/gc", "admin")
async def clean_runs(site: Site, body: Annotated[CleanUp, Depends(read_body(CleanUp))]) -> list[Removal]:
    """Remove runs and details beyond a policy, and unreferenced files."""
    policy = RetentionPolicy(**msgspec.structs.asdict(body))
    return await site.change(lambda runs: runs.clean_up(policy))
