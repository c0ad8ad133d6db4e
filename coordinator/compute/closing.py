"""The input of a server step (the previous state and the uploads) as data, so that any process can run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coordinator.compute.checkpoint import load_state, save_state
from coordinator.config import UpdatesConfig
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.data.server_images import ServerImages
from fedvit.methods.aggregators import Aggregator
from fedvit.methods.base import Method, RoundContext, ServerRule, Upload
from fedvit.models.vit import PatchViT
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array, TensorFile
from fedvit.updates import Decoded


@dataclass(frozen=True)
class StoredUploads:
    """Finds uploads by their digests; features are read from the file when they are needed."""

    folder: Path  # of blobs
    shapes: dict[str, tuple[int, ...]]

    def __call__(self, digest: str) -> Mapping[str, Array]:
        return Decoded(TensorFile(BlobStore(self.folder).path(digest)), self.shapes)


class Placement(NamedTuple):
    """Torch device and rank of one process of the server's training."""

    device: str  # torch device
    rank: int = 0
    world_size: int = 1


class RankSetup(NamedTuple):
    """Sent once to each process before it closes rounds together with the others."""

    placement: Placement
    port: int  # on loopback, where the processes meet
    blobs: Path
    rule: ServerRule
    vit: PatchViT


@dataclass(frozen=True, kw_only=True)
class Closing:
    """One server step."""

    round: int
    rounds: int
    seed: int
    method: Method
    before: SavedState
    kept: dict[str, str]  # device -> digest of its upload of an earlier round
    uploads: list[Upload]  # of this round, after screening
    stored: StoredUploads
    names: list[str]  # of tensors, in the model's order
    groups: dict[str, list[str]]
    updates: UpdatesConfig
    aggregator: Aggregator
    precision: ProductPrecision
    images: ServerImages | None = None

    def run(
        self, rule: ServerRule, vit: PatchViT, blobs: BlobStore, placement: Placement, progress: Callable[[str], None]
    ) -> tuple[SavedState, dict[str, float]]:
        """Return the next state, written to `blobs`, and figures. Raises EmptyCohort. Only rank 0 writes."""
        state = replace(load_state(self.before, blobs, self.names), uploads=self.kept)
        context = RoundContext(
            round=self.round,
            seed=self.seed,
            lr_scale=self.method.lr_scale(self.round, self.rounds),
            vit=vit,
            accelerator=placement.device,
            load=self.stored,
            progress=progress,
            aggregator=self.aggregator,
            precision=self.precision,
            rank=placement.rank,
            world_size=placement.world_size,
            images=self.images,
        )
        updated, figures = rule.close(state, self.uploads, context)
        if placement.rank:
            return self.before, {}
        progress(f"round {self.round}/{self.rounds}: saving the new state")
        return save_state(updated, self.groups, blobs, self.updates, self.before), figures
