"""CAFF: a device trains the last layers that fit its limits; the server averages each layer over those that did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.known_values import SPARED_BLOCKS
from fedvit.methods.aggregators import Floats
from fedvit.methods.base import GroupRule, RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights
from fedvit.models.vit import ModelPart, PatchViT
from fedvit.program import Role


@dataclass(frozen=True, kw_only=True)
class CAFF(FedAvg):
    """The last `layers` blocks, the final norm and the head are trained and sent back; all others stay as they are.

    `layers` may differ between devices: by `variants`, and by the budgets of devices, which it is reduced to.
    Source: Pfeiffer et al., "Efficient Federated Finetuning of Tiny Transformers with Resource-Constrained Devices",
    arXiv:2411.07826. Differs from the paper: the operator, or the prediction of a device's costs, sets the layers.
    """

    source: ClassVar[str] = "Pfeiffer et al., arXiv:2411.07826"

    layers: Annotated[int, Meta(ge=1, extra={SPARED_BLOCKS: 0})] = 2  # blocks that a device trains, the last ones

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {"blocks"}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        first = vit.depth - self.layers
        return (
            GroupRule("head", Role.SHARED, HEAD),
            GroupRule("norm", Role.SHARED, ("norm.*", "attn_pool.*", "fc_norm.*")),
            # a group a block: one that nobody trains keeps its digest and is sent once
            *(
                GroupRule(f"block.{block}", Role.SHARED if block >= first else Role.GLOBAL, (f"blocks.{block}.*",))
                for block in range(vit.depth)
            ),
            GroupRule("embed", Role.FROZEN, ("*",)),
        )

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return MeanOfTrained()


@dataclass(frozen=True, kw_only=True)
class MeanOfTrained(WeightedMean):
    """Averages each tensor over the devices that sent it."""

    @property
    def why_no_regions(self) -> str:
        return "its server averages each layer over the devices that trained it"

    @property
    def averages(self) -> bool:
        return False

    def average(self, state: ServerState, uploads: Sequence[Upload], context: RoundContext) -> dict[str, Floats]:
        """Raises EmptyCohort as the mean does."""
        steps = super().average(state, uploads, context)
        weights, shares = cohort_weights(uploads, context.round), dict.fromkeys(steps, 0.0)
        for upload in uploads:
            for name in upload.load() if weights[upload.device] else ():
                if name in shares:
                    shares[name] += weights[upload.device]
        return {name: step / shares[name] for name, step in steps.items()}
