"""Repairs the vault after damage: a run returns to the round before, or starts with empty storage.

Damaged files are never used; personal ones are moved to `damaged-*`.
"""

import contextlib
import shutil
from pathlib import Path
from typing import NamedTuple

from edge_client.storage.round_files import (
    CURRENT,
    NEW_RESIDUAL,
    PENDING,
    RESIDUAL,
    RESULT,
    count_earlier_rounds,
    find_current,
    is_unfinished,
    list_rounds,
    parse_round,
)
from edge_client.storage.sums import Sums, read_sums, write_sums
from edge_client.storage.vault import Vault
from fedvit.errors import Damaged
from fedvit.files import atomic_write, name_failure


class Repair(NamedTuple):
    """The description of a damage and of its repair."""

    message: str
    lost: tuple[str, int] | None = None  # (run, round) of a result that cannot be sent any more


def repair_run(vault: Vault, run: str, *, tensors: bool = True) -> list[Repair]:
    """Return from damaged files to the round before, or to an empty run; return the repairs. To be called by the
    process that owns the vault.

    Without `tensors` only small files are read. Raises StorageFailed when the folder cannot be changed.
    """
    home, files = vault.path(run), vault.round_files
    current = find_current(home)
    damaged = [] if current is None else files.list_damaged(current, tensors=tensors)
    if current and not damaged:
        repairs = _repair_result(vault, run, current)
        return [*repairs, *(_repair_residual(vault, run, current) if tensors else ())]
    before = [folder for folder in list_rounds(home) if folder != current]
    if current is None:
        if not (home / CURRENT).exists():
            before = [folder for folder in before if not is_unfinished(folder)]
            if not before:
                return []
        damaged = [home / CURRENT]
    before.sort(key=lambda folder: (count_earlier_rounds(folder), parse_round(folder)))
    while before and (more := files.list_damaged(before[-1])):
        damaged += more
        before.pop()
    return [_return_to(home, damaged, before[-1] if before else None)]


def repair_all(vault: Vault) -> list[Repair]:
    """Check and repair the small files of all runs, which is fast enough for each start."""
    runs = sorted({path.parent.name for path in vault.folder.glob(f"*/{CURRENT}")})
    return [repair for run in runs for repair in repair_run(vault, run, tensors=False)]


def _return_to(home: Path, damaged: list[Path], to: Path | None) -> Repair:
    """Make an older round the current one; without an undamaged one the run starts with empty storage."""
    run, folders = home.name, {file.parent for file in damaged}
    pending = [folder for folder in folders if (folder / PENDING).exists()]
    listed = ", ".join(map(str, damaged))
    with name_failure(f"{listed} damaged, and cannot be moved within {home}"):
        if to:
            atomic_write(home / CURRENT, to.name.encode())
        for earlier in home.glob("damaged-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        for folder in folders - {home}:
            if folder.is_dir():
                folder.rename(home / f"damaged-{folder.name}")
        if not to:
            (home / CURRENT).unlink(missing_ok=True)
    if to and damaged == [home / CURRENT]:
        message = f"{listed} names no stored round: run {run!r} continues from {to.name}, the newest undamaged one"
    elif to:
        message = f"{listed} damaged: run {run!r} returns to the tensors of round {parse_round(to)}"
    else:
        message = (
            f"{listed} damaged or missing: personal tensors of run {run!r} are lost, and start from the "
            f"server's initial values; to restore them, stop this device and restore {home} from a backup"
        )
    return Repair(message, (run, parse_round(pending[0])) if pending else None)


def _repair_result(vault: Vault, run: str, current: Path) -> list[Repair]:
    """Treat a damaged result as refused: personal tensors are kept."""
    number = parse_round(current)
    if not (current / PENDING).exists():
        return []
    with contextlib.suppress(Damaged):
        vault.round_files.read_result(current)
        return []
    vault.settle(run, number, accepted=False)
    message = f"{current / RESULT} damaged: the result of round {number} of run {run!r} is lost"
    return [Repair(message, (run, number))]


def _repair_residual(vault: Vault, run: str, current: Path) -> list[Repair]:
    """Drop a damaged residual: the next result starts without one."""
    sums = read_sums(current)
    assert sums is not None  # else the round is damaged
    listed = [current / name for name in sums.files if name.startswith((NEW_RESIDUAL, RESIDUAL))]
    damaged = [file for file in listed if not vault.round_files.is_whole(file)]
    if not damaged:
        return []
    with name_failure(f"cannot delete {damaged[0]}, which is damaged"):
        for file in damaged:
            file.unlink(missing_ok=True)
    files = {name: digest for name, digest in sums.files.items() if current / name not in damaged}
    write_sums(current, Sums(sums.generation, files))
    names = ", ".join(map(str, damaged))
    return [Repair(f"{names} damaged: the residual of earlier results of run {run!r} (error feedback) is lost")]
