"""FedBFPT: devices train one block at a time, within a short model of sampled blocks."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.known_values import SPARED_BLOCKS
from fedvit.methods.base import GroupRule, StepInputs, run_model
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.losses import sample_losses
from fedvit.methods.parts import HEAD
from fedvit.models.vit import ModelPart, PatchViT
from fedvit.program import Draw, Role, Train

SAMPLED = "blocks"
"""The drawn numbers: which blocks follow the one that is trained."""


@dataclass(frozen=True, kw_only=True)
class FedBFPT(FedAvg):
    """Progressive learning with sampled deeper layers, for a ViT: the output layer and one block are trained.

    In stage l a device's model is blocks 0 to l of the whole one and, up to `local_blocks`, others drawn from those
    behind l, ascending, with repetition, anew for every device and round. With as many `local_blocks` as there are
    blocks it is the whole model. Only block l and the head move. The stage advances whenever half of the rounds that
    were left are over.

    Source: Wang et al., "FedBFPT: An Efficient Federated Learning Framework for BERT Further Pre-training", IJCAI
    2023, and a public copy of its code. Differs from both: image classification; the server weighs devices by their
    images; a constant rate within a round (theirs falls by 0.7 per epoch); block `local_blocks - 1` is not the last
    to be trained if there are rounds enough, and the device's model then ends with it; theirs would draw and repeat
    blocks in a whole model, too.
    """

    source: ClassVar[str] = "Wang et al., FedBFPT, IJCAI 2023; baseline of EFTViT, arXiv:2412.00334"

    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: Annotated[float, Meta(gt=0)] = 5e-5
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01

    # depth of a device's model; None: half (theirs: 6 of 12)
    local_blocks: Annotated[int, Meta(ge=1, extra={SPARED_BLOCKS: 0})] | None = None
    with_norm: bool = False  # the final norm is part of the output layer
    stage: Annotated[int, Meta(ge=0)] = 0  # the block that is trained; every round sets it

    def in_round(self, round_number: int, rounds: int) -> "FedBFPT":
        return replace(self, stage=stage_of(round_number, rounds))

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {"blocks"}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        def role(trained: bool) -> Role:
            return Role.SHARED if trained else Role.GLOBAL

        block = self._block(vit)
        return (
            GroupRule("head", Role.SHARED, HEAD),
            GroupRule("norm", role(self.with_norm), ("norm.*", "attn_pool.*", "fc_norm.*")),
            # a group a block: what did not move keeps its digest and is not sent again
            *(GroupRule(f"block.{index}", role(index == block), (f"blocks.{index}.*",)) for index in range(vit.depth)),
            GroupRule("embed", Role.GLOBAL, ("*",)),
        )

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        block, count = self._block(vit), self._count_sampled(vit)
        last = vit.depth if self._is_whole(vit) else block + 1 + count

        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_to_class(vit.embed(*inputs.images), 0, last))

        if count:
            tensors = {**tensors, **_place(vit, tensors, block + 1, inputs.draws[SAMPLED])}
        return Objective(inputs.mean(sample_losses(vit, run_model(vit, tensors, body), inputs.labels)), {})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        (phase,) = super().phases(vit)
        low, count = self._block(vit) + 1, self._count_sampled(vit)
        if not count:
            return (self.phase(phase.groups),)
        draw = Draw(name=SAMPLED, low=low, high=vit.depth, count=count, ascending=True)
        return (self.phase(phase.groups, draws=(draw,)),)

    def _block(self, vit: PatchViT) -> int:
        """The block that is trained; the last one when there are more stages than blocks."""
        return min(self.stage, vit.depth - 1)

    def _count_sampled(self, vit: PatchViT) -> int:
        """Return the number of blocks that a device draws."""
        local = self.local_blocks or (vit.depth + 1) // 2
        block = self._block(vit)
        return 0 if self._is_whole(vit) or block == vit.depth - 1 else max(0, local - block - 1)

    def _is_whole(self, vit: PatchViT) -> bool:
        """Return True if a device's model has every block, each once."""
        return self.local_blocks == vit.depth


def stage_of(round_number: int, rounds: int) -> int:
    """Count how often half of the remaining rounds have passed before a round; rounds count from 1.

    >>> [number for number in range(2, 201) if stage_of(number, 200) > stage_of(number - 1, 200)]
    [101, 151, 176, 189, 195, 198, 200]
    """
    stage, left = 0, rounds
    while left > 1 and round_number > rounds - left // 2:
        stage, left = stage + 1, left // 2
    return stage


def _place(vit: PatchViT, tensors: Named, first: int, drawn: Tensor) -> dict[str, Tensor]:
    """Tensors of the blocks from `first` on that make them equal to the drawn ones."""
    prefix = f"blocks.{first}."
    placed: dict[str, Tensor] = {}
    for rest in (name.removeprefix(prefix) for name in tensors if name.startswith(prefix)):
        frozen = torch.stack([tensors[f"blocks.{block}.{rest}"] for block in range(first, vit.depth)])
        chosen = frozen.index_select(0, drawn - first)
        placed |= {f"blocks.{first + place}.{rest}": value for place, value in enumerate(chosen.unbind())}
    return placed
