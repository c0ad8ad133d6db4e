"""The audits of runs and of deployments, as operators read and verify them."""

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


def read_audit(runs: Path, deployment: Path | None, newest: int | None = None) -> list[AuditEntry]:
    """Return the entries of a deployment, or else of a folder of runs, or the newest of them; the oldest first."""
    if deployment is not None:
        with Deployment.open(deployment).registry.read() as rows:
            entries: list[AuditEntry] = rows.read_audit(newest)
            return entries
    store = open_existing_record(runs)
    try:
        return store.audit.read(newest)
    finally:
        store.close()


def check_audit(runs: Path, deployment: Path | None, expected: str | None = None) -> AuditVerdict:
    """Verify an audit. Raises Damaged, naming the first entry that is wrong."""
    entries = read_audit(runs, deployment)
    return AuditVerdict(entries=len(entries), digest=check_entries(entries, expected))
