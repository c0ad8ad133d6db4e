"""The runs of a folder, as operators look at them and change them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.operations.documents import BegunRun, ChangedRun, DeviceLabels, RunActivity, ServiceOverview
from coordinator.record.liveness import current_status
from coordinator.record.opening import newest_run
from coordinator.record.record import Record
from coordinator.record.retention import SERVICE_LOCK, Removal, RetentionPolicy, collect, is_served, remove_runs
from coordinator.record.tables import DeviceLog, RunRecord
from coordinator.rounds.service.labelling import set_labels
from coordinator.rounds.service.run_requests import RunAct, change_run, release
from coordinator.rounds.service.status import read_service_status
from coordinator.rounds.status import read_status
from coordinator.run_view import (
    RunLine,
    RunProgress,
    RunView,
    Standing,
    list_runs,
    read_head,
    read_progress,
    read_run,
    read_standings,
)
from fedvit.errors import ConfigError

NEWEST = "~newest"
"""Stands for the newest run; no run can have this name."""


def clean_up(
    store: Record, folder: Path, policy: RetentionPolicy, report: Callable[[str], None] = lambda line: None
) -> list[Removal]:
    """Remove runs and details beyond a policy, and unreferenced files; compact the record if it has shrunk.

    The record of runs that are served stays as large, since they could not write meanwhile; it uses the space again.
    """
    removed = list(collect(store, folder, policy, report=report))
    if removed and not policy.dry_run:
        names = sorted({entry.run or "" for entry in removed if entry.what == "run"})
        store.audit.add("gc", str(folder), f"{len(removed)} removals; runs: {', '.join(names) or 'none'}")
    has_shrunk = any(entry.what in ("run", "details") for entry in removed) and not policy.dry_run
    served = is_served(folder, SERVICE_LOCK) or any(is_served(folder / run.id) for run in store.runs.read_all())
    if has_shrunk and not served:
        store.database.compact()
    return removed


class LocalRuns:
    """Operations on an open record and its folder. They raise ConfigError, for example if there is no such run."""

    def __init__(self, store: Record, folder: Path) -> None:
        self._store, self._folder = store, folder

    def resolve(self, run: str | None) -> str:
        """Return the name of a run; None and `NEWEST` stand for the newest."""
        return newest_run(self._store, self._folder) if run in (None, NEWEST) else run

    def list_all(self) -> list[RunLine]:
        """List all runs, newest first, with the sizes of their folders."""
        return list_runs(self._store, self._folder)

    def read(self, run: str | None, accuracy_of: int | None = None) -> RunView:
        """Read a run, with accuracies by device of its newest `accuracy_of` rounds; None: of all."""
        return read_run(self._store, self.resolve(run), accuracy_of=accuracy_of)

    def read_progress(self, run: str | None) -> RunProgress:
        """Read the progress of a run."""
        return read_progress(self._store, self._store.runs.read(self.resolve(run)))

    def read_activity(self, run: str | None) -> RunActivity:
        """Read what a run waits for. Raises ConfigError if it is not queued, and nobody has served it."""
        record = self._store.runs.read(self.resolve(run))
        head, submitted = read_head(self._store, record), record.submitted_at is not None
        if record.status == "queued":
            return RunActivity(head=head, submitted=submitted, live=None)
        live = read_status(self._folder / record.id)
        return RunActivity(head=head, submitted=submitted, live=live, stale=live.is_stale())

    def read_service(self) -> ServiceOverview:
        """Read what the service of the folder does."""
        status, submitted = read_service_status(self._folder), self._store.runs.read_submitted()
        return ServiceOverview(
            status=status,
            alive=status is not None and not status.is_stale(),
            queued=[record.id for record in submitted if record.status == "queued"],
            begun=[
                BegunRun(run=record.id, doing=self._describe(record))
                for record in submitted
                if record.status != "queued"
            ],
            hosts=self._store.database.services(),
        )

    def change(self, run: str, act: RunAct) -> ChangedRun:
        """Cancel, pause, unpause or retry a run."""
        done = change_run(self._store, self._folder, run, act)
        record = self._store.runs.read(run)
        return ChangedRun(run=run, status=record.status, paused_at=record.paused_at, done=done)

    def read_standings(self, run: str, released: Sequence[str] = ()) -> list[Standing]:
        """End the quarantine of devices and reset their strikes; list those that still have strikes."""
        name = self._store.runs.read(self.resolve(run)).id
        for device in released:
            release(self._store, name, device)
        return read_standings(self._store, name)

    def remove(self, runs: Sequence[str], *, force: bool = False, keep_mirrors: bool = False) -> list[Removal]:
        """Remove all of these runs or none: rows, folders, and mirrors; `force`: also if others started from them."""
        return remove_runs(self._store, self._folder, list(runs), force=force, keep_mirrors=keep_mirrors)

    def clean_up(self, policy: RetentionPolicy, report: Callable[[str], None] = lambda line: None) -> list[Removal]:
        """Remove runs and details beyond a policy, and unreferenced files."""
        return clean_up(self._store, self._folder, policy, report)

    def read_labels(self, device: str) -> DeviceLabels:
        """Read the labels of a device that an operator set."""
        return DeviceLabels(device=device, labels=self._store.devices.read_labels(device).get(device, {}))

    def set_labels(self, device: str, labels: tuple[str, ...], removed: tuple[str, ...]) -> DeviceLabels:
        """Set labels, written NAME=VALUE, and remove others by name."""
        return self.label_all([device], labels, removed)[0]

    def label_all(self, devices: list[str], labels: tuple[str, ...], removed: tuple[str, ...]) -> list[DeviceLabels]:
        """Set and remove labels of devices, as `set_labels`; of all of them or of none."""
        set_labels(self._store, devices, labels, removed)
        return list(map(self.read_labels, devices))

    def read_logs(self, device: str, run: str | None) -> list[DeviceLog]:
        """Read the logs that a device sent with its failures, of one run or of all; the newest last."""
        if run is not None:
            self._store.runs.read(run)
        return self._store.devices.read_logs(device, run)

    def _describe(self, record: RunRecord) -> str:
        try:
            doing = read_status(self._folder / record.id).doing
        except ConfigError:
            return "begins"
        return "interrupted" if current_status(self._store, record) == "interrupted" else doing
