"""How a round closes: the state before, uploads, and what a server rule makes of them; as data, for any process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from coordinator.compute.checkpoint import load_state, save_state
from coordinator.config import UpdatesConfig
from coordinator.record.tables import SavedState
from fedvit.blobs import BlobStore
from fedvit.methods.aggregators import Aggregator
from fedvit.methods.base import RoundContext, ServerRule, Upload
from fedvit.models.vit import PatchViT
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array, TensorFile
from fedvit.updates import Decoded


@dataclass(frozen=True)
class StoredUploads:
    """Finds uploads by their digests; the features of one are read from its file when they are needed."""

    folder: Path  # of blobs
    shapes: dict[str, tuple[int, ...]]

    def __call__(self, digest: str) -> Mapping[str, Array]:
        return Decoded(TensorFile(BlobStore(self.folder).path(digest)), self.shapes)


class Place(NamedTuple):
    """Where a process trains, and which of those it is that train together."""

    device: str  # torch device
    rank: int = 0
    world_size: int = 1


class Joining(NamedTuple):
    """What a process is told once, before it closes rounds together with others."""

    place: Place
    port: int  # of loopback, where they find each other
    blobs: Path
    rule: ServerRule
    vit: PatchViT


@dataclass(frozen=True, kw_only=True)
class Closing:
    """One round's."""

    round: int
    rounds: int
    seed: int
    lr_scale: float
    before: SavedState
    kept: dict[str, str]  # device -> digest of its upload of an earlier round
    uploads: list[Upload]  # what is left of this round's after screening
    stored: StoredUploads
    names: list[str]  # of tensors, in the model's order
    groups: dict[str, list[str]]
    updates: UpdatesConfig
    aggregator: Aggregator
    precision: ProductPrecision

    def done(
        self, rule: ServerRule, vit: PatchViT, blobs: BlobStore, place: Place, progress: Callable[[str], None]
    ) -> tuple[SavedState, dict[str, float]]:
        """The next state, in `blobs`, and figures. Raises EmptyCohort; of several processes rank 0 alone keeps it."""
        state = replace(load_state(self.before, blobs, self.names), uploads=self.kept)
        context = RoundContext(
            round=self.round,
            seed=self.seed,
            lr_scale=self.lr_scale,
            vit=vit,
            accelerator=place.device,
            load=self.stored,
            progress=progress,
            aggregator=self.aggregator,
            precision=self.precision,
            rank=place.rank,
            world_size=place.world_size,
        )
        moved, figures = rule.close(state, self.uploads, context)
        if place.rank:
            return self.before, {}
        progress(f"round {self.round}/{self.rounds}: keeping the new state")
        return save_state(moved, self.groups, blobs, self.updates, self.before), figures
