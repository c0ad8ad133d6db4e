"""Train the server's part of a split model on the features that devices uploaded."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.optimizers import Optimizer
from fedvit.models.vit import PatchViT
from fedvit.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class FeatureTraining(ServerRule):
    """Supervised training of the blocks from `first_block` on, the norm and the head.

    The store holds one upload per device: a device that comes again replaces its own, others stay. The
    optimizer's state is kept across rounds. Source: EFTViT, arXiv:2412.00334, sections 3.5 and 3.6.
    """

    collected: str  # which collected output is the model's input here
    first_block: int
    epochs: int
    batch_size: int
    optimizer: Optimizer
    lr: float
    keep: bool  # train on every device's newest upload, or on this round's alone

    def close(
        self, state: ServerState, uploads: Iterable[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort when there is no feature to train on."""
        fresh = {upload.device: upload.digest for upload in uploads}
        kept = {**state.uploads, **fresh} if self.keep else fresh
        if not fresh:
            raise EmptyCohort(f"round {context.round}: no device uploaded features")
        shelves = [context.load(kept[device]) for device in sorted(kept)]
        buckets = _by_token_count(shelves, self.collected)
        items = sum(len(labels) for _, labels in buckets)
        if not items:
            raise EmptyCohort(f"round {context.round}: the uploads of {len(kept)} devices hold no feature")
        names = list(state.tensors)
        device = torch.device(context.accelerator)
        values = [torch.tensor(state.tensors[name], device=device, requires_grad=True) for name in names]
        optimizer = self.optimizer.in_torch(values, self.lr * context.lr_scale)
        self._restore(optimizer, values, names, state.memory)
        vit = context.vit.to(device)

        def forward(features: Tensor) -> Tensor:
            def body(vit: PatchViT) -> Tensor:
                return vit.classify(vit.run_blocks(features, self.first_block, vit.depth))

            logits: Tensor = vit.call(dict(zip(names, values, strict=True)), body)
            return logits

        draw = np.random.default_rng([context.seed, context.round])
        losses: list[float] = []
        for epoch in range(self.epochs):
            losses = []
            for features, labels in _batches(buckets, self.batch_size, draw):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    forward(torch.from_numpy(features).to(device)), torch.from_numpy(labels).to(device)
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
        return replace(state, tensors=tensors, memory=self._memory(optimizer, values, names), uploads=kept), figures

    def _memory(self, optimizer: torch.optim.Optimizer, values: list[Tensor], names: list[str]) -> Tensors:
        memory: Tensors = {}
        for name, value in zip(names, values, strict=True):
            for slot, content in optimizer.state[value].items():
                if content is not None:
                    memory[f"{slot}/{name}"] = content.detach().cpu().numpy()
        return memory

    def _restore(
        self, optimizer: torch.optim.Optimizer, values: list[Tensor], names: list[str], memory: Tensors
    ) -> None:
        by_name = dict(zip(names, values, strict=True))
        for key, content in memory.items():
            slot, _, name = key.partition("/")
            value = by_name[name]
            # Adam counts its steps in a tensor that stays on the CPU
            target = torch.device("cpu") if slot == "step" else value.device
            optimizer.state[value][slot] = torch.tensor(content, device=target)


def _by_token_count(shelves: list[Tensors], collected: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(features, labels) of equal token count: different mask ratios must not share a batch."""
    grouped: dict[int, list[Tensors]] = {}
    for shelf in shelves:
        grouped.setdefault(shelf[collected].shape[1], []).append(shelf)
    return [
        (np.concatenate([shelf[collected] for shelf in group]), np.concatenate([shelf["labels"] for shelf in group]))
        for _, group in sorted(grouped.items())
    ]


def _batches(
    buckets: list[tuple[np.ndarray, np.ndarray]], size: int, draw: np.random.Generator
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches over all buckets, in shuffled order; each batch comes from one bucket."""
    picks: list[tuple[int, np.ndarray]] = []
    for number, (_, labels) in enumerate(buckets):
        order = draw.permutation(len(labels))
        picks += [(number, order[start : start + size]) for start in range(0, len(order), size)]
    for position in draw.permutation(len(picks)):
        number, rows = picks[position]
        features, labels = buckets[number]
        yield features[rows], labels[rows]
