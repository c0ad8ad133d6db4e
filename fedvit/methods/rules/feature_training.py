"""Train the server's part of a split model on the features that devices uploaded."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.losses import sample_losses
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.products import products_in
from fedvit.methods.rules.memory import with_tensors
from fedvit.methods.rules.optimizer_state import restore, save_state
from fedvit.models.vit import PatchViT
from fedvit.program import LABELS
from fedvit.tensors import TensorReader, reader_of

_FEATURES = "features."


def features_into(block: int) -> str:
    """The name of uploaded features that enter a block."""
    return f"{_FEATURES}{block}"


@dataclass(frozen=True, kw_only=True)
class FeatureTraining(ServerRule):
    """Supervised training of the server's blocks, the norm and the head.

    Features enter the model at the block that their name says (`features_into`), so devices may differ in
    their split: a block learns from those that enter at or below it. The store holds one upload per device:
    a device that comes again replaces its own, others stay, until `store_bytes` are exceeded: then those of the
    oldest round are dropped first, of one round in the order of the devices' names, but never this round's.
    The optimizer's state is kept across rounds. Source: EFTViT, arXiv:2412.00334, sections 3.5 and 3.6;
    different splits and mask ratios, and the limit, are ours.
    """

    epochs: int
    batch_size: int
    optimizer: Optimizer
    lr: float
    keep: bool  # train on every device's newest upload, or on this round's alone
    store_bytes: int | None = None  # limit of stored uploads; the oldest are dropped first. None: no limit

    why_never_late = None
    """Features stay valid training examples in later rounds."""

    @property
    def is_divided(self) -> bool:
        """Each process takes some items of every batch."""
        return True

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """In memory are two batches, the labels and the order of all features; the features stay in their files.

        Raises EmptyCohort when there is no feature to train on.
        """
        fresh = {upload.device: upload.digest for upload in uploads}
        if not fresh:
            raise EmptyCohort("FV1502", f"round {context.round}: no device uploaded features")
        older = {device: digest for device, digest in state.uploads.items() if device not in fresh} if self.keep else {}
        shelves = {device: reader_of(context.load(digest)) for device, digest in (older | fresh).items()}
        dropped = self._choose_dropped(list(older), {device: shelf.stored_bytes for device, shelf in shelves.items()})
        kept = {device: digest for device, digest in (older | fresh).items() if device not in dropped}
        buckets = _by_shape([shelves[device] for device in sorted(kept)])
        items = sum(len(bucket.labels) for bucket in buckets)
        if not items:
            raise EmptyCohort("FV1502", f"round {context.round}: the uploads of {len(kept)} devices hold no feature")
        names = list(state.tensors)
        device = torch.device(context.accelerator)
        values = [torch.nn.Parameter(torch.tensor(state.tensors[name], device=device)) for name in names]
        optimizer = self.optimizer.in_torch(list[Tensor](values), self.lr * context.lr_scale)
        by_name = dict(zip(names, values, strict=True))
        restore(optimizer, by_name, state.memory)
        vit = context.vit.to(device)
        forward: torch.nn.Module = _Half(vit, by_name)
        if context.world_size > 1:
            skips = any(bucket.block > _first_block(names) for bucket in buckets)  # some blocks have no gradient
            forward = DistributedDataParallel(forward, find_unused_parameters=skips)
        draw = np.random.default_rng([context.seed, context.round])
        losses: list[float] = []
        for epoch in range(self.epochs):
            losses = []
            picks = _shuffle(buckets, self.batch_size, draw, (context.rank, context.world_size))
            for number, batch in enumerate(_read_ahead(picks), start=1):
                optimizer.zero_grad()  # to None: blocks below this one stay as they are, weight decay included
                with products_in(context.precision, device):
                    logits = forward(torch.from_numpy(batch.features_BND).to(device), batch.block)
                    labels = torch.from_numpy(batch.labels).to(device)
                    if vit.label_form:
                        loss = sample_losses(vit, logits, labels).mean()
                    else:
                        loss = torch.nn.functional.cross_entropy(logits, labels)
                (loss * batch.share).backward()
                optimizer.step()
                losses.append(float(loss.detach()) * batch.counted)
                context.progress(f"server epoch {epoch + 1}/{self.epochs}, batch {number}/{len(picks)}")
        vit.to("cpu")
        loss_sum = torch.tensor(sum(losses), dtype=torch.float64, device=device)
        if context.world_size > 1:
            torch.distributed.all_reduce(loss_sum)
        tensors = {name: value.detach().cpu().numpy() for name, value in zip(names, values, strict=True)}
        figures = {
            "server_loss": float(loss_sum) / items,
            "server_features": float(items),
            "uploaded_features": float(sum(shelves[device].shape(LABELS)[0] for device in fresh)),
            "unequal_uploads": float(sum(_is_unequal(shelves[device]) for device in fresh)),
            "stored_devices": float(len(kept)),
            "stored_bytes": float(sum(shelves[device].stored_bytes for device in kept)),
            "dropped_devices": float(len(dropped)),
        }
        return replace(
            state, tensors=tensors, memory=with_tensors({}, save_state(optimizer, by_name)), uploads=kept
        ), figures

    def _choose_dropped(self, older: list[str], stored_bytes: dict[str, int]) -> set[str]:
        """Devices whose uploads of earlier rounds are dropped; `older` begins with the oldest round."""
        dropped: set[str] = set()
        if self.store_bytes is not None:
            excess = sum(stored_bytes.values()) - self.store_bytes
            for device in older:
                if excess <= 0:
                    break
                dropped.add(device)
                excess -= stored_bytes[device]
        return dropped


class _Half(torch.nn.Module):
    """The server's blocks, the norm and the head, with the tensors that are trained in place of the model's own."""

    def __init__(self, vit: PatchViT, tensors: dict[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._names = list(tensors)
        self._values = torch.nn.ParameterList(tensors.values())
        self._call = vit.call  # the model itself is none of the modules whose gradients processes average

    def forward(self, features_BND: Tensor, block: int) -> Tensor:
        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_to_class(features_BND, block))

        logits: Tensor = self._call(dict(zip(self._names, self._values, strict=True)), body)
        return logits


class _Batch(NamedTuple):
    """The part of a batch that one process computes. Letters: B items, N tokens, D width."""

    block: int  # that the features enter
    features_BND: np.ndarray
    labels: np.ndarray  # (B, ...)
    counted: int  # of these items; 0 where there is one that is another process's
    share: float  # of their mean loss in the gradient: the mean over all processes of these is the whole batch's


class _Bucket(NamedTuple):
    """Features that may share a batch: those of some uploads, one after the other."""

    block: int  # that they enter
    shelves: list[TensorReader]
    starts: np.ndarray  # (uploads,): the first item of each
    labels: np.ndarray  # (items, ...)

    def batch(self, items: np.ndarray, rank: int, world_size: int) -> _Batch:
        """Read the items of one process, of a batch; those of one upload in the order in which they lie."""
        mine = np.array_split(items, world_size)[rank]
        counted, share = len(mine), world_size * len(mine) / len(items)
        items = mine if counted else items[:1]  # all processes step together, also one for which nothing is left
        name = features_into(self.block)
        shape = self.shelves[0].shape(name)[1:]
        features_BND = np.empty((len(items), *shape), np.float32)
        flat = features_BND.reshape(len(items), -1)
        for place in np.argsort(items):
            number = int(np.searchsorted(self.starts, items[place], side="right")) - 1
            row = int(items[place] - self.starts[number])
            flat[place] = self.shelves[number].part(name, row * flat.shape[1], (row + 1) * flat.shape[1])
        return _Batch(self.block, features_BND, self.labels[items], counted, share)


def _first_block(names: list[str]) -> int:
    """
    >>> _first_block(["blocks.10.norm1.weight", "blocks.9.norm1.weight", "head.weight"])
    9
    """
    return min((int(name.split(".")[1]) for name in names if name.startswith("blocks.")), default=0)


def _is_unequal(shelf: TensorReader) -> bool:
    """Return True if an upload has more features of one of its classes than of another; only where each has one."""
    labels = shelf[LABELS]
    if labels.ndim > 1:
        return False
    _, counts = np.unique(labels, return_counts=True)
    return len(set(counts.tolist())) > 1


def _by_shape(shelves: list[TensorReader]) -> list[_Bucket]:
    """Features by the block that they enter and their number of tokens, which differ with split and mask ratio."""
    grouped: dict[tuple[int, int], list[TensorReader]] = {}
    for shelf in shelves:
        for name in shelf:
            if name.startswith(_FEATURES) and shelf.shape(name)[0]:
                key = int(name.removeprefix(_FEATURES)), shelf.shape(name)[1]
                grouped.setdefault(key, []).append(shelf)
    buckets = []
    for (block, _), group in sorted(grouped.items()):
        lengths = [shelf.shape(LABELS)[0] for shelf in group]
        starts = np.cumsum([0, *lengths[:-1]])
        buckets.append(_Bucket(block, group, starts, np.concatenate([shelf[LABELS] for shelf in group])))
    return buckets


def _shuffle(
    buckets: list[_Bucket], size: int, draw: np.random.Generator, process: tuple[int, int]
) -> list[Callable[[], _Batch]]:
    """Return readers of an epoch's batches, over all buckets in shuffled order; each batch comes from one bucket.

    `process` is the rank and the number of those that share a batch.
    """
    picks: list[Callable[[], _Batch]] = []
    for bucket in buckets:
        order = draw.permutation(len(bucket.labels))
        picks += [partial(bucket.batch, order[start : start + size], *process) for start in range(0, len(order), size)]
    return [picks[position] for position in draw.permutation(len(picks))]


def _read_ahead(picks: Sequence[Callable[[], _Batch]]) -> Iterator[_Batch]:
    """Each batch is read while the one before it is worked on."""
    with ThreadPoolExecutor(1, thread_name_prefix="features") as reader:
        following = reader.submit(picks[0])
        for pick in picks[1:]:
            batch = following.result()
            following = reader.submit(pick)
            yield batch
        yield following.result()
