"""The same operations on the service of another machine, by its HTTP API."""

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.operations.documents import (
    ChangedRun,
    DeviceLabels,
    DeviceList,
    Done,
    RunActivity,
    ServiceOverview,
    SubmittedRun,
)
from coordinator.operations.runs import NEWEST
from coordinator.operations.submitting import Submission
from coordinator.record.retention import Removal, RetentionPolicy
from coordinator.record.tables import DeviceLog
from coordinator.rounds.service.run_requests import RunAct
from coordinator.run_view import RunLine, RunProgress, RunView, Standing, read_document
from fedvit.client import Service
from fedvit.labels import parse_label

_PAGE = 500
LONG_S = 3600.0
"""Longest wait for the answer of a clean-up or a backup."""


class RemoteRuns:
    """The runs of a service, as `LocalRuns`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def resolve(self, run: str | None) -> str:
        """Return the name of a run; None stands for the newest."""
        return run or self.read_progress(None).run

    def list_all(self) -> list[RunLine]:
        """List all runs, newest first, with the sizes of their folders."""
        sizes = self._service.get("sizes")["bytes"]
        entries: list[dict[str, Any]] = []
        while True:
            page = self._service.get("runs", offset=len(entries), limit=_PAGE)
            entries += page["runs"]
            if not page["runs"] or len(entries) >= page["total"]:
                break
        return [RunLine(**entry, bytes=sizes.get(entry["run"], 0)) for entry in entries]

    def read(self, run: str | None, accuracy_of: int | None = None) -> RunView:
        """Read a run, with accuracies by device of its newest `accuracy_of` rounds; None: of all."""
        return read_document(self._service.get("runs", run or NEWEST, "details", accuracy_rounds=accuracy_of))

    def read_progress(self, run: str | None) -> RunProgress:
        """Read the progress of a run."""
        return self._service.ask(RunProgress, "GET", "runs", run or NEWEST)

    def read_activity(self, run: str | None) -> RunActivity:
        """Read what a run waits for."""
        return self._service.ask(RunActivity, "GET", "runs", run or NEWEST, "activity")

    def read_service(self) -> ServiceOverview:
        """Read what the service does."""
        return self._service.ask(ServiceOverview, "GET", "service")

    def submit(self, asked: Submission) -> SubmittedRun:
        """Put a run into the queue of the service."""
        body = {"config": asked.values, "name": asked.name, "priority": asked.priority, "at": asked.starts_at}
        return self._service.ask(SubmittedRun, "POST", "runs", body=body)

    def change(self, run: str, act: RunAct) -> ChangedRun:
        """Cancel, pause, unpause or retry a run."""
        return self._service.ask(ChangedRun, "POST", "runs", run, act)

    def read_standings(self, run: str, released: Sequence[str] = ()) -> list[Standing]:
        """End the quarantine of devices and reset their strikes; list those that still have strikes."""
        if not released:
            return self._service.ask(list[Standing], "GET", "runs", run, "standings")
        return self._service.ask(list[Standing], "POST", "runs", run, "release", body={"devices": list(released)})

    def remove(self, runs: Sequence[str], *, force: bool = False, keep_mirrors: bool = False) -> list[Removal]:
        """Remove all of these runs or none; `force`: also if others started from them."""
        query = {"run": list(runs), "force": force, "keep_mirrors": keep_mirrors}
        return self._service.ask(list[Removal], "DELETE", "runs", query=query, timeout_s=LONG_S)

    def clean_up(self, policy: RetentionPolicy, report: Callable[[str], None] = lambda line: None) -> list[Removal]:
        """Remove runs and details beyond a policy, and unreferenced files; the server reports nothing meanwhile."""
        body = policy._asdict()
        return self._service.ask(list[Removal], "POST", "gc", body=body, timeout_s=LONG_S)

    def read_labels(self, device: str) -> DeviceLabels:
        """Read the labels of a device that an operator set."""
        return self._service.ask(DeviceLabels, "GET", "devices", device, "labels")

    def set_labels(self, device: str, labels: tuple[str, ...], removed: tuple[str, ...]) -> DeviceLabels:
        """Set labels, written NAME=VALUE, and remove others by name."""
        body = {"set": dict(map(parse_label, labels)), "remove": list(removed)}
        return self._service.ask(DeviceLabels, "PATCH", "devices", device, "labels", body=body)

    def label_all(self, devices: list[str], labels: tuple[str, ...], removed: tuple[str, ...]) -> list[DeviceLabels]:
        """Set and remove labels of devices, one after the other."""
        return [self.set_labels(device, labels, removed) for device in devices]

    def read_logs(self, device: str, run: str | None) -> list[DeviceLog]:
        """Read the logs that a device sent with its failures, of one run or of all; the newest last."""
        return self._service.ask(list[DeviceLog], "GET", "devices", device, "logs", query={"run": run})


class RemoteDevices:
    """The devices of a service, as `LocalDevices`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self, run: str | None = None, *, with_standings: bool = False) -> DeviceList:
        """List the devices; `with_standings` in a run, by default the newest."""
        query = {"run": run, "standings": "true" if with_standings else None}
        return self._service.ask(DeviceList, "GET", "devices", query=query)

    def revoke(self, device: str) -> Done:
        """Revoke a device, and wait until its connection has ended."""
        return self._service.ask(Done, "POST", "devices", device, "revoke")

    def revoke_all(self, devices: list[str]) -> Done:
        """Revoke devices, one after the other; the answer has the lines of `LocalDevices.revoke_all`."""
        answers = [self.revoke(device).lines for device in devices]
        notes = dict.fromkeys(note for lines in answers for note in lines[1:])
        return Done(lines=[*(lines[0] for lines in answers), *notes])
