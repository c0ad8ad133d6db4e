"""The audit and the backups of the service of another machine, by its HTTP API."""

from pathlib import Path

from coordinator.operations.auditing import AuditVerdict
from coordinator.operations.backing_up import BackupLine
from coordinator.operations.remote import LONG_S
from coordinator.record.audit import KEPT, SLACK
from coordinator.record.tables import AuditEntry
from fedvit.client import Service


class RemoteAudit:
    """The audit of a service, as `LocalAudit`: of its deployment if `deployment` is anything, else of its runs."""

    def __init__(self, service: Service, deployment: Path | None) -> None:
        self._service, self._part = service, "deployment" if deployment else "runs"

    def read(self, newest: int | None = None) -> list[AuditEntry]:
        """Return the entries, or the newest of them, the oldest first."""
        query = {"of": self._part, "last": min(newest or KEPT + SLACK, KEPT + SLACK)}
        return self._service.ask(list[AuditEntry], "GET", "audit", query=query)

    def check(self, expected: str | None = None) -> AuditVerdict:
        """Let the server verify all entries, and that one has the digest `expected`."""
        query = {"of": self._part, "expect": expected}
        return self._service.ask(AuditVerdict, "GET", "audit", "verdict", query=query)


class RemoteBackups:
    """The backups of a service, in the folder that it was started with."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def list_all(self) -> list[BackupLine]:
        """Return the backups, the oldest first."""
        return self._service.ask(list[BackupLine], "GET", "backups")

    def make(self, keep: int | None) -> BackupLine:
        """Add a backup, and keep only the newest `keep`."""
        return self._service.ask(BackupLine, "POST", "backups", body={"keep": keep}, timeout_s=LONG_S)
