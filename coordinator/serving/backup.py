"""Backups of all that a coordinator keeps on its disk: the record, the files of its runs, and its deployment.

A backup is a list of files by path. Their contents are blobs, which all backups in a folder share: an unchanged file
takes no further space. The record is copied by its database, while runs are served. Blobs are copied before it, and
those that the copied record needs once more after it, so that a run continues exactly from there.
"""

import logging
import math
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct

from coordinator.compute.integrity import essential
from coordinator.record.copies import COPIES, NOTES
from coordinator.record.database import ADDRESS_FILE, DATABASE_FILE
from coordinator.record.opening import has_record, open_existing_record
from coordinator.record.record import Record, open_record
from coordinator.record.retention import BLOBS, LOCK, SERVICE_LOCK, is_served
from coordinator.record.sqlite_errors import convert_error
from coordinator.serving.restored_runs import adapt_runs, move_record
from fedvit.blobs import ALGORITHM, BlobStore, digest_of_file
from fedvit.errors import BadPayload, ConfigError, Damaged, StorageFailed
from fedvit.files import (
    WRITING,
    atomic_write,
    folder_bytes,
    hold_lock,
    name_failure,
    storage_failed,
    sync_file,
    sync_folder,
)
from fedvit.partials import PART

log = logging.getLogger(__name__)

Report = Callable[[str], None]
VERSION = 1
ATTEMPTS = 5
"""Copies of the record that are made at most, since a run may remove what a copy needs."""
_NAME = "%Y%m%dT%H%M%SZ"
RUNS, DEPLOYMENT = "runs", "deployment"
"""First parts of the paths of a backup."""
_SKIPPED = {COPIES, NOTES, LOCK, SERVICE_LOCK, ADDRESS_FILE, "broker", "run"}
"""Files and folders that only a process at work needs, or that belong to one record."""
_SKIPPED_ENDS = (".log", PART, "-wal", "-shm", "-journal", ".sock", ".pid")


class BackedUpFile(Struct, frozen=True):
    digest: str
    size: int


class Backup(Struct, frozen=True, kw_only=True):
    """One backup: what its folder holds under its name."""

    name: str
    made_at: str  # ISO 8601, UTC
    software: str
    files: dict[Annotated[str, Meta(min_length=1)], BackedUpFile]  # by path: runs/... and deployment/...
    runs: list[str] = []
    mirrors: dict[str, str] = {}  # run -> URL of the object store that it also writes
    deployment: str | None = None  # its folder when the backup was made
    new_bytes: int = 0  # that earlier backups in the folder did not have
    v: int = VERSION

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.size for file in self.files.values())


