"""The read model of a fleet: devices by site and state, runs under way, and the queue, over all runs or none."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from coordinator.record.liveness import STATUS_FILE
from coordinator.record.record import Record
from coordinator.record.tables import RunRecord, RunStatus
from coordinator.rounds.service.status import ServiceStatus
from coordinator.rounds.status import LiveStatus, Member, read_members, read_status
from coordinator.run_view import RunProgress, Standing, natural_order, read_progress, read_standings
from coordinator.security.expiry import is_ending
from coordinator.security.registry import JoinedDevice
from coordinator.views.service_facts import show_date
from fedvit.errors import ConfigError

SITE = "site"
"""Label by which devices are grouped."""
STATES = {
    "training": "works on a task now",
    "idle": "connected, has no task",
    "away": "not connected",
    "set aside": "not asked: it declined, or its policy does not allow the run",
    "quarantined": "excluded after results that were refused",
    "certificate ending": "its certificate has ended, or was not renewed in time",
}
"""States of a device, with their meanings for a legend."""
MINUTE = "%Y-%m-%d %H:%M"
ROUNDS_TIMED = 6
"""Newest rounds from which the time that is left is estimated."""


class ActiveRun(Struct, frozen=True):
    """A run that waits, runs, or was interrupted, as the record knows it."""

    progress: RunProgress
    openings: list[str]  # ISO 8601, UTC: beginnings of its newest rounds, the oldest first
    paused_at: str | None  # by the operator
    is_submitted: bool  # to a service
    standings: list[Standing]
    refusals: int  # within the last hour


class QueuedRun(Struct, frozen=True):
    """A run in the queue of a service."""

    run: str
    method: str
    model: str
    submitted_at: str | None


class FailedRun(Struct, frozen=True):
    """A run that failed."""

    run: str
    reason: str | None
    created_at: str


class FleetRecord(Struct, frozen=True):
    """The parts of the record that concern the whole fleet."""

    counts: dict[RunStatus, int]
    active: list[ActiveRun]  # the newest first
    queue: list[QueuedRun]  # the next first
    failed: list[FailedRun]  # the newest first
    labels: dict[str, dict[str, str]]  # by device, set by the operator
    newest: str | None  # run


class WorkingRun(NamedTuple):
    """A run that waits, runs, or was interrupted, with what its coordinator does."""

    run: ActiveRun
    status: LiveStatus | None  # None: nobody serves it now
    left_s: float | None  # estimate; None: unknown

    @property
    def doing(self) -> str:
        return self.status.doing if self.status else self.run.progress.status

    @property
    def working(self) -> int:
        """Devices with a task."""
        return sum(one.state != "offline" for one in self.status.waiting_for) if self.status else 0


class FleetDevice(NamedTuple):
    """A device of the fleet."""

    device: str
    site: str  # "": it has no such label
    state: str  # of STATES
    detail: str
    run: str | None  # the run that it belongs to, or belonged to last


class FleetView(NamedTuple):
    """The fleet at one time."""

    record: FleetRecord
    runs: list[WorkingRun]
    devices: list[FleetDevice]  # by site and name

    def count(self, state: str) -> int:
        """Count the devices in a state."""
        return sum(device.state == state for device in self.devices)

    def by_site(self) -> dict[str, list[FleetDevice]]:
        """Group the devices by site, those without one last."""
        sites: dict[str, list[FleetDevice]] = {}
        for device in self.devices:
            sites.setdefault(device.site, []).append(device)
        return sites


# --- the record -----------------------------------------------------------------------------------------


def read_fleet_record(store: Record) -> FleetRecord:
    """Read what the record has of the whole fleet."""
    records = store.runs.read_all()
    by_status: dict[str, list[RunRecord]] = {}
    for record in records:
        by_status.setdefault(record.status, []).append(record)
    begun = [*by_status.get("running", ()), *by_status.get("waiting", ()), *by_status.get("interrupted", ())]
    queue = sorted(by_status.get("queued", ()), key=lambda record: (record.submitted_at or "", record.id))
    return FleetRecord(
        store.runs.count(),
        [_read_active(store, record) for record in begun],
        [
            QueuedRun(one.id, str(one.config.get("method")), str(one.config.get("model")), one.submitted_at)
            for one in queue
        ],
        [FailedRun(one.id, one.reason, one.created_at) for one in by_status.get("failed", ())],
        store.devices.read_labels(),
        records[0].id if records else None,
    )


def _read_active(store: Record, record: RunRecord) -> ActiveRun:
    hour_ago = datetime.fromtimestamp(time.time() - 3600, UTC).isoformat(timespec="milliseconds")
    return ActiveRun(
        read_progress(store, record),
        store.rounds.list_openings(record.id, ROUNDS_TIMED),
        record.paused_at,
        record.submitted_at is not None,
        read_standings(store, record.id),
        store.devices.count_refusals_since(record.id, hour_ago),
    )


# --- files and certificates -----------------------------------------------------------------------------


def make_fleet(
    record: FleetRecord, folder: Path, service: ServiceStatus | None, joined: Mapping[str, JoinedDevice]
) -> FleetView:
    """Join the record with the small files in the folder of all runs, and with a deployment's devices by name."""
    runs = [_make_working(run, folder) for run in record.active]
    known = _Known(record.labels)
    if not runs and record.newest:
        known.add_members(read_members(folder / record.newest), record.newest, is_live=False)
    if service:
        for member in service.members:
            known.add(member.device, member.labels, member.run, is_online=member.online and not service.is_stale())
    for working in reversed(runs):  # the newest last, so that it decides
        name = working.run.progress.run
        known.add_members(read_members(folder / name), name, is_live=working.status is not None)
        known.add_standings(working)
    known.add_joined(joined)
    return FleetView(record, runs, known.list_devices())


