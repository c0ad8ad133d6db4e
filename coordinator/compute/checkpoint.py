"""The server's state as blobs: devices fetch the same files from which a restart begins."""

from collections.abc import Iterable
from pathlib import Path

from coordinator.compute.integrity import DamagedBlob, VerifiedBlobs, blob_description
from coordinator.compute.planning.planner import Plan
from coordinator.compute.references import references
from coordinator.config import UpdatesConfig
from coordinator.record.record import Record
from coordinator.record.scores import find_start
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.errors import Damaged
from fedvit.files import FileGroup
from fedvit.methods.base import ServerRule, ServerState
from fedvit.methods.rules.generator_update import PERSONAL, SHARED
from fedvit.tensors import Tensors, pack, unpack

UNCODED = UpdatesConfig()


def save_state(
    state: ServerState,
    groups: dict[str, list[str]],
    blobs: BlobStore,
    updates: UpdatesConfig = UNCODED,
    before: SavedState | None = None,
) -> SavedState:
    """Write a state into `blobs`, one blob per group, and the coded values for devices that hold those of `before`."""
    members = {group: {name: state.tensors[name] for name in names} for group, names in groups.items()}
    saved = {group: blobs.put(pack(tensors)).digest for group, tensors in members.items()}
    memory = blobs.put(pack(state.memory)).digest if state.memory else None
    sent = references(members, before.references if before else {}, updates, blobs)
    return SavedState(saved, memory, state.uploads, sent)


def load_state(saved: SavedState, blobs: BlobStore, order: Iterable[str] | None = None) -> ServerState:
    """Undo `save_state`: bit for bit; tensors in the order of `order`, if given."""
    tensors: Tensors = {}
    for digest in saved.groups.values():
        tensors |= unpack(blobs.get(digest))
    if order is not None:
        tensors = {name: tensors[name] for name in order if name in tensors}
    memory = unpack(blobs.get(saved.memory)) if saved.memory else {}
    return ServerState(tensors, memory, dict(saved.uploads))


def start_state(earlier: str, store: Record, runs: Path, asked: str | int = "last") -> ServerState:
    """The state of the run `earlier` after a round: `last`, `best` or a number.

    Raises ConfigError if it closed no round or does not keep this one, Damaged if a file is damaged.
    """
    kept = find_start(store, earlier, asked)
    assert kept.state is not None  # of a round that is kept
    blobs = VerifiedBlobs(runs / earlier / "blobs")
    try:
        return load_state(kept.state, blobs)
    except DamagedBlob as error:
        held = blob_description(error.digest, earlier, store, blobs)
        raise Damaged(
            "FV1115",
            f"start_from = {earlier!r}: {error.path} is damaged: it held {held}. "
            "Put the file back from a copy of that run's folder",
        ) from error


def find_needed_blobs(plan: Plan, saved: SavedState) -> set[str]:
    """Digests that a device may still request, or that a restart needs, after a round closed with `saved`."""
    needed = {*saved.groups.values(), *saved.uploads.values()}
    needed |= {digest for reference in saved.references.values() for digest in reference.blobs()}
    for variant in plan.variants.values():
        needed |= {variant.digest, *variant.program.list_fetched_once()}
    return needed | ({saved.memory} if saved.memory else set())


def write_models(folder: Path, state: ServerState, rule: ServerRule, devices: Iterable[str], seed: int) -> None:
    """Write the results of a finished run into its folder.

    The server's tensors; those generated per device; and the generator itself, with the embeddings of all devices that
    trained. All become durable together: a file that waits for the disk by itself costs tens of milliseconds, for each
    of thousands of devices.
    """
    files = FileGroup()
    try:
        _write_models(files, folder, state, rule, devices, seed)
        files.commit()
    finally:
        files.abandon()


def _write_models(
    files: FileGroup, folder: Path, state: ServerState, rule: ServerRule, devices: Iterable[str], seed: int
) -> None:
    files.write(folder / "model.safetensors", pack(state.tensors))
    if learnt := {name: value for name, value in state.memory.items() if name.startswith((SHARED, PERSONAL))}:
        files.write(folder / "generator.safetensors", pack(learnt))
    for device in devices:
        if generated := rule.generate(state, device, seed):
            files.write(folder / "generated" / f"{device}.safetensors", pack(generated))