class BackupFolder:
    """A folder with backups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = BlobStore(folder / BLOBS)

    def list_all(self) -> list[Backup]:
        """Return the backups, the oldest first. Raises ConfigError if one cannot be read."""
        return [self._read(file) for file in sorted(self.folder.glob("*.json"))]

    def age_s(self) -> float:
        """Return the seconds since the newest backup was made; infinite if there is none."""
        newest = max((file.stat().st_mtime for file in self.folder.glob("*.json")), default=-math.inf)
        return max(0.0, time.time() - newest)

    def find(self, name: str | None) -> Backup:
        """Return a backup by its name, or the newest. Raises ConfigError if there is none."""
        names = [file.stem for file in sorted(self.folder.glob("*.json"))]
        if not names or (name and name not in names):
            there = f"; there are {', '.join(names)}" if names else ""
            raise ConfigError("FV1631", f"there is no backup {name or ''} in {self.folder}{there}".replace("  ", " "))
        return self._read(self.folder / f"{name or names[-1]}.json")

    def _read(self, file: Path) -> Backup:
        try:
            backup = msgspec.json.decode(file.read_bytes(), type=Backup)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("FV1632", f"backup {file} cannot be read: {error}") from error
        if backup.v > VERSION:
            raise ConfigError("FV1632", f"backup {file} was made by a newer version, fedvit {backup.software}")
        return backup

    def check_place(self, *kept: Path | None) -> None:
        """Raise ConfigError if the backups would be inside of a folder that they keep."""
        for folder in kept:
            if folder and self.folder.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    "FV1631", f"backups in {self.folder} would contain themselves: it is inside of {folder}"
                )

    # --- making ---------------------------------------------------------------------------------------

    def make(self, runs: Path | None, deployment: Path | None, report: Report = lambda line: None) -> Backup:
        """Make a backup of a folder of runs and of a deployment, also while they are served.

        Raises StorageFailed if something cannot be read or written, or runs remove files faster than they are copied.
        """
        with self._hold(), name_failure(f"cannot write a backup to {self.folder}"):
            return self._make(runs, deployment, report)

    def _make(self, runs: Path | None, deployment: Path | None, report: Report) -> Backup:
        before = folder_bytes(self.blobs.folder)
        files: dict[str, BackedUpFile] = {}
        mirrors: dict[str, str | None] = {}
        if deployment:
            files |= self._keep_files(deployment, DEPLOYMENT)
        if runs:
            files |= self._keep_runs(runs, mirrors, report)
        now = datetime.now(UTC)
        backup = Backup(
            name=self._choose_name(now),
            made_at=now.isoformat(timespec="seconds"),
            software=version("fedvit"),
            files=dict(sorted(files.items())),
            runs=sorted(mirrors),
            mirrors={run: url for run, url in mirrors.items() if url},
            deployment=str(deployment.resolve()) if deployment else None,
            new_bytes=folder_bytes(self.blobs.folder) - before,
        )
        for folder in {self.blobs.path(file.digest).parent for file in files.values()}:
            sync_folder(folder)
        atomic_write(self.folder / f"{backup.name}.json", msgspec.json.encode(backup), private=True)
        return backup

    def _choose_name(self, now: datetime) -> str:
        """Return a name after those of all backups: the newest is the last one, also if the clock went back."""
        for file in self.folder.glob("*.json"):
            with suppress(ValueError):
                now = max(now, datetime.strptime(file.stem, _NAME).replace(tzinfo=UTC) + timedelta(seconds=1))
        return now.strftime(_NAME)

    def keep_newest(self, count: int) -> list[str]:
        """Remove all backups but the newest, and what only they have; return the names of those that were removed."""
        with self._hold():
            backups = self.list_all()
            old = backups[: max(0, len(backups) - count)]
            for backup in old:
                (self.folder / f"{backup.name}.json").unlink()
            if old:
                self.blobs.prune(keep={file.digest for backup in backups[-count:] for file in backup.files.values()})
        return [backup.name for backup in old]

    @contextmanager
    def _hold(self) -> Iterator[None]:
        """Wait until no other process changes the folder, and remove what a killed one has left."""
        with name_failure(f"cannot use folder {self.folder}"):
            self.blobs.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
        with hold_lock(self.folder / LOCK):  # a blob of an unfinished backup is in no list yet
            with name_failure(f"cannot use folder {self.folder}"):
                for rest in self.folder.glob(f"{WRITING}*"):
                    shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
            yield

    def _keep_runs(self, folder: Path, mirrors: dict[str, str | None], report: Report) -> dict[str, BackedUpFile]:
        if not has_record(folder):
            raise ConfigError("FV1601", f"no runs in {folder.resolve()}: there is neither fedvit.db nor record.url")
        lacking: dict[str, str] = {}
        for attempt in range(1, ATTEMPTS + 1):
            files = self._keep_files(folder, RUNS)
            with self._make_room() as place:
                copy = Path(place) / DATABASE_FILE
                with open_existing_record(folder) as live:
                    live.database.back_up(copy)
                with open_record(Path(place), check=False) as record:
                    needed = dict(_list_needed(record))
                    mirrors |= dict(_list_mirrors(record))
                lacking = {digest: run for digest, run in needed.items() if not self._keep_blob(folder, run, digest)}
                for run in sorted({run for run in lacking.values() if not is_served(folder / run)}):
                    report(f"warning: run {run} lacks files of its own, and could not continue: it is kept as it is")
                    lacking = {digest: other for digest, other in lacking.items() if other != run}
                if not lacking:
                    kept = {
                        _blob_path(run, digest): self._file_of(digest)
                        for digest, run in needed.items()
                        if self.blobs.has(digest)
                    }
                    return files | kept | {f"{RUNS}/{DATABASE_FILE}": self._keep(copy)}
            report(f"runs have moved on: copying the record again ({attempt} of {ATTEMPTS})")
        run = next(iter(lacking.values()))
        raise StorageFailed("FV1633", f"run {run} removes files faster than they can be copied to {self.folder}")

    def _keep_files(self, folder: Path, root: str) -> dict[str, BackedUpFile]:
        """Keep the files of a folder, without those of a process at work, and return them by path."""
        kept = {}
        for path in _walk(folder):
            name = f"{root}/{path.relative_to(folder).as_posix()}"
            try:
                if path.suffix == ".db" and root == DEPLOYMENT:
                    kept[name] = self._keep_database(path)
                elif path.parent.parent.name == BLOBS:
                    digest = f"{ALGORITHM}:{path.name}"
                    kept[name] = self._file_of(digest) if self.blobs.has(digest) else self._keep(path, digest)
                elif path.name != DATABASE_FILE:
                    kept[name] = self._keep(path)
            except FileNotFoundError:  # a run has removed it meanwhile
                continue
            except BadPayload as error:
                log.warning("a damaged file is not in the backup", extra={"path": str(path), "reason": str(error)})
            except OSError as error:
                raise storage_failed(f"cannot copy {path} to {self.folder}", error) from error
        return kept

    def _keep_blob(self, folder: Path, run: str, digest: str) -> bool:
        """Return whether a blob of a run is in the backup now."""
        if not self.blobs.has(digest):
            with suppress(FileNotFoundError, BadPayload):
                self._keep(BlobStore(folder / run / BLOBS).path(digest), digest)
        return self.blobs.has(digest)

    def _make_room(self) -> "TemporaryDirectory[str]":
        """Make a folder for a copy of a database, on the disk of the backups."""
        return TemporaryDirectory(prefix=WRITING, dir=self.folder)

    def _keep_database(self, path: Path) -> BackedUpFile:
        """Keep a database of SQLite as it is between two transactions. Raises StorageFailed."""
        with self._make_room() as place:
            copy = Path(place) / path.name
            with (
                closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as live,
                closing(sqlite3.connect(copy)) as new,
            ):
                try:
                    live.backup(new)
                except sqlite3.Error as error:
                    raise convert_error(error, f"cannot copy {path} to {self.folder}", None) from error
            return self._keep(copy)

    def _keep(self, path: Path, expected: str | None = None) -> BackedUpFile:
        """Copy a file, and return it. Raises BadPayload if its digest is not the expected one, OSError."""
        partial = self.folder / f"{WRITING}{secrets.token_hex(8)}"
        try:
            with path.open("rb") as file, open(partial, "xb", opener=_open_private) as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
            digest = digest_of_file(partial)
            if expected not in (None, digest):
                raise BadPayload("FV2303", f"{path} is damaged: its digest is {digest}")
            if not self.blobs.has(digest):
                sync_file(partial)
                target = self.blobs.path(digest)
                target.parent.mkdir(exist_ok=True, mode=0o700)
                os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        return self._file_of(digest)

    def _file_of(self, digest: str) -> BackedUpFile:
        return BackedUpFile(digest, self.blobs.path(digest).stat().st_size)

    # --- restoring ------------------------------------------------------------------------------------

    def restore(
        self,
        backup: Backup,
        runs: Path | None,
        deployment: Path | None,
        *,
        url: str | None = None,
        keep_mirrors: bool = False,
    ) -> None:
        """Write a backup's files to new folders; each appears completely or not at all.

        A run whose files were also in an object store no longer writes there, unless `keep_mirrors`: its original
        might. With `url` the record is kept in that PostgreSQL database. Raises ConfigError if a folder is not empty or
        the backup lacks what is wanted, Damaged for a file with another digest, StorageFailed.
        """
        wanted = {root: folder for root, folder in ((RUNS, runs), (DEPLOYMENT, deployment)) if folder}
        for root, folder in wanted.items():
            if not any(path.startswith(f"{root}/") for path in backup.files):
                raise ConfigError("FV1634", f"backup {backup.name} has no {root}: make it with --{root}")
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError("FV1634", f"{folder} exists already and is not changed; choose a new folder")
        for root, folder in wanted.items():
            new = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
            try:
                self._write_files(backup, root, new)
                if root == RUNS:
                    new_deployment = str(deployment.resolve()) if deployment else None
                    adapt_runs(new, None if keep_mirrors else backup.mirrors, backup.deployment, new_deployment)
                    if url:
                        move_record(new, url)
                if folder.exists():
                    folder.rmdir()
                new.rename(folder)
            except OSError as error:
                raise storage_failed(f"cannot write {folder}", error) from error
            finally:
                shutil.rmtree(new, ignore_errors=True)

    def _write_files(self, backup: Backup, root: str, folder: Path) -> None:
        folder.mkdir(parents=True, mode=0o700)
        for path, file in backup.files.items():
            if not path.startswith(f"{root}/"):
                continue
            target = folder / path.removeprefix(f"{root}/")
            if not target.resolve().is_relative_to(folder.resolve()):
                raise Damaged("FV1635", f"backup {backup.name} names the path {path!r}, which leaves its folder")
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            source = self.blobs.path(file.digest)
            if source.is_file():
                shutil.copyfile(source, target)
                target.chmod(0o600)
            if not source.is_file() or digest_of_file(target) != file.digest:
                raise Damaged(
                    "FV1635",
                    f"{source} is damaged or missing, which backup {backup.name} has as {path}: restore another backup "
                    "(--at)",
                )
            sync_file(target)
        if root == DEPLOYMENT:
            (folder / "run").mkdir(exist_ok=True, mode=0o700)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that a backup has; folders that a run removes meanwhile are left out."""

    def warn(error: OSError) -> None:
        if isinstance(error, PermissionError):
            log.warning("a folder of another user is not in the backup", extra={"path": error.filename})

    for home, folders, names in os.walk(folder, onerror=warn):
        runs = {name for name in _SKIPPED & {*folders} if os.path.isdir(Path(home, name, BLOBS))}
        folders[:] = [name for name in folders if _is_kept(name) or name in runs]
        for path in (Path(home, name) for name in names if _is_kept(name) and not name.endswith(_SKIPPED_ENDS)):
            if os.path.isfile(path) and not path.is_symlink():
                yield path


def _is_kept(name: str) -> bool:
    return name not in _SKIPPED and not name.startswith(WRITING)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _blob_path(run: str, digest: str) -> str:
    name = digest.partition(":")[2]
    return f"{RUNS}/{run}/{BLOBS}/{name[:2]}/{name}"


def _list_needed(record: Record) -> Iterator[tuple[str, str]]:
    """Yield the blobs, each with its run, without which a run could not continue as if nothing had happened."""
    for run in record.runs.read_all():
        newest = record.rounds.read_newest_closed(run.id)
        if newest and newest.state:
            yield from ((digest, run.id) for digest in {*essential(newest.state), *newest.state.uploads.values()})
        following = newest.round + 1 if newest else 1
        results = record.tasks.read_used_in(run.id, following) if run.status not in ("queued", "finished") else []
        yield from ((result.upload, run.id) for result in results if result.upload)


def _list_mirrors(record: Record) -> Iterator[tuple[str, str | None]]:
    """Yield every run with the URL of its mirror, if it has one."""
    for run in record.runs.read_all():
        settings = run.config.get("blobs", {})
        yield run.id, str(settings.get("url")) if settings.get("mirror") else None
