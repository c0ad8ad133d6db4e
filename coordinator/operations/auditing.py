"""The audits of runs and of deployments, as operators read and verify them."""

from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from coordinator.record.audit import check_entries
from coordinator.record.opening import open_existing_record
from coordinator.record.tables import AuditEntry
from coordinator.security.folder import Deployment


class AuditVerdict(Struct, frozen=True, kw_only=True):
    """An audit whose digests are right."""

    entries: int
    digest: str  # the newest; "": there is no entry


@dataclass(frozen=True)
class LocalAudit:
    """The audit of a deployment, or else of a folder of runs."""

    runs: Path
    deployment: Path | None

    def read(self, newest: int | None = None) -> list[AuditEntry]:
        """Return the entries, or the newest of them, the oldest first."""
        if self.deployment is not None:
            with Deployment.open(self.deployment).registry.read() as rows:
                entries: list[AuditEntry] = rows.read_audit(newest)
                return entries
        with open_existing_record(self.runs) as store:
            return store.audit.read(newest)

    def check(self, expected: str | None = None) -> AuditVerdict:
        """Verify all entries, and that one has the digest `expected`. Raises Damaged, naming the first wrong entry."""
        entries = self.read()
        return AuditVerdict(entries=len(entries), digest=check_entries(entries, expected))
