"""Backups and their restoration, with their traces in the audits."""

from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.opening import has_record, open_existing_record
from coordinator.security.folder import Deployment
from coordinator.serving.backup import Backup, BackupFolder, Report


class BackupLine(Struct, frozen=True, kw_only=True):
    """A backup without the list of its files."""

    name: str
    made_at: str  # ISO 8601, UTC
    software: str
    runs: list[str]
    mirrors: dict[str, str]  # run -> URL of the object store that it also writes
    deployment: str | None  # its folder when the backup was made
    new_bytes: int  # that earlier backups in the folder did not have
    files: int
    bytes: int


def describe(backup: Backup) -> BackupLine:
    """Return a backup without the list of its files."""
    shown = {name: value for name, value in msgspec.structs.asdict(backup).items() if name not in ("files", "v")}
    return BackupLine(**shown, files=len(backup.files), bytes=backup.bytes)


def make_backup(
    backups: BackupFolder, runs: Path | None, deployment: Path | None, keep: int | None, report: Report
) -> Backup:
    """Add a backup, and keep only the newest `keep`. Raises ConfigError if the backups would contain themselves."""
    backups.check_place(runs, deployment)
    made = backups.make(runs, deployment, report)
    for name in backups.keep_newest(keep) if keep else ():
        report(f"removed backup {name}")
    _note("backup", made.name, backups, runs, deployment)
    return made


def restore_backup(
    backups: BackupFolder,
    name: str | None,
    runs: Path | None,
    deployment: Path | None,
    *,
    url: str | None,
    keep_mirrors: bool,
) -> Backup:
    """Restore a backup, by default the newest, to new folders. Raises ConfigError if there is none."""
    backup = backups.find(name)
    backups.restore(backup, runs, deployment, url=url, keep_mirrors=keep_mirrors)
    _note("restore", backup.name, backups, runs, deployment)
    return backup


def _note(act: str, name: str, backups: BackupFolder, runs: Path | None, deployment: Path | None) -> None:
    place = str(backups.folder.absolute())
    if runs is not None and has_record(runs):
        with open_existing_record(runs, writes=True) as store:
            store.audit.add(act, name, place)
    if deployment is not None:
        with Deployment.open(deployment).registry.change() as rows:
            rows.add_audit(act, name, place)
