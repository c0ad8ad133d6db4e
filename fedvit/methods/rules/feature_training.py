"""Train the server's part of a split model on the features that devices uploaded."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.rules.optimizer_state import restore, saved
from fedvit.models.vit import PatchViT
from fedvit.tensors import Array

_FEATURES = "features."


def features_into(block: int) -> str:
    """The name under which devices upload what enters a block."""
    return f"{_FEATURES}{block}"


@dataclass(frozen=True, kw_only=True)
class FeatureTraining(ServerRule):
    """Supervised training of the server's blocks, the norm and the head.

    Features enter the model at the block that their name says (`features_into`), so devices may differ in
    their split: a block learns from those that enter at or below it. The store holds one upload per device:
    a device that comes again replaces its own, others stay. The optimizer's state is kept across rounds.
    Source: EFTViT, arXiv:2412.00334, sections 3.5 and 3.6; different splits and mask ratios are ours.
    """

    epochs: int
    batch_size: int
    optimizer: Optimizer
    lr: float
    keep: bool  # train on every device's newest upload, or on this round's alone

    @property
    def why_never_late(self) -> None:
        """Features are examples, whenever they were made."""
        return None

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort when there is no feature to train on."""
        fresh = {upload.device: upload.digest for upload in uploads}
        kept = {**state.uploads, **fresh} if self.keep else fresh
        if not fresh:
            raise EmptyCohort(f"round {context.round}: no device uploaded features")
        shelves = [context.load(kept[device]) for device in sorted(kept)]
        buckets = _by_shape(shelves)
        items = sum(len(bucket.labels) for bucket in buckets)
        if not items:
            raise EmptyCohort(f"round {context.round}: the uploads of {len(kept)} devices hold no feature")
        names = list(state.tensors)
        device = torch.device(context.accelerator)
        values = [torch.tensor(state.tensors[name], device=device, requires_grad=True) for name in names]
        optimizer = self.optimizer.in_torch(values, self.lr * context.lr_scale)
        by_name = dict(zip(names, values, strict=True))
        restore(optimizer, by_name, state.memory)
        vit = context.vit.to(device)

        def forward(features: Tensor, block: int) -> Tensor:
            def body(vit: PatchViT) -> Tensor:
                return vit.classify(vit.run_to_class(features, block))

            logits: Tensor = vit.call(by_name, body)
            return logits

        draw = np.random.default_rng([context.seed, context.round])
        losses: list[float] = []
        for epoch in range(self.epochs):
            losses = []
            for block, features, labels in _batches(buckets, self.batch_size, draw):
                optimizer.zero_grad()  # to None: blocks below this one stay as they are, weight decay included
                loss = torch.nn.functional.cross_entropy(
                    forward(torch.from_numpy(features).to(device), block), torch.from_numpy(labels).to(device)
                )
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()) * len(labels))
            context.progress(f"server epoch {epoch + 1}/{self.epochs}")
        vit.to("cpu")
        tensors = {name: value.detach().cpu().numpy() for name, value in zip(names, values, strict=True)}
        figures = {
            "server_loss": sum(losses) / items,
            "server_features": float(items),
            "stored_devices": float(len(kept)),
        }
        return replace(state, tensors=tensors, memory=saved(optimizer, by_name), uploads=kept), figures


class _Bucket(NamedTuple):
    """Features that may share a batch. Letters: I items, N tokens, D width."""

    block: int  # that they enter
    features_IND: np.ndarray
    labels: np.ndarray  # (I,)


def _by_shape(shelves: list[Mapping[str, Array]]) -> list[_Bucket]:
    """Features by the block that they enter and their number of tokens, which differ with split and mask ratio."""
    grouped: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    for shelf in shelves:
        for name, features in shelf.items():
            if name.startswith(_FEATURES):
                key = int(name.removeprefix(_FEATURES)), features.shape[1]
                grouped.setdefault(key, []).append((features, shelf["labels"]))
    return [
        _Bucket(block, np.concatenate([each for each, _ in group]), np.concatenate([labels for _, labels in group]))
        for (block, _), group in sorted(grouped.items())
    ]


def _batches(
    buckets: list[_Bucket], size: int, draw: np.random.Generator
) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
    """Shuffled batches over all buckets, in shuffled order; each batch comes from one bucket."""
    picks: list[tuple[int, np.ndarray]] = []
    for number, bucket in enumerate(buckets):
        order = draw.permutation(len(bucket.labels))
        picks += [(number, order[start : start + size]) for start in range(0, len(order), size)]
    for position in draw.permutation(len(picks)):
        number, rows = picks[position]
        bucket = buckets[number]
        yield bucket.block, bucket.features_IND[rows], bucket.labels[rows]
