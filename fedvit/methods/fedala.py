"""FedALA: a device begins a round at a mix of the shared head and its own last one, whose shares it learns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import (
    PREDICT,
    GroupRule,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
)
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Role, Train
from fedvit.tensors import Tensors

LAST, SHARE = "last.", "share."
HEAD_TENSORS = ("head.weight", "head.bias")
MIX = "mix"
"""The graph that learns the shares."""
LAST_ROUND = "last_round"


@dataclass(frozen=True, kw_only=True)
class FedALA(FedAvg):
    """The head begins at h_last + (h - h_last) W, and is trained with the whole model after that.

    h is the shared head and h_last the one that the device sent last. W, a share for each number, learns before
    the training and before a test: W <- clip(W - eta dL/dW, 0, 1), from ones.
    Source: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023,
    arXiv:2212.01197, eq. 5 and 6, with its p "higher layers" the head. Differs from the paper: W learns for
    `mix_epochs` in every round, on all images; the server keeps W and h_last, because a device may not send a
    mix of tensors that only it knows.
    """

    source: ClassVar[str] = "Zhang et al., AAAI 2023, arXiv:2212.01197"
    one_gradient: ClassVar[bool] = False

    mix_epochs: Annotated[int, Meta(ge=1)] = 1  # of the shares, before those of the model
    mix_lr: Annotated[float, Meta(gt=0)] = 1.0  # of the shares (paper: eta), no schedule

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        heads = {name: vit.tensors()[name] for name in HEAD_TENSORS}
        last = {f"{LAST}{name}": value for name, value in heads.items()}
        return last | {f"{SHARE}{name}": torch.ones_like(value) for name, value in heads.items()}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("last", Role.ASSIGNED, (f"{LAST}*",)),
            # for a novel device nobody keeps shares any more
            GroupRule("share", Role.SEEDED if self.novel else Role.GENERATED, (f"{SHARE}*",)),
            GroupRule("head", Role.SHARED, HEAD),
            GroupRule("body", Role.SHARED, ("*",)),
        )

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != MIX:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        tensors = {**fixed, **updated}
        shares = {f"{SHARE}{name}": tensors[f"{SHARE}{name}"] for name in HEAD_TENSORS}

        def mix(shares: Named) -> dict[str, Tensor]:
            last = {name: tensors[f"{LAST}{name}"] for name in HEAD_TENSORS}
            return {n: old + (inputs.anchors[n] - old) * shares[f"{SHARE}{n}"] for n, old in last.items()}

        grads, value = calculus.gradients(
            lambda shares: self.objective(vit, phase, {**tensors, **mix(shares)}, inputs), shares
        )
        shares = {name: (share - self.mix_lr * grads[name]).clamp(0, 1) for name, share in shares.items()}
        return StepResult(value.loss, {**shares, **mix(shares)}, value.collected)

    def mix_phase(self) -> Train:
        return self.phase(
            ("share", "head"), graph=MIX, epochs=self.mix_epochs, lr=self.mix_lr, slots=(), anchors=("head",)
        )

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.mix_phase(), self.phase(("head", "body")))

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return Evaluate(graph=PREDICT, adapt=() if self.novel else (self.mix_phase(),))

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanAndLastHeads()


@dataclass(frozen=True, kw_only=True)
class MeanAndLastHeads(WeightedMean):
    """Averages the model, and keeps the head and the shares with which each device has ended its newest round."""

    why_never_late = "its server keeps the head with which a device ended the newest round"
    why_no_regions = "its server keeps the head of each single device"

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        heads = {name: state.tensors[name] for name in HEAD_TENSORS}
        first = {f"{LAST}{name}": value for name, value in heads.items()}
        first |= {f"{SHARE}{name}": np.ones_like(value) for name, value in heads.items()}
        return {name: state.memory.get(f"{LAST_ROUND}/{device}/{name}", value) for name, value in first.items()}

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        memory, means = dict(state.memory), []
        for upload in uploads:
            deltas, before = upload.load(), self.generate(state, upload.device, 0)
            for name in HEAD_TENSORS:
                share = np.clip(np.add(before[f"{SHARE}{name}"], deltas[f"{SHARE}{name}"]), 0, 1)
                ended = {LAST: np.add(state.tensors[name], deltas[name]), SHARE: share}
                for kind, value in ended.items():
                    memory[f"{LAST_ROUND}/{upload.device}/{kind}{name}"] = value.astype(np.float32)
                means.append(float(share.mean()))
        return replace(updated, memory=memory), {**figures, "share_of_shared_head": float(np.mean(means))}
