"""Removes data of runs from a device: old vaults, blobs that no model needs, and incomplete files.

A run with an unacknowledged result is never removed. `edge-client gc` and `rm` remove runs while the device is
stopped; the device itself does when a run has ended.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from edge_client.storage.best_round import best_task, blobs_of_notes
from edge_client.storage.evaluation import blobs_of_model
from edge_client.storage.features import FEATURES, FeatureFolder
from edge_client.storage.round_files import count_earlier_rounds, find_current
from edge_client.storage.vault import Vault, finish_removals, list_removed, remove_run
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, ConfigError
from fedvit.files import WRITING, folder_bytes, name_failure
from fedvit.program import decode_program
from fedvit.quantities import format_bytes

VAULT, BLOBS, LOCK = "vault", "blobs", "lock"


# --- which runs are removed ------------------------------------------------------------------------------------


def find_retired_runs(vault: Vault, keep_runs: int) -> list[str]:
    """Runs that are older than the newest `keep_runs` of this device, are over, and have no unacknowledged result."""
    return [run for run in vault.notes.list_runs()[keep_runs:] if _why_kept(vault, run) is None]


def find_least_run(vault: Vault) -> str | None:
    """Run that costs the least when a new one needs its place; None if none may be removed.

    The oldest run that is over, else the one with the fewest finished rounds, at most one: a coordinator can begin any
    number of runs, but their rounds take its time. A run with an unacknowledged result is kept.
    """
    if retired := find_retired_runs(vault, 0):
        return retired[-1]
    noted = dict.fromkeys(reversed(vault.notes.list_runs()))
    unnoted = [run for run in vault.folders() if run not in noted]  # the first task ended early
    rounds = {run: count_earlier_rounds(find_current(vault.path(run))) for run in (*unnoted, *noted)}
    fewest = sorted((run for run, finished in rounds.items() if finished <= 1), key=rounds.__getitem__)
    return next((run for run in fewest if not vault.has_pending(run)), None)


def _why_kept(vault: Vault, run: str) -> str | None:
    if vault.has_pending(run):
        return "a result is not acknowledged yet"
    return None if vault.is_over(run) else "this device was not informed that the run is over"


class Entry(Struct, frozen=True, kw_only=True):
    """A run, file or folder that is removed, would be removed, or is kept."""

    what: str  # run, blobs, features, file, state
    run: str | None = None  # of a whole state: its folder's name
    path: str
    bytes: int
    why: str


class Report(Struct, frozen=True, kw_only=True):
    """The entries of a device's state that are removed, and those that stay."""

    state: str
    dry_run: bool
    removed_bytes: int
    removed: list[Entry]
    kept: list[Entry]


def lines(report: Report) -> str:
    """The report as a table in plain text."""
    verb = "would remove" if report.dry_run else "removed"
    rows = [(verb, entry) for entry in report.removed] + [("kept", entry) for entry in report.kept]
    named = max((len(entry.run or "") for _, entry in rows), default=0)
    shown = [
        f"{what:<{len(verb)}}  {entry.what:<8}  {entry.run or '':<{named}}  {format_bytes(entry.bytes):>8}  {entry.why}"
        for what, entry in rows
    ]
    total = f"{verb} {format_bytes(report.removed_bytes)}" if report.removed else "nothing to remove"
    return "\n".join([*shown, f"{total} in {report.state}"])


@contextlib.contextmanager
def lock_states(state: Path, lock: Callable[[Path], int]) -> Iterator[None]:
    """Hold the locks of a state and of the host that shares its blobs. Raises ConfigError if one of them is in use."""
    owner = (state / BLOBS).resolve().parent
    folders = {state.resolve()} | ({owner} if (owner / LOCK).exists() else set())
    handles = list[int]()
    try:
        for folder in sorted(folders):
            handles.append(lock(folder))
        yield
    finally:
        for handle in handles:
            os.close(handle)


def collect(state: Path, *, keep_runs: int, dry_run: bool) -> Report:
    """Remove the vaults of finished runs, except those of the newest `keep_runs` runs, and data that no kept run needs;
    with `dry_run` only report what would be removed. The state must not be in use. Raises StorageFailed."""
    vault = Vault(state / VAULT)
    newest = vault.notes.list_runs()[:keep_runs]
    gone = dict.fromkeys(find_retired_runs(vault, keep_runs), f"over, and older than the newest {keep_runs}")
    kept = {
        run: f"among the newest {keep_runs}" if run in newest else str(_why_kept(vault, run))
        for run in vault.notes.list_runs()
        if run not in gone
    }
    return _remove(state, vault, gone, kept, dry_run=dry_run)


