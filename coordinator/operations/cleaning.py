"""Removal of runs and of what is no longer needed, with its traces in the audit."""

from collections.abc import Callable
from pathlib import Path

from coordinator.record.record import Record
from coordinator.record.retention import Removal, RetentionPolicy, collect


def clean_up(
    store: Record, folder: Path, policy: RetentionPolicy, report: Callable[[str], None] = lambda line: None
) -> list[Removal]:
    """Remove runs and details beyond a policy, and unreferenced files; compact the record if it has shrunk."""
    removed = list(collect(store, folder, policy, report=report))
    if removed and not policy.dry_run:
        names = sorted({entry.run or "" for entry in removed if entry.what == "run"})
        store.audit.add("gc", str(folder), f"{len(removed)} removals; runs: {', '.join(names) or 'none'}")
    if any(entry.what in ("run", "details") for entry in removed) and not policy.dry_run:
        store.database.compact()
    return removed
