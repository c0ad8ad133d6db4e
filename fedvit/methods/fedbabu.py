"""FedBABU: the body is trained with a fixed head, and each device tunes a copy before its test."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedvit.methods.base import PREDICT, GroupRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.parts import HEAD
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Role


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedAvg):
    """The head keeps its random first value, equal on all devices; an evaluation tunes, predicts and discards.

    Source: Oh et al., "FedBABU: Towards Enhanced Representation for Federated Image Classification",
    arXiv:2106.06042. FedPerfix, arXiv:2308.09160, says that one step tunes the head (`tune` "head", `tune_steps` 1);
    its code lets one step move everything (`tune` "all", `tune_steps` 1).
    """

    source: ClassVar[str] = "Oh et al., arXiv:2106.06042"

    tune: Literal["all", "head"] = "all"  # what an evaluation fine-tunes
    tune_epochs: Annotated[int, Meta(ge=1)] = 5
    tune_steps: Annotated[int, Meta(ge=1)] | None = None  # fine-tuning ends here at the latest
    tune_lr: Annotated[float, Meta(gt=0)] | None = None  # None: lr

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("head", Role.FROZEN, HEAD), GroupRule("body", Role.SHARED, ("*",)))

    def evaluate(self, vit: PatchViT) -> Evaluate:
        tuning = self.phase(
            ("head", "body") if self.tune == "all" else ("head",),
            graph="tune",
            epochs=self.tune_epochs,
            steps=self.tune_steps,
            lr=self.tune_lr or self.lr,
        )
        return Evaluate(graph=PREDICT, adapt=(tuning,))
