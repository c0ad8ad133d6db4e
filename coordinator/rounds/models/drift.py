"""Reactions to drift that devices report: an alert for each device, and a run by rule."""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from coordinator.config import AlertsConfig
from coordinator.record.audit import acting_as
from coordinator.record.record import Record
from coordinator.rounds.alerts import Alerts
from coordinator.rounds.models.keeper import describe_drift
from coordinator.rounds.models.requests import RULE
from fedvit.errors import ConfigError
from fedvit.quantities import format_count

log = logging.getLogger(__name__)

NAME = "drift-"
"""Beginning of the names of runs that the rule starts."""


class DriftRule(NamedTuple):
    """Start a run when pictures have drifted on some devices."""

    config: Mapping[str, Any]  # of the run
    devices: int
    every_h: float  # between two runs


class DriftWatcher:
    """Acts on the drift of devices' pictures. It belongs to one thread."""

    def __init__(self, store: Record, rule: DriftRule | None, operator_log: Callable[[str], None]) -> None:
        self._store = store
        self._rule = rule
        self._operator_log = operator_log
        self._alerts: dict[str, Alerts] = {}  # by run

    def on_drift(self, device: str, model: str) -> None:
        """Send an alert to the webhook of the model's run, or of the environment."""
        run = self._store.models.read(model).run
        if run not in self._alerts:
            self._alerts[run] = Alerts(run, self._read_alerts(run))
        self._alerts[run].send("drift", describe_drift(device, model), device)

    def look(self) -> None:
        """Submit the run of the rule if enough devices report drift, and there was none for some time."""
        rule = self._rule
        if rule is None or (drifted := self._store.models.count_drifted()) < rule.devices:
            return
        since = (datetime.now(UTC) - timedelta(hours=rule.every_h)).isoformat(timespec="milliseconds")
        newest = next((record for record in self._store.runs.read_all() if record.id.startswith(NAME)), None)
        if newest and (newest.created_at > since or newest.status in ("queued", "waiting", "running", "interrupted")):
            return
        run, reason = f"{NAME}{datetime.now():%Y%m%d-%H%M%S}", f"pictures of {format_count(drifted, 'device')} drifted"
        with acting_as(RULE), self._store.database.together():
            self._store.audit.add("submit", run, reason)
            self._store.runs.submit(run, dict(rule.config))
        log.info("run submitted", extra={"run": run, "drifted": drifted})
        self._operator_log(f"run {run} is submitted: {reason}")

    def close(self) -> None:
        """Send the last alerts."""
        for alerts in self._alerts.values():
            alerts.close()

    def _read_alerts(self, run: str) -> AlertsConfig:
        try:
            values = self._store.runs.read(run).config.get("alerts", {})
            return msgspec.convert(values, AlertsConfig)
        except (ConfigError, msgspec.ValidationError):  # the run is removed
            return AlertsConfig()
