"""The best round of a run on a device: the model that it tested then can still be exported when later rounds are worse.

The coordinator names the best round with each task and at the run's end. `RUN/BEST` describes the device's test of that
round; the vault keeps its personal tensors, and the device the blobs.
"""

import contextlib
from functools import partial
from pathlib import Path

from edge_client.storage.evaluation import blobs_of_model
from edge_client.storage.task_notes import TaskNote, read_note, write_note
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload, Damaged, StorageFailed
from fedvit.files import name_failure
from fedvit.program import decode_program
from fedvit.wire.messages import Task

_BEST = "BEST"


def best_task(vault: Vault, run: str) -> TaskNote | None:
    """Return the device's test of the run's best round; None if it has none. Raises BadPayload for an invalid name."""
    with contextlib.suppress(Damaged):
        return read_note(_file(vault, run))
    return None


def keep_best(vault: Vault, run: str, best: int) -> None:
    """Keep the description of the test of round `best`, before the next task replaces it; forget any other.

    Raises StorageFailed.
    """
    found = find_test(vault, run, best)
    if found is None:
        with name_failure(f"cannot delete {_file(vault, run)}"):
            _file(vault, run).unlink(missing_ok=True)
    elif found != best_task(vault, run):
        write_note(_file(vault, run), found)


def find_test(vault: Vault, run: str, number: int) -> TaskNote | None:
    """Return the device's test of a round if it is the newest task, or is kept as the best; None if it is neither.

    Round 0 stands for no round: the run has no best one yet.
    """
    for read in (partial(best_task, vault), vault.notes.find_newest) if number else ():
        with contextlib.suppress(Damaged):
            note = read(run)
            if note and (note.kind, note.round) == ("evaluate", number):
                return note
    return None


def blobs_beside(task: Task, vault: Vault, blobs: BlobStore) -> set[str]:
    """Return the blobs that stay while a task is done: those of the best round, and of the run that is only tested."""
    notes = [find_test(vault, task.vault_run, task.best)]
    if task.personal_of:
        with contextlib.suppress(Damaged):
            notes += [vault.notes.find_newest(task.vault_run), best_task(vault, task.vault_run)]
    return blobs_of_notes(notes, vault, blobs)


def blobs_of_notes(notes: list[TaskNote | None], vault: Vault, blobs: BlobStore) -> set[str]:
    """Return the blobs of models. A model whose Program is not here, or is damaged, has none."""
    needed = set[str]()
    for note in notes:
        if note:
            with contextlib.suppress(BadPayload, StorageFailed, OSError):
                needed |= blobs_of_model(decode_program(blobs.get(note.program)), note, vault, note.round)
    return needed


def _file(vault: Vault, run: str) -> Path:
    return vault.path(run) / _BEST
