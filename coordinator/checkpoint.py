"""The server's state as blobs: what devices fetch and what a restart begins with are the same files."""

from coordinator.planner import Plan, initial_blobs
from coordinator.store import SavedState
from fedvit.blobs import BlobStore
from fedvit.methods.base import ServerState
from fedvit.tensors import Tensors, pack, unpack


def save_state(state: ServerState, groups: dict[str, list[str]], blobs: BlobStore) -> SavedState:
    """Put a state into `blobs`, one blob a group."""
    saved = {
        group: blobs.put(pack({name: state.tensors[name] for name in names})).digest for group, names in groups.items()
    }
    memory = blobs.put(pack(state.memory)).digest if state.memory else None
    return SavedState(saved, memory, state.uploads)


def load_state(saved: SavedState, blobs: BlobStore, order: Tensors | None = None) -> ServerState:
    """Undo `save_state`: bit for bit; tensors in the order of `order`, where it is given."""
    tensors: Tensors = {}
    for digest in saved.groups.values():
        tensors |= unpack(blobs.get(digest))
    if order is not None:
        tensors = {name: tensors[name] for name in order if name in tensors}
    memory = unpack(blobs.get(saved.memory)) if saved.memory else {}
    return ServerState(tensors, memory, dict(saved.uploads))


def needed_blobs(plan: Plan, saved: SavedState) -> set[str]:
    """Everything that a device may still ask for, or a restart need, after a round closed with `saved`."""
    needed = {*saved.groups.values(), *saved.uploads.values()}
    for variant in plan.variants.values():
        needed |= {variant.digest, *initial_blobs(variant.program)}
    return needed | ({saved.memory} if saved.memory else set())
