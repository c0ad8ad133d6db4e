"""Retention: removes runs, details of rounds, and files that are no longer needed.

A run that is being served holds a lock in its folder; only its own process removes anything of it.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from coordinator.config.blobs import BlobsConfig
from coordinator.record.copies import COPIES, NOTES, find_unneeded, lock_copies
from coordinator.record.record import Record
from coordinator.record.scores import find_kept_best
from coordinator.record.tables import ENDED, RunRecord
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, ConfigError, Damaged, StorageFailed
from fedvit.files import WRITING, folder_bytes, name_failure, storage_failed

if TYPE_CHECKING:
    from coordinator.record.mirror import Mirror
    from fedvit.program import Program

LOCK = "lock"
SERVICE_LOCK = "service.lock"
BLOBS = "blobs"


class Removal(Struct, frozen=True, kw_only=True):
    """Something that was removed, or would be."""

    what: str  # run, folder, blobs, file, details, mirror, copy
    run: str | None
    path: str | None  # None: a part of the record; of a mirror its URL
    bytes: int  # freed on the disk, or in the store; 0 for details, which free space when the record is compacted
    why: str


class RetentionPolicy(NamedTuple):
    """Settings of `collect`: how much is kept."""

    keep_runs: int | None = None  # None: as the newest run's configuration says
    keep_rounds: int | None = None  # None: as each run's configuration says
    dry_run: bool = False  # only find what would be removed
    keep_mirrors: bool = False


def lock_run(folder: Path, run: str, term: int = 0) -> int:
    """Lock a run for this process; returns the open lock file. Raises ConfigError if another process holds it, unless
    that led in an earlier term than this one: it is cut off or hangs, and the record refuses what it writes."""
    return _lock(folder, LOCK, f"run {run!r} is being served by another coordinator", term)


def lock_service(out: Path) -> int:
    """Lock a folder of runs for this service; returns the open lock file. Raises ConfigError if another holds it."""
    return _lock(out, SERVICE_LOCK, f"the runs of {out} are being served by another `coordinator serve`")


def _lock(folder: Path, name: str, taken: str, term: int = 0) -> int:
    with name_failure(f"run folder {folder} cannot be used", ConfigError, "FV1701"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
    while not _try_lock(handle, fcntl.LOCK_EX):
        if _try_lock(handle, fcntl.LOCK_SH):  # it is not taken: `is_served` looks at it, or another process begins, too
            fcntl.flock(handle, fcntl.LOCK_UN)
            time.sleep(0.001)
            continue
        earlier = os.pread(handle, 32, 0)
        os.close(handle)
        if not (earlier.isdigit() and 0 < int(earlier) < term):
            raise ConfigError("FV1617", taken)
        (folder / name).unlink(missing_ok=True)
        return _lock(folder, name, taken, term)
    os.ftruncate(handle, 0)
    if term:
        os.pwrite(handle, str(term).encode(), 0)
    return handle


def is_served(folder: Path, lock: str = LOCK) -> bool:
    """Return whether a coordinator serves the run of a folder now; with SERVICE_LOCK, all runs in it.

    Looks share the lock, and `_lock` waits for their end: they disturb nobody.
    """
    try:
        handle = os.open(folder / lock, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # of another user, whose processes are not known
        return True
    try:
        return not _try_lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def oldest_kept(newest: int, keep_rounds: int | None, since: int) -> int | None:
    """Return the oldest round whose details are kept after round `newest` has closed; None: all.

    Rounds from `since` on are needed to recompute a damaged state."""
    return None if keep_rounds is None else min(newest - keep_rounds + 1, since)


def run_mirror(record: RunRecord) -> "Mirror | None":
    """Return the mirror of a run; None if it had none when it was served last.

    Raises StorageFailed if this installation cannot open it."""
    settings = record.config.get("blobs", {})
    if not settings.get("mirror"):
        return None
    try:
        mirrors = import_module("coordinator.record.mirror")  # late: obstore, which other runs do not need
        mirror: Mirror = mirrors.Mirror(BlobsConfig(**settings), record.id)
        return mirror
    except ModuleNotFoundError as error:
        raise StorageFailed(
            "FV1019",
            f"the mirror of run {record.id!r} needs the package {error.name!r}, which is not installed: "
            "pip install 'fedvit[s3]'",
        ) from error
    except (ConfigError, TypeError) as error:  # a newer version wrote it
        raise StorageFailed("FV1019", f"the table [blobs] of run {record.id!r} cannot be read: {error}") from error


def remove_runs(
    store: Record, folder: Path, names: list[str], *, force: bool = False, keep_mirrors: bool = False
) -> list[Removal]:
    """Remove runs, first from the record, and, unless `keep_mirrors`, their mirrors.

    Raises, before anything is removed: ConfigError if a run is unknown or being served, or, without `force`, if another
    run started from it; StorageFailed if a mirror cannot be used.
    """
    for name in names:
        record = store.runs.read(name)
        if is_served(folder / name):
            raise ConfigError("FV1617", f"run {name!r} is being served: stop its coordinator first, or cancel the run")
        if record.submitted_at and record.status not in (*ENDED, "failed"):
            raise ConfigError(
                "FV1617", f"run {name!r} is {record.status}, and a service will continue it: cancel it first"
            )
    for record in store.runs.read_all():
        start = record.config.get("start_from")
        if start in names and record.id not in names and not force:
            raise ConfigError(
                "FV1617",
                f"run {record.id!r} ({record.status}) started from {start!r}, and needs it to account for privacy and, "
                "until its first round is closed, to begin; --force removes it anyway",
            )
    found = [_find_run(store, folder, name, "asked for", keep_mirrors) for name in names]
    removed = [removal for run in found for removal in _remove_run(store, folder, run)]
    for name in names:
        store.audit.add("rm", name)
    return removed


class _DoomedRun(NamedTuple):
    """A run that is to be removed, with what is in its mirror."""

    name: str
    mirror: "Mirror | None"
    objects: list[str]
    removals: list[Removal]


def _find_run(store: Record, folder: Path, name: str, why: str, keep_mirrors: bool) -> _DoomedRun:
    """Raise StorageFailed if the run's mirror cannot be used."""
    removals = [_removal_of_run(folder, name, why)]
    mirror = None if keep_mirrors else run_mirror(store.runs.read(name))
    sizes = mirror.sizes() if mirror else {}
    if mirror and sizes:
        removals.append(Removal(what="mirror", run=name, path=mirror.place, bytes=sum(sizes.values()), why=why))
    return _DoomedRun(name, mirror, list(sizes), removals)


