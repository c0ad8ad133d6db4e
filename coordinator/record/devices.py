"""Devices of a record's runs: their totals, labels, logs and refusals."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from sqlalchemy import delete, func, select

from coordinator.record.closing import add_broken, read_devices
from coordinator.record.database import Database
from coordinator.record.rows import insert, replace
from coordinator.record.tables import (
    DEVICES,
    LABELS,
    LOGS,
    REFUSALS,
    RUNS,
    Announced,
    Asked,
    DeviceLog,
    DeviceRecord,
    DeviceTotals,
    RefusalRecord,
)

LOGS_KEPT = 20
"""Logs of one device in one run that are kept: more would let the device fill the disk."""


class RefusalCount(NamedTuple):
    """Equal refusals."""

    kind: str
    reason: str
    lost: bool  # nothing arrived
    times: int
    devices: int
    newest: str  # ISO 8601, UTC


class RecordedDevices:
    """Devices of all runs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, run: str, device: str) -> DeviceRecord:
        """Return the totals of one device from closed rounds; those of an unknown device are empty."""
        with self._database.transaction() as connection:
            return read_devices(connection, run, [device])[device]

    def read_all(self, run: str) -> list[DeviceRecord]:
        """Return the totals of all devices from closed rounds, by name."""
        query = select(DEVICES).where(DEVICES.c.run == run).order_by(DEVICES.c.device)
        return self._database.read(DeviceRecord, DEVICES, query)

    def read_totals(self, run: str) -> dict[str, DeviceTotals]:
        """Return totals by name, for display: without a check of their seals."""
        query = select(DEVICES.c.device, DEVICES.c.totals).where(DEVICES.c.run == run).order_by(DEVICES.c.device)
        with self._database.transaction() as connection:
            return {name: msgspec.convert(made or {}, DeviceTotals) for name, made in connection.execute(query)}

    def read_asked(self, run: str) -> dict[str, Asked]:
        """Return by device how often and when it was asked to train, in closed rounds."""
        query = select(DEVICES.c.device, DEVICES.c.last_asked, DEVICES.c.times_asked)
        rows = self._database.fetch(query.where(DEVICES.c.run == run, DEVICES.c.times_asked > 0))
        return {device: Asked(last, times) for device, last, times in rows}

    def set_announced(self, run: str, announced: Mapping[str, Announced]) -> None:
        """Store what devices announced."""
        if not announced:
            return
        with self._database.transaction() as connection:
            records = read_devices(connection, run, announced)
            changed = [msgspec.structs.replace(records[name], **new._asdict()) for name, new in announced.items()]
            replace(connection, DEVICES, [msgspec.to_builtins(record) for record in changed])

    def set_label(self, device: str, name: str, value: str | None) -> None:
        """Set a label of a device in all runs; None: its own is used again."""
        with self._database.transaction() as connection:
            connection.execute(delete(LABELS).where(LABELS.c.device == device, LABELS.c.name == name))
            if value is not None:
                connection.execute(LABELS.insert().values(device=device, name=name, value=value))

    def read_labels(self, device: str | None = None) -> dict[str, dict[str, str]]:
        """Return the labels that the operator set, by device; of one device or of all."""
        query = select(LABELS).order_by(LABELS.c.device, LABELS.c.name)
        if device is not None:
            query = query.where(LABELS.c.device == device)
        labels: dict[str, dict[str, str]] = {}
        for owner, name, value in self._database.fetch(query):
            labels.setdefault(owner, {})[name] = value
        return labels

    def add_log(self, log: DeviceLog) -> None:
        """Store the log of a device; of its logs in this run the newest LOGS_KEPT stay."""
        mine = (LOGS.c.run == log.run, LOGS.c.device == log.device)
        with self._database.transaction() as connection:
            insert(connection, LOGS, [log])
            newest = select(LOGS.c.id).where(*mine).order_by(LOGS.c.id.desc()).limit(LOGS_KEPT)
            connection.execute(delete(LOGS).where(*mine, LOGS.c.id.not_in(newest)))

    def read_logs(self, device: str, run: str | None = None) -> list[DeviceLog]:
        """Return logs of a device in one run or in all, the newest last."""
        query = select(LOGS).where(LOGS.c.device == device).order_by(LOGS.c.at, LOGS.c.id)
        if run is not None:
            query = query.where(LOGS.c.run == run)
        return self._database.read(DeviceLog, LOGS, query)

    def add_refusal(self, run: str, refusal: RefusalRecord) -> None:
        """Store a refusal, or something that never arrived."""
        with self._database.transaction() as connection:
            insert(connection, REFUSALS, [refusal], run=run)
            if refusal.broke:
                add_broken(connection, run, refusal.device, refusal.broke)

    def read_refusals(
        self, run: str, newest: int | None = None, *, round_number: int | None = None, device: str | None = None
    ) -> list[RefusalRecord]:
        """Return all refusals, or those of a round or a device, in order; `newest` limits their number."""
        query = select(REFUSALS).where(REFUSALS.c.run == run)
        if round_number is not None:
            query = query.where(REFUSALS.c.round == round_number)
        if device is not None:
            query = query.where(REFUSALS.c.device == device)
        query = query.order_by(REFUSALS.c.id if newest is None else REFUSALS.c.id.desc()).limit(newest)
        refusals = self._database.read(RefusalRecord, REFUSALS, query)
        return refusals if newest is None else refusals[::-1]

    def count_refusals(self, run: str, most: int) -> list[RefusalCount]:
        """Return equal refusals, counted by the database: the most frequent first, at most `most` of them."""
        alike = (REFUSALS.c.kind, REFUSALS.c.reason, REFUSALS.c.lost)
        times = func.count().label("times")
        query = select(*alike, times, func.count(REFUSALS.c.device.distinct()), func.max(REFUSALS.c.at))
        query = query.where(REFUSALS.c.run == run).group_by(*alike).order_by(times.desc(), REFUSALS.c.reason)
        return [RefusalCount(*row) for row in self._database.fetch(query.limit(most))]

    def count_refusals_since(self, run: str, at: str) -> int:
        """Return the number of refusals since a time (ISO 8601, UTC)."""
        query = select(func.count()).select_from(REFUSALS).where(REFUSALS.c.run == run, REFUSALS.c.at >= at)
        count: int = self._database.fetch_value(query)
        return count

    def find_newest_run(self, device: str) -> str | None:
        """Return the newest run in which a device took part; None if there is none."""
        query = select(RUNS.c.id).join(DEVICES, DEVICES.c.run == RUNS.c.id).where(DEVICES.c.device == device)
        newest = query.order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()).limit(1)
        run: str | None = self._database.fetch_value(newest)
        return run