def _make_working(run: ActiveRun, folder: Path) -> WorkingRun:
    status = None
    if run.progress.status != "interrupted":
        try:
            status = read_status(folder / run.progress.run)
        except ConfigError:
            status = None
        if status and status.is_stale():
            status = None
    stands = run.paused_at is not None or status is None or status.doing.startswith("paused")
    left_s = None if stands else estimate_left_s(run.openings, run.progress.rounds_planned - run.progress.rounds)
    return WorkingRun(run, status, left_s)


def estimate_left_s(openings: Sequence[str], further: int, now_s: float | None = None) -> float | None:
    """Estimate the seconds until a run ends: its typical round, times the `further` rounds after the open one.

    None if it has not begun three rounds.

    >>> estimate_left_s(["2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"], 2, 1767225740.0)
    160.0
    """
    begun = [datetime.fromisoformat(at).timestamp() for at in openings]
    if len(begun) < 3:
        return None
    typical_s = median(after - before for before, after in pairwise(begun))
    passed_s = (time.time() if now_s is None else now_s) - begun[-1]
    return typical_s * further + max(0.0, typical_s - passed_s)


class _Known:
    """Facts about each device, from several sources."""

    def __init__(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        self._labels = labels
        self._sites: dict[str, str] = {}
        self._states: dict[str, tuple[str, str]] = {}
        self._runs: dict[str, str | None] = {}

    def add(
        self, device: str, labels: Mapping[str, str], run: str | None, *, is_online: bool, detail: str = ""
    ) -> None:
        """Add a device that is online or not; a device that another source found online stays so."""
        self._sites[device] = self._labels.get(device, labels).get(SITE, labels.get(SITE, ""))
        if run or device not in self._runs:
            self._runs[device] = run
        if is_online:
            self._states[device] = ("idle", "connected, has no task")
        elif self._states.get(device, ("away",))[0] == "away":
            self._states[device] = ("away", detail or self._states.get(device, ("", "not connected"))[1])

    def add_members(self, members: Iterable[Member], run: str, *, is_live: bool) -> None:
        """Add the devices of a run."""
        for member in members:
            detail = f"last seen {member.seen.replace('T', ' ')[:16]} UTC"
            self.add(member.device, member.labels, run, is_online=member.online and is_live, detail=detail)

    def add_standings(self, working: WorkingRun) -> None:
        """Add what devices of a run do, and why some are not asked."""
        run, status = working.run.progress.run, working.status
        for one in status.waiting_for if status else ():
            away = one.state == "offline"
            does = f"{'trains' if one.kind == 'train' else 'tests'} in round {one.round}"
            self._set(one.device, run, "away" if away else "training", f"left while it {does}" if away else does)
        for off in status.backing_off if status else ():
            self._set(off.device, run, "set aside", f"declined: {off.reason}; asked again {off.until[11:16]} UTC")
        for device, what in status.set_aside.items() if status else ():
            self._set(device, run, "set aside", f"policy does not allow {what}")
        for standing in working.run.standings:
            if standing.quarantine:
                until = f", until round {standing.until_round}" if standing.until_round else ""
                self._set(standing.device, run, "quarantined", f"{standing.quarantine}{until}")

    def add_joined(self, joined: Mapping[str, JoinedDevice]) -> None:
        """Add the devices of a deployment, and mark certificates that end; leave out those that were revoked."""
        now_s = time.time()
        for name, device in joined.items():
            if device.revoked_at is not None:
                self._states.pop(name, None)
                continue
            if name not in self._states:
                seen = (
                    "never seen" if device.last_seen is None else f"last seen {show_date(device.last_seen, MINUTE)} UTC"
                )
                self.add(name, {}, None, is_online=False, detail=seen)
            if is_ending(device, now_s) and self._states[name][0] in ("idle", "away", "training"):
                verb = "ended" if device.expires_at < now_s else "ends"
                self._states[name] = (
                    "certificate ending",
                    f"its certificate {verb} {show_date(device.expires_at, MINUTE)} UTC",
                )

    def list_devices(self) -> list[FleetDevice]:
        """Return all devices by site and name."""
        devices = [
            FleetDevice(name, self._sites.get(name, ""), *state, self._runs.get(name))
            for name, state in self._states.items()
        ]
        return sorted(devices, key=lambda one: (not one.site, natural_order(one.site), natural_order(one.device)))

    def _set(self, device: str, run: str, state: str, detail: str) -> None:
        self._states[device] = (state, detail)
        self._runs[device] = run
        self._sites.setdefault(device, self._labels.get(device, {}).get(SITE, ""))


def was_written(folder: Path, run: str) -> float | None:
    """Return when the status of a run was last written, in seconds since 1970; None if never."""
    try:
        return (folder / run / STATUS_FILE).stat().st_mtime
    except OSError:
        return None
