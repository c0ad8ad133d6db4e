"""FedRA: a device trains the additions of some drawn blocks, in a model of these blocks alone."""

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.known_values import SPARED_BLOCKS
from fedvit.methods.base import GroupRule, ServerRule, StepInputs, run_model
from fedvit.methods.caff import MeanOfTrained
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.losses import sample_losses
from fedvit.methods.parts import HEAD
from fedvit.models.vit import PatchViT, take_rows
from fedvit.program import Draw, Role, Train

DRAWN = "block"
"""Start of the names of drawn numbers: the first block of a device's model, the second, ..."""
ORDERS = 16
"""Random orders of the blocks, from which all devices' blocks are taken: a run has at most as many Programs for each
part of an order."""


@dataclass(frozen=True, kw_only=True)
class FedRA(FedLora):
    """A device's model in a round has `layers` of the blocks, in the model's order. It trains their LoRA additions.

    The server averages each block's additions over the devices that trained it. `layers` may differ between devices:
    by `variants`, and by the budgets of devices, which it is reduced to. FLOPs, activations and what is sent follow
    it; a device holds the whole frozen backbone, which it tests with, too.
    Source: Su et al., "FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
    Clients", ECCV 2024, arXiv:2311.11227, and its released code. Chosen here: a device goes through one of 16 random
    orders of the blocks, `layers` in each round, and then draws another order, so that it trains every block; the
    additions of Fed-LoRA and the head are trained, not the final norm; devices weigh as in FedAvg.
    """

    source: ClassVar[str] = "Su et al., ECCV 2024, arXiv:2311.11227"
    loop_options: ClassVar[tuple[str, ...]] = (*FedLora.loop_options, "draw")

    # blocks of a device's model; None: half (theirs: 3 to 12 of 12)
    layers: Annotated[int, Meta(ge=1, extra={SPARED_BLOCKS: 0})] | None = None
    draw: Annotated[int, Meta(ge=0)] = 0  # which blocks; every round sets it for each device

    def count_layers(self, vit: PatchViT) -> int:
        """Return the number of blocks of a device's model."""
        return self.layers or (vit.depth + 1) // 2

    def for_device(self, vit: PatchViT, device: str, round_number: int) -> "FedRA":
        parts = self._count_parts(vit)
        if parts == 1:
            return self
        times, part = divmod(round_number - 1, parts)
        digest = hashlib.blake2b(f"{vit.seed}/{times}/{device}".encode(), digest_size=8).digest()
        order = int.from_bytes(digest, "big") % ORDERS
        return replace(self, draw=order * parts + part)

    def _count_parts(self, vit: PatchViT) -> int:
        """Return the rounds in which a device goes through an order."""
        return -(-vit.depth // self.count_layers(vit))

    def list_blocks(self, vit: PatchViT) -> list[int]:
        """The blocks of the device's model, ascending."""
        count = self.count_layers(vit)
        order, part = divmod(self.draw, self._count_parts(vit))
        first = min(part * count, vit.depth - count)  # the last part has as many as the others
        return sorted(np.random.default_rng([vit.seed, order]).permutation(vit.depth)[first : first + count].tolist())

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        blocks = self.list_blocks(vit)
        return (
            GroupRule("head", Role.SHARED, HEAD),
            # a graph names all additions: those of other blocks do not move, and are not sent back
            *(
                GroupRule(
                    f"block.{block}",
                    Role.SHARED if block in blocks else Role.SEEDED,
                    (f"blocks.{block}.attn.qkv.lora_?.*",),
                )
                for block in range(vit.depth)
            ),
            GroupRule("backbone", Role.FROZEN, ("*",)),
        )

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        (phase,) = super().phases(vit)
        blocks = self.list_blocks(vit)
        if len(blocks) == vit.depth:
            return (phase,)
        # the server has drawn: a range of one number, so that devices with other blocks have the same graph
        draws = tuple(Draw(name=f"{DRAWN}{at}", low=block, high=block + 1, count=1) for at, block in enumerate(blocks))
        return (self.phase(phase.groups, draws=draws),)

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        if not inputs.draws:
            return super().objective(vit, phase, tensors, inputs)
        count = len(inputs.draws)
        blocks = torch.cat([inputs.draws[f"{DRAWN}{at}"] for at in range(count)])

        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_to_class(vit.embed(*inputs.images), 0, count))

        logits = run_model(vit, {**tensors, **place_blocks(vit, tensors, blocks)}, body)
        return Objective(inputs.mean(sample_losses(vit, logits, inputs.labels)), {})

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanOfTrained()


def place_blocks(vit: PatchViT, tensors: Named, blocks: Tensor) -> dict[str, Tensor]:
    """Return tensors of the first blocks that make them equal to `blocks`, (n,) numbers."""
    placed: dict[str, Tensor] = {}
    first = "blocks.0."
    for rest in (name.removeprefix(first) for name, _ in vit.vit.named_parameters() if name.startswith(first)):
        every = torch.stack([tensors[f"blocks.{block}.{rest}"] for block in range(vit.depth)])
        if ".lora_" in rest:  # trained
            rows = take_rows(every.flatten(1), blocks.unsqueeze(0)).squeeze(0)
            chosen = rows.reshape(len(blocks), *every.shape[1:])
        else:
            chosen = every.index_select(0, blocks)
        placed |= {f"blocks.{place}.{rest}": value for place, value in enumerate(chosen.unbind())}
    return placed
