"""Facts of a service for an operator: leader and standbys, broker, record, store, disk, backups, certificates."""

import shutil
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from coordinator.record.leadership import ServiceHost
from coordinator.record.record import Record
from coordinator.rounds.service.status import ServiceStatus
from coordinator.security.authority import DAY_S
from coordinator.security.clock import LAST_S
from coordinator.security.folder import Deployment
from coordinator.security.own_certificates import read_end_s
from profiles.report.page import size

CERTIFICATES = ("authority", "broker", "coordinator")
"""Certificates of a deployment itself, in the order of its pages."""
_FILES = {"authority": "authority.pem", "broker": "server.pem", "coordinator": "coordinator.pem"}
NEWEST_BACKUPS = 5
LEAST_DISK_BYTES = 10**9
OLDEST_BACKUP_S = 172_800.0
LEAST_DAYS = 60
"""Days before the end of a certificate from which it is a problem."""


class RecordFacts(Struct, frozen=True):
    """The place of the record, and its facts about services and stores."""

    address: str  # of the database, without its password
    bytes: int | None  # of SQLite's file
    hosts: list[ServiceHost]  # connected to PostgreSQL now, the leader first
    stores: dict[str, int]  # URL of an object store -> runs that have not ended and use it


class NewestBackup(NamedTuple):
    """A backup by its name."""

    name: str
    age_s: float


class DiskSpace(NamedTuple):
    """Space of the disk with the runs."""

    free_bytes: int
    total_bytes: int


class Fact(NamedTuple):
    """One line about a service."""

    text: str
    tone: Literal["", "mild", "bad"] = ""


class ServiceFacts(NamedTuple):
    """The figures of the service page."""

    status: ServiceStatus | None  # None: none has served this folder
    record: RecordFacts
    disk: DiskSpace | None
    backups: list[NewestBackup]  # the newest first
    certificates: dict[str, float]  # of CERTIFICATES -> their ends, seconds since 1970

    def describe(self) -> dict[str, Fact]:
        """Describe the service in one line for each of its parts."""
        rows = {"Leader": self._describe_leader()}
        if self.record.hosts:
            standbys = [host.host for host in self.record.hosts if not host.leads]
            rows["Standbys"] = Fact(", ".join(standbys)) if standbys else Fact("none: nobody takes over", "mild")
        rows["Broker"] = self._describe_broker()
        rows["Record"] = Fact(
            self.record.address if self.record.bytes is None else f"SQLite, {size(self.record.bytes)}"
        )
        rows["Object store"] = Fact(", ".join(self.record.stores) or "none: files go over the broker")
        if self.disk:
            text = f"{size(self.disk.free_bytes)} free of {size(self.disk.total_bytes)}"
            rows["Disk"] = Fact(text, "bad" if self.disk.free_bytes < LEAST_DISK_BYTES else "")
        rows["Newest backup"] = self._describe_backup()
        rows["Certificates"] = self._describe_certificates()
        return rows

    def _describe_leader(self) -> Fact:
        leader = next((host.host for host in self.record.hosts if host.leads), None)
        if leader is None and self.status and self.is_here:
            leader = self.status.host
        if leader is None:
            return Fact("no service runs", "mild")
        term = f", term {self.status.term}" if self.status and self.status.term else ""
        return Fact(f"{leader}{term}")

    def _describe_broker(self) -> Fact:
        if self.status is None or not self.is_here:
            return Fact("–")
        return (
            Fact(self.status.broker) if self.status.connected else Fact(f"{self.status.broker}, not connected", "bad")
        )

    def _describe_backup(self) -> Fact:
        if self.status is None or not self.status.backup:
            return Fact("not planned: the service has no key backup", "mild")
        if not self.backups:
            return Fact(f"none in {self.status.backup}", "mild")
        age_s = self.backups[0].age_s
        return Fact(f"{rough(age_s)} old", "mild" if age_s > OLDEST_BACKUP_S else "")

    def _describe_certificates(self) -> Fact:
        if not self.certificates:
            return Fact("not known: --deployment names their folder")
        name, end_s = min(self.certificates.items(), key=lambda entry: entry[1])
        tone: Literal["", "bad"] = "bad" if count_days(end_s) < LEAST_DAYS else ""
        return Fact(f"valid until {show_date(end_s)} ({name})", tone)

    @property
    def is_served(self) -> bool:
        """Return whether a service is alive, here or on another host."""
        return self.is_here or any(host.leads for host in self.record.hosts)

    @property
    def is_here(self) -> bool:
        """Return whether a service writes its status into this folder now."""
        return self.status is not None and not self.status.is_stale()


def read_record_facts(store: Record) -> RecordFacts:
    """Read where the record is, and who uses it."""
    database, stores = store.database, Counter[str]()
    for record in store.runs.read_submitted():
        if url := record.config.get("blobs", {}).get("url"):
            stores[str(url)] += 1
    size = database.file.stat().st_size if database.file and database.file.is_file() else None
    return RecordFacts(database.address, size, database.services(), dict(stores))


def make_facts(
    record: RecordFacts, folder: Path, status: ServiceStatus | None, deployment: Deployment | None
) -> ServiceFacts:
    """Join the record's facts with those of the disk; `folder` is that of all runs."""
    backups = list_backups(Path(status.backup)) if status and status.backup else []
    certificates = read_ends(deployment) if deployment else {}
    return ServiceFacts(status, record, _read_disk(folder), backups, certificates)


def list_backups(folder: Path) -> list[NewestBackup]:
    """Return the newest backups of a folder, the newest first; none if it cannot be read from here."""
    now_s = time.time()
    try:
        files = [(file.stat().st_mtime, file.stem) for file in folder.glob("*.json")]
    except OSError:
        return []
    return [NewestBackup(name, max(0.0, now_s - at)) for at, name in sorted(files, reverse=True)[:NEWEST_BACKUPS]]


def read_ends(deployment: Deployment) -> dict[str, float]:
    """Return when the deployment's own certificates end, in seconds since 1970; those that cannot be read are left
    out."""
    ends = {name: read_end_s(deployment.folder / _FILES[name]) for name in CERTIFICATES}
    return {name: end_s for name, end_s in ends.items() if end_s is not None}


def show_date(seconds: float, form: str = "%Y-%m-%d") -> str:
    """Write a date, UTC; one beyond the calendar as its last day.

    >>> show_date(1767225600.0), show_date(1e12)
    ('2026-01-01', '9999-12-31')
    """
    return datetime.fromtimestamp(min(seconds, LAST_S), UTC).strftime(form)


def rough(seconds: float) -> str:
    """Write a time in one unit.

    >>> [rough(value) for value in (20, 250, 7300, 400_000)]
    ['20 s', '4 min', '2 h', '5 days']
    """
    for limit_s, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds / DAY_S:.0f} days"


def count_days(end_s: float) -> int:
    """Count the whole days until a time; negative if it is over."""
    return int((end_s - time.time()) // DAY_S)


def _read_disk(folder: Path) -> DiskSpace | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return DiskSpace(usage.free, usage.total)
