"""The tensors from which a task starts: the server's and the device's own.

The device's tests and the bundles exported from its state use the same tensors.
"""

from collections.abc import Collection

from edge_client.storage.task_notes import TaskNote
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.program import Program, Role
from fedvit.tensors import Tensors, check_tensors, map_tensors
from fedvit.wire.messages import Task


def own_groups(program: Program, task: Task | TaskNote, vault: Vault, upto: int | None = None) -> set[str]:
    """The groups of which the vault holds the device's own tensors, as used by the next evaluation after a task.

    `upto`: the newest round that counts; None: all do, also where the coordinator has returned to an older record.
    """
    newest = vault.round_of(vault_run(task), upto)
    if not newest:
        return set()
    of_this_round = newest == task.round or not program.evaluate.kept_of_this_round
    return {*program.with_role(Role.LOCAL), *(program.evaluate.kept if of_this_round else ())}


def start_values(
    program: Program,
    task: Task | TaskNote,
    own: Collection[str],
    vault: Vault,
    blobs: BlobStore,
    upto: int | None = None,
) -> tuple[Tensors, int]:
    """Every tensor, checked against the Program, and how many of them are the device's own.

    Those of the groups `own` come from the vault where it has them, of the newest round up to `upto`. Raises
    BadPayload for a group without a value.
    """
    values: Tensors = {}
    stored = vault.local(vault_run(task), upto) or {}
    personal = 0
    for group, spec in program.groups.items():
        what = f"group {group!r} of round {task.round}"
        tensors = {name: stored[name] for name in program.names(group) if group in own and name in stored}
        personal += len(tensors)
        if not tensors:  # also if the group was not local in earlier rounds
            digest = _find_blob(program, task, group)
            if digest is None:
                each_round = spec.role.from_server_each_round
                why = "the task does not name it" if each_round else "it has no initial value"
                raise BadPayload("FV0006", f"{what}: {why}")
            tensors = map_tensors(blobs.path(digest))
        check_tensors(tensors, program.forms_of([group]), what)
        values |= tensors
    return values, personal


def check_takes_part(vault: Vault, task: Task, program: Program) -> None:
    """Raise BadPayload for a training with another run's personal tensors, and if those of the run to test are not
    here: their initial values would give a wrong score."""
    if not task.personal_of:
        return
    if task.kind != "evaluate":
        raise BadPayload("FV0006", f"round {task.round}: personal tensors of another run may be tested, not trained")
    personal = program.with_role(Role.LOCAL) or program.evaluate.kept
    if personal and not vault.path(task.vault_run).is_dir():
        raise BadPayload(
            "FV1424", f"this device keeps nothing of run {task.vault_run!r}, and its model has personal tensors"
        )


def newest_counted(task: Task) -> int | None:
    """Return the newest round whose personal tensors a task uses; None: the newest of all."""
    return task.round if task.personal_of or task.kind == "compare" else None


def vault_run(task: Task | TaskNote) -> str:
    """Return the run whose personal tensors a task uses."""
    return task.vault_run if isinstance(task, Task) else task.run


def blobs_of_model(program: Program, note: TaskNote, vault: Vault, upto: int | None = None) -> set[str]:
    """The blobs of the device's own model of a run (edge_client.owner.trained), beside the tensors in the vault."""
    own = own_groups(program, note, vault, upto)
    values = {_find_blob(program, note, group) for group in program.groups.keys() - own}
    graphs = {program.graphs[name].digest for name in program.graphs_for("evaluate")}
    return {note.program, *graphs, *(digest for digest in values if digest)}


def _find_blob(program: Program, task: Task | TaskNote, group: str) -> str | None:
    """The blob with the values of a group from the server; None if the server sent none."""
    spec = program.groups[group]
    return task.groups.get(group) if spec.role.from_server_each_round else spec.initial
