"""The server's state as blobs: what devices fetch and what a restart begins with are the same files."""

from coordinator.planner import Plan, groups_from_server, initial_blobs
from coordinator.store import SavedState
from fedvit.blobs import BlobStore
from fedvit.methods.base import ServerState
from fedvit.program import Program
from fedvit.tensors import Tensors, pack, unpack


def save_state(state: ServerState, program: Program, blobs: BlobStore) -> SavedState:
    """Put a state into `blobs`, one blob a group."""
    groups = {
        group: blobs.put(pack({name: state.tensors[name] for name in program.names(group)})).digest
        for group in groups_from_server(program)
    }
    memory = blobs.put(pack(state.memory)).digest if state.memory else None
    return SavedState(groups, memory, state.uploads)


def load_state(saved: SavedState, program: Program, blobs: BlobStore) -> ServerState:
    """Undo `save_state`: bit for bit, and tensors in the model's order."""
    tensors: Tensors = {}
    for digest in saved.groups.values():
        tensors |= unpack(blobs.get(digest))
    ordered = {name: tensors[name] for name in program.tensors if name in tensors}
    memory = unpack(blobs.get(saved.memory)) if saved.memory else {}
    return ServerState(ordered, memory, dict(saved.uploads))


def needed_blobs(plan: Plan, saved: SavedState) -> set[str]:
    """Everything that a device may still ask for, or a restart need, after a round closed with `saved`."""
    needed = {plan.digest, *initial_blobs(plan.program), *saved.groups.values(), *saved.uploads.values()}
    return needed | ({saved.memory} if saved.memory else set())
