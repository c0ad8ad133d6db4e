"""The server's state as blobs: what devices fetch and what a restart begins with are the same files."""

from collections.abc import Iterable
from pathlib import Path

from coordinator.config import UpdatesConfig
from coordinator.planning.planner import Plan
from coordinator.record.integrity import DamagedBlob, SoundBlobs, what_it_held
from coordinator.record.references import references
from coordinator.record.store import Store
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.errors import ConfigError, Damaged
from fedvit.files import atomic_write
from fedvit.methods.base import ServerRule, ServerState
from fedvit.tensors import Tensors, pack, unpack

AS_IT_IS = UpdatesConfig()


def save_state(
    state: ServerState,
    groups: dict[str, list[str]],
    blobs: BlobStore,
    updates: UpdatesConfig = AS_IT_IS,
    before: SavedState | None = None,
) -> SavedState:
    """Put a state into `blobs`, one blob a group; and what devices get of it that have what they got `before`."""
    members = {group: {name: state.tensors[name] for name in names} for group, names in groups.items()}
    saved = {group: blobs.put(pack(tensors)).digest for group, tensors in members.items()}
    memory = blobs.put(pack(state.memory)).digest if state.memory else None
    sent = references(members, before.references if before else {}, updates, blobs)
    return SavedState(saved, memory, state.uploads, sent)


def load_state(saved: SavedState, blobs: BlobStore, order: Iterable[str] | None = None) -> ServerState:
    """Undo `save_state`: bit for bit; tensors in the order of `order`, where it is given."""
    tensors: Tensors = {}
    for digest in saved.groups.values():
        tensors |= unpack(blobs.get(digest))
    if order is not None:
        tensors = {name: tensors[name] for name in order if name in tensors}
    memory = unpack(blobs.get(saved.memory)) if saved.memory else {}
    return ServerState(tensors, memory, dict(saved.uploads))


def start_state(earlier: str, store: Store, runs: Path) -> ServerState:
    """What the run named `earlier` ended with. Raises ConfigError when there is no such end, Damaged where it is."""
    newest = store.newest_closed(earlier)
    if newest is None or newest.state is None:
        store.run(earlier)  # raises when there is none of that name
        raise ConfigError(f"start_from = {earlier!r}: that run closed no round")
    blobs = SoundBlobs(runs / earlier / "blobs")
    try:
        return load_state(newest.state, blobs)
    except DamagedBlob as error:
        held = what_it_held(error.digest, earlier, store, blobs)
        raise Damaged(
            f"start_from = {earlier!r}: {error.path} is damaged: it held {held}. "
            "Put the file back from a copy of that run's folder"
        ) from error


def needed_blobs(plan: Plan, saved: SavedState) -> set[str]:
    """Everything that a device may still ask for, or a restart need, after a round closed with `saved`."""
    needed = {*saved.groups.values(), *saved.uploads.values()}
    needed |= {digest for reference in saved.references.values() for digest in reference.blobs()}
    for variant in plan.variants.values():
        needed |= {variant.digest, *variant.program.fetched_once()}
    return needed | ({saved.memory} if saved.memory else set())


def write_models(folder: Path, state: ServerState, rule: ServerRule, devices: Iterable[str], seed: int) -> None:
    """What a finished run leaves in its folder: the server's tensors, and those that it made for one device."""
    atomic_write(folder / "model.safetensors", pack(state.tensors))
    for device in devices:
        if generated := rule.generate(state, device, seed):
            atomic_write(folder / "generated" / f"{device}.safetensors", pack(generated))