def _remove_run(store: Record, folder: Path, run: _DoomedRun) -> list[Removal]:
    store.runs.remove(run.name)
    _remove_folder(folder / run.name)
    if run.mirror:
        try:
            run.mirror.remove(run.objects)
        except StorageFailed as error:
            raise StorageFailed(
                "FV1019", f"run {run.name!r} was removed, but not all of its mirror {run.mirror.place}: {error}"
            ) from error
    return run.removals


def _removal_of_run(folder: Path, name: str, why: str) -> Removal:
    directory = folder / name
    return Removal(what="run", run=name, path=str(directory), bytes=folder_bytes(directory), why=why)


def _remove_folder(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise storage_failed(f"cannot remove {directory}", error) from error


def collect(
    store: Record,
    folder: Path,
    policy: RetentionPolicy,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Removal]:
    """Apply the policy and remove unreferenced files.

    A run whose mirror cannot be used is kept, and `report` gets a line with the reason.
    """
    keep_runs, dry_run, keep_mirrors = policy.keep_runs, policy.dry_run, policy.keep_mirrors
    records = store.runs.read_all()
    if keep_runs is None and records:
        keep_runs = records[0].config.get("keep_runs")
    gone = _runs_beyond(records, keep_runs, folder)
    for name in gone:
        why = f"ended, and older than the {keep_runs} that are kept"
        try:
            found = _find_run(store, folder, name, why, keep_mirrors)
        except StorageFailed as error:
            report(_explain_kept(name, error))
            continue
        yield from found.removals if dry_run else _remove_run(store, folder, found)
    directories = sorted(folder.iterdir())
    known = {record.id for record in store.runs.read_all()}  # read now: a run may have begun, and ended, since
    for directory in directories:
        if directory.name in known or not _is_of_run(directory) or is_served(directory):
            continue
        removal = Removal(
            what="folder", run=None, path=str(directory), bytes=folder_bytes(directory),
            why="the folder of a run that is not in the record",
        )  # fmt: skip
        yield _apply(removal, partial(_remove_folder, directory), dry_run)
    for record in records:
        directory = folder / record.id
        if record.id in gone or is_served(directory):
            continue
        yield from _details(store, record, directory, policy)
        yield from _files(directory, dry_run)
        if record.status == "finished":
            try:
                yield from _blobs(store, record, directory, dry_run, keep_mirrors)
            except StorageFailed as error:
                report(_explain_kept(record.id, error))
    yield from _copies(folder, dry_run)


def _is_of_run(directory: Path) -> bool:
    try:
        return (directory / LOCK).is_file() and (directory / BLOBS).is_dir()
    except PermissionError:  # of another user, such as lost+found
        return False


def _copies(folder: Path, dry_run: bool) -> Iterator[Removal]:
    """Remove copies of the record and notes that newer copies replace."""
    if not (folder / COPIES).is_dir():
        return
    with name_failure(f"cannot remove {folder / COPIES}"), lock_copies(folder):
        for file, why in find_unneeded(folder).items():
            removal = Removal(what="copy", run=None, path=str(file), bytes=file.stat().st_size, why=why)
            yield _apply(removal, file.unlink, dry_run)


def _explain_kept(run: str, error: StorageFailed) -> str:
    return f"run {run!r} is kept as it is: {error}; --keep-mirrors leaves its mirror out"


def _apply(removal: Removal, remove: Callable[[], object], dry_run: bool) -> Removal:
    if not dry_run:
        remove()
    return removal


def _runs_beyond(records: list[RunRecord], keep: int | None, folder: Path) -> list[str]:
    """Return ended runs beyond the newest `keep`, except those that a kept run started from."""
    if keep is None:
        return []
    over = [record.id for record in records if record.status in ENDED]
    gone = [name for name in over[keep:] if not is_served(folder / name)]
    while needed := [
        record.config.get("start_from")
        for record in records
        if record.id not in gone and record.config.get("start_from") in gone
    ]:
        gone = [name for name in gone if name not in needed]
    return gone


def _details(store: Record, record: RunRecord, directory: Path, policy: RetentionPolicy) -> Iterator[Removal]:
    keep = policy.keep_rounds if policy.keep_rounds is not None else record.config.get("keep_rounds")
    newest = store.rounds.read_newest_closed(record.id)
    if newest is None or keep is None:
        return
    since = newest.round - 1 if (directory / NOTES).is_dir() else newest.round
    before = oldest_kept(newest.round, keep, since)
    if before is not None and before > max(1, record.thinned or 0):
        removal = Removal(
            what="details", run=record.id, path=None, bytes=0,
            why=f"of rounds before {before}; the newest {keep} are kept, and those that recompute a damaged state",
        )  # fmt: skip
        best = find_kept_best(store, record.id)
        kept = best.round if best else 0
        yield _apply(removal, lambda: store.runs.thin(record.id, before, keep=kept), policy.dry_run)


def _files(directory: Path, dry_run: bool) -> Iterator[Removal]:
    """Remove files that were incomplete when a process was killed."""
    for file in sorted(directory.rglob(f"{WRITING}*")):
        removal = Removal(
            what="file", run=directory.name, path=str(file), bytes=file.stat().st_size,
            why="it was being written when a process ended",
        )  # fmt: skip
        yield _apply(removal, file.unlink, dry_run)


def _blobs(store: Record, record: RunRecord, directory: Path, dry_run: bool, keep_mirrors: bool) -> Iterator[Removal]:
    """Remove blobs of a finished run from its folder and its mirror, except those that other runs start from, or that
    its bundle needs."""
    newest = store.rounds.read_newest_closed(record.id)
    if newest is None or newest.state is None or record.program is None:
        return
    blobs = BlobStore(directory / BLOBS)
    mirror = None if keep_mirrors else run_mirror(record)
    try:
        content = blobs.get(record.program) if blobs.has(record.program) or not mirror else mirror.blob(record.program)
        program = import_module("fedvit.program").decode_program(content)  # late: numpy
    except (OSError, BadPayload, Damaged):  # without its program it is unknown what is needed
        return
    saved = newest.state
    keep = {record.program, *_blobs_of(program), *saved.groups.values(), *saved.uploads.values()}
    keep |= {saved.memory} if saved.memory else set()
    if (best := find_kept_best(store, record.id)) and best.state:
        keep |= {*best.state.groups.values(), *([best.state.memory] if best.state.memory else [])}
    files = {blobs.path(digest) for digest in keep}
    size = sum(file.stat().st_size for file in blobs.folder.glob("*/*") if file not in files)
    if size:
        removal = Removal(
            what="blobs", run=record.id, path=str(blobs.folder), bytes=size,
            why="the run is finished: only its last and best state, its program and graphs are needed",
        )  # fmt: skip
        yield _apply(removal, lambda: blobs.prune(keep), dry_run)
    if mirror:
        yield from _objects(record, mirror, keep, dry_run)


def _objects(record: RunRecord, mirror: "Mirror", keep: set[str], dry_run: bool) -> Iterator[Removal]:
    """Remove blobs of a mirror: those of a coordinator that was cut off, which others do not know."""
    blob_digest = import_module("coordinator.record.mirror").blob_digest
    sizes = {
        name: size
        for name, size in mirror.sizes().items()
        if (digest := blob_digest(name)) is not None and digest not in keep
    }
    if sizes:
        removal = Removal(
            what="mirror", run=record.id, path=mirror.place, bytes=sum(sizes.values()),
            why="the run is finished: only its last and best state, its program, graphs and results are needed",
        )  # fmt: skip
        yield _apply(removal, lambda: mirror.remove(sizes), dry_run)


def _blobs_of(program: "Program") -> set[str]:
    """Return graphs of a Program, and initial values of tensors."""
    first = {group.initial for group in program.groups.values() if group.initial}
    return first | {graph.digest for graph in program.graphs.values()}
