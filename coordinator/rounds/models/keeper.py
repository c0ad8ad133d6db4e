"""Keeps devices' models in the states that the record wants: sends them, takes reports, and applies the rules.

Wanted states are in the record before they are sent, and a device applies them again and again with the same outcome.
After kill -9 of any program the states converge after the next welcome.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from coordinator.record.record import Record
from coordinator.record.tables import DeviceModelRecord, ModelRecord, now
from coordinator.rounds.isolation import ends_run
from coordinator.rounds.models.requests import promote_canary, read_rules, roll_back_by_rule
from coordinator.rounds.models.rules import Wanted, judge_canary
from fedvit.terminal import escape_line
from fedvit.wire.messages import MAX_MODELS, ModelReport, Models

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Interval of looking for changes in the record."""
AGAIN_S = 60.0
"""Least interval of sending wanted states again to a device that is not there yet: its disk may have been full."""
JUDGE_S = 5.0
"""Interval of judging canaries that have reported nothing new."""
SUMS_S = 10.0
"""Least interval of storing sums that a device reports."""
REPORTS, REPORT_S = 20, 0.5
"""Reports of a device that are stored at once, and the time after which there is room for another: each is a commit."""


class ModelKeeper:
    """The models of all devices that one process serves. It belongs to one thread.

    `send(device, message)` sends a device its wanted states in the link's `epoch()`; `report(line)` prints a line for
    the operator.
    """

    def __init__(
        self,
        store: Record,
        send: Callable[[str, Models], None],
        epoch: Callable[[], int],
        report: Callable[[str], None],
    ) -> None:
        self._store = store
        self._send = send
        self._epoch = epoch
        self._report = report
        self.on_drift: Callable[[str, str], None] = lambda device, model: None
        """Called when a device reports that its pictures have drifted from those of a model."""
        self._instances: dict[str, str] = {}  # by device that was welcomed
        self._sent: dict[str, tuple[Wanted, float]] = {}  # by device: the newest states, and when they were sent
        self._summed_at: dict[str, float] = {}  # by device
        self._full_at: dict[str, float] = {}  # by device: when there is room for REPORTS reports again
        self._act = store.models.find_newest_act()
        self._looked_at = time.monotonic()
        self._judged_at: float | None = None  # None: a device has reported since
        self._sent_again_at = time.monotonic()

    def welcome(self, device: str, instance: str) -> None:
        """Send a device that was welcomed its wanted states, if it has any."""
        self._instances[device] = instance
        self._sent.pop(device, None)
        if self._act:
            self._send_states(device, self._store.models.read_devices(device=device))

    def forget(self, device: str) -> None:
        """Send a device nothing until it is welcomed again."""
        self._instances.pop(device, None)

    def take(self, device: str, report: ModelReport) -> None:
        """Take a report where nothing else isolates devices: an error of this side is of this device alone."""
        try:
            self.on_report(device, report)
        except Exception as error:
            if ends_run(error):
                raise
            log.error("error in handling a report", extra={"device": device}, exc_info=error)

    def on_report(self, device: str, report: ModelReport) -> None:
        """Store the actual states of a device's models. A model that failed is rolled back."""
        if report.instance != self._instances.get(device):
            return  # of an earlier process, whose states may be older
        rows = self._store.models.read_devices(device=device)
        changed = [new for row in rows if (new := _apply(row, report)) != row]
        if not changed:
            return
        now_s = time.monotonic()
        full_at = max(now_s, self._full_at.get(device, now_s)) + REPORT_S
        if full_at > now_s + REPORTS * REPORT_S:
            return  # its states are asked for again, as they are not what they are to be
        if all(_is_sum(new, row) for new, row in zip(changed, _before(rows, changed), strict=True)):
            if now_s - self._summed_at.get(device, -SUMS_S) < SUMS_S:
                return
            self._summed_at[device] = now_s
        self._full_at[device] = full_at
        self._judged_at = None
        self._store.models.write_devices(changed)
        for row in changed:
            if row.actual == "canary" and self._store.models.read(row.model).canary_since is None:
                self._store.models.change(row.model, canary_since=now())
            log.info("model reported", extra={"device": device, "model": row.model, "state": row.actual or "none"})
        for row, before in zip(changed, _before(rows, changed), strict=True):
            if row.drifted_since and not before.drifted_since:
                self._report_line(describe_drift(device, row.model))
                self.on_drift(device, row.model)
        for row in changed:
            if row.failed and row.wanted in ("canary", "champion"):
                whom = None if row.wanted == "canary" else [device]
                self._report_line(roll_back_by_rule(self._store, row.model, f"{device}: {row.reason}"[:500], whom))
        self._send_states(device, self._store.models.read_devices(device=device), only_new=True)

    def tick(self) -> None:
        """Apply the rules, and send what has changed; to be called often."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        self.look()

    def look(self) -> None:
        """Apply the rules now, and send what has changed."""
        act = self._store.models.find_newest_act()
        if not act:
            return
        if self._judged_at is None or time.monotonic() - self._judged_at >= JUDGE_S:
            self._judged_at = time.monotonic()
            for model in self._store.models.read_all("canary"):
                self._judge(model)
        newest = self._store.models.find_newest_act()
        if newest != self._act or time.monotonic() - self._sent_again_at >= AGAIN_S:
            self._act, self._sent_again_at = newest, time.monotonic()
            by_device: dict[str, list[DeviceModelRecord]] = {}
            for row in self._store.models.read_devices():
                by_device.setdefault(row.device, []).append(row)
            for device in self._instances:
                self._send_states(device, by_device.get(device, []), only_new=True)

    def is_settled(self) -> bool:
        """Return whether the models of all devices that were welcomed are in their wanted states."""
        rows = self._store.models.read_devices()
        return all(_is_there(row) for row in rows if row.device in self._instances)

    def _judge(self, model: ModelRecord) -> None:
        models = self._store.models
        canaries = [row for row in models.read_devices(model.name) if row.wanted == "canary"]
        others = models.read_devices(devices=[row.device for row in canaries])
        champions = {row.device: row for row in others if row.wanted == "champion"}
        since_s = None
        if model.canary_since:
            since_s = (datetime.now(UTC) - datetime.fromisoformat(model.canary_since)).total_seconds()
        outcome, reason = judge_canary(canaries, champions, since_s, read_rules(model))
        if outcome == "passes":
            self._report_line(promote_canary(self._store, model.name, reason))
        elif outcome == "fails":
            self._report_line(roll_back_by_rule(self._store, model.name, reason))

    def _report_line(self, line: str) -> None:
        if line:
            self._report(escape_line(line))  # it may quote a device, which must not forge a line

    def _send_states(self, device: str, rows: list[DeviceModelRecord], *, only_new: bool = False) -> None:
        """Send a device its wanted states; with `only_new` if they have changed, or it is late to take them."""
        instance = self._instances.get(device)
        shown = [row for row in rows if row.wanted and not (row.wanted == "retired" and row.actual is None)]
        newest = sorted(shown, key=lambda row: (row.wanted == "retired", row.changed_at, row.model))[:MAX_MODELS]
        states: Wanted = {row.model: row.wanted for row in newest if row.wanted}
        before, sent_at = self._sent.get(device, ({}, -AGAIN_S))
        if instance is None or not (states or before):
            return
        late = time.monotonic() - sent_at >= AGAIN_S and not all(map(_is_there, rows))
        if only_new and states == before and not late:
            return
        self._sent[device] = states, time.monotonic()
        self._send(device, Models(instance, self._epoch(), states))


def describe_drift(device: str, model: str) -> str:
    """Describe drift that a device reports."""
    return f"pictures of {device} have drifted from those of model {model}"


def _apply(row: DeviceModelRecord, report: ModelReport) -> DeviceModelRecord:
    """Return what a report says about a model."""
    actual = report.states.get(row.model)
    failed = report.failed == row.model
    new = msgspec.structs.replace(row, actual=actual, failed=failed or row.failed)
    if failed or (actual != row.wanted and row.wanted and report.reason):
        new = msgspec.structs.replace(new, reason=report.reason)
    if report.serving == row.model:
        new = msgspec.structs.replace(new, answered=report.answered, confidence=report.confidence)
    has_changed = new != row and not _is_sum(new, row)
    has_drifted = report.has_drifted and report.serving == row.model
    new = msgspec.structs.replace(new, drifted_since=(row.drifted_since or now()) if has_drifted else None)
    return msgspec.structs.replace(new, changed_at=now()) if has_changed else new


def _before(rows: list[DeviceModelRecord], changed: list[DeviceModelRecord]) -> list[DeviceModelRecord]:
    by_model = {row.model: row for row in rows}
    return [by_model[row.model] for row in changed]


def _is_sum(new: DeviceModelRecord, row: DeviceModelRecord) -> bool:
    """Return whether only the sums of a model on a device have changed."""
    return msgspec.structs.replace(new, answered=row.answered, confidence=row.confidence) == row


def _is_there(row: DeviceModelRecord) -> bool:
    """Return whether a model has its wanted state; one that the device does not have, or that failed, never will."""
    if row.wanted is None or row.failed:
        return True
    return row.actual is None or row.actual == row.wanted