def remove_runs(state: Path, runs: list[str], *, force: bool, dry_run: bool) -> Report:
    """Remove the vaults of some runs, and data that no kept run needs. The state must not be in use.

    Raises ConfigError, before anything is removed, for an unknown run, one with an unacknowledged result, and, without
    `force`, one that may be resumed; StorageFailed.
    """
    vault = Vault(state / VAULT)
    for run in runs:
        try:
            exists = vault.path(run).is_dir()
        except BadPayload as error:
            raise ConfigError(error.code, str(error)) from error
        if not exists:
            known = ", ".join(vault.notes.list_runs()[:5]) or "none"
            raise ConfigError("FV1423", f"no run {run!r} in {vault.folder}; known runs: {known}")
        if vault.has_pending(run):
            raise ConfigError("FV1423", f"a result of run {run!r} is not acknowledged yet: start the device to send it")
        if not vault.is_over(run) and not force:
            raise ConfigError(
                "FV1423",
                f"this device was not informed that run {run!r} is over; if the run is resumed, its personal tensors "
                "are lost. --force removes it anyway",
            )
    kept = {run: "not named" for run in vault.notes.list_runs() if run not in runs}
    return _remove(state, vault, dict.fromkeys(runs, "named"), kept, dry_run=dry_run)


def remove_strays(base: Path, strays: list[Path], *, dry_run: bool) -> Report:
    """Remove whole state folders below `base`, or only report them. Raises StorageFailed."""
    removed = [
        Entry(what="state", path=str(folder), run=folder.name, bytes=folder_bytes(folder), why="no run left anything")
        for folder in strays
    ]
    for folder in () if dry_run else strays:
        with name_failure(f"cannot delete {folder}"):
            shutil.rmtree(folder)
    return Report(
        state=str(base),
        dry_run=dry_run,
        removed_bytes=sum(entry.bytes for entry in removed),
        removed=removed,
        kept=[],
    )


def _remove(state: Path, vault: Vault, gone: dict[str, str], kept: dict[str, str], *, dry_run: bool) -> Report:
    """`gone` and `kept` are runs with the reason. The list is complete before anything is removed."""
    removed = [_run(vault, run, why) for run, why in gone.items()]
    removed += [_file(folder, "its removal was interrupted") for folder in list_removed(vault)]
    half = [file for file in state.rglob(f"{WRITING}*") if not file.is_relative_to(state / BLOBS)]
    half = [file for file in half if not any(file.is_relative_to(entry.path) for entry in removed)]
    removed += [_file(file, "a process ended while writing it") for file in half]
    features = FeatureFolder(state / FEATURES)
    if features_bytes := features.used_bytes():
        why = "the next task makes them again"
        removed.append(Entry(what="features", path=str(features.folder), bytes=features_bytes, why=why))
    blobs = BlobStore(state / BLOBS)
    shared = blobs.folder.is_symlink()  # the host's devices remove what none of them needs
    needed = set[str]() if shared else _list_needed_blobs(vault, blobs, kept)
    if not shared and (size := sum(size for _, size in blobs.prunable(needed))):
        why = "neither a kept run nor an unacknowledged result needs them"
        removed.append(Entry(what="blobs", path=str(blobs.folder), bytes=size, why=why))
    if not dry_run:
        for run in gone:
            remove_run(vault, run)
        finish_removals(vault)
        features.remove_all()
        for file in half:
            _delete(file)
        if not shared:
            blobs.prune(needed)
    return Report(
        state=str(state),
        dry_run=dry_run,
        removed_bytes=sum(entry.bytes for entry in removed),
        removed=removed,
        kept=[_run(vault, run, why) for run, why in kept.items()],
    )


def _list_needed_blobs(vault: Vault, blobs: BlobStore, runs: Iterable[str]) -> set[str]:
    """Blobs for the models of runs, for the next tasks of unfinished runs, and unacknowledged uploads."""
    needed = {result.upload.digest for result in vault.pending() if result.upload}
    for run in runs:
        note = vault.notes.find_newest(run)
        if note is None:
            continue
        try:
            program = decode_program(blobs.get(note.program))
        except BadPayload:  # removed by a newer run's task, or damaged: the other blobs are useless without it
            continue
        needed |= blobs_of_model(program, note, vault) | blobs_of_notes([best_task(vault, run)], vault, blobs)
        if not vault.is_over(run):
            needed |= {*program.list_fetched_once(), *note.groups.values()}
    return needed


def _run(vault: Vault, run: str, why: str) -> Entry:
    home = vault.path(run)
    return Entry(what="run", run=run, path=str(home), bytes=folder_bytes(home), why=why)


def _file(path: Path, why: str) -> Entry:
    size = folder_bytes(path) if path.is_dir() else path.stat().st_size
    return Entry(what="file", path=str(path), bytes=size, why=why)


def _delete(file: Path) -> None:
    with name_failure(f"cannot delete {file}"):
        file.unlink(missing_ok=True)
