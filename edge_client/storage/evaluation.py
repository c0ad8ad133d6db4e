"""The tensors from which a task starts: the server's and the device's own.

The device's tests and the bundles exported from its state use the same tensors.
"""

from collections.abc import Collection

from edge_client.storage.vault import TaskNote, Vault
from fedvit.blobs import BlobStore
from fedvit.errors import BadPayload
from fedvit.program import Program, Role
from fedvit.tensors import Tensors, check_tensors, map_tensors
from fedvit.wire.messages import Task


def own_groups(program: Program, task: Task | TaskNote, vault: Vault) -> set[str]:
    """The groups of which the vault holds the device's own tensors, as used by the next evaluation after a task."""
    newest = vault.round_of(task.run)
    if not newest:
        return set()
    of_this_round = newest == task.round or not program.evaluate.kept_of_this_round
    return {*program.with_role(Role.LOCAL), *(program.evaluate.kept if of_this_round else ())}


def start_values(
    program: Program, task: Task | TaskNote, own: Collection[str], vault: Vault, blobs: BlobStore
) -> tuple[Tensors, int]:
    """Every tensor, checked against the Program, and how many of them are the device's own.

    Those of the groups `own` come from the vault where it has them. Raises BadPayload for a group without a value.
    """
    values: Tensors = {}
    stored = vault.local(task.run) or {}
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


def blobs_of_model(program: Program, note: TaskNote, vault: Vault) -> set[str]:
    """The blobs of the device's own model of a run (edge_client.owner.trained), beside the tensors in the vault."""
    values = {_find_blob(program, note, group) for group in program.groups.keys() - own_groups(program, note, vault)}
    graphs = {program.graphs[name].digest for name in program.graphs_for("evaluate")}
    return {note.program, *graphs, *(digest for digest in values if digest)}


def _find_blob(program: Program, task: Task | TaskNote, group: str) -> str | None:
    """The blob with the values of a group from the server; None if the server sent none."""
    spec = program.groups[group]
    return task.groups.get(group) if spec.role.from_server_each_round else spec.initial
