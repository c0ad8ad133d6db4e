"""FedRep: first a device's own head, then the common body."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from fedvit.methods.fedper import FedPer
from fedvit.models.vit import PatchViT
from fedvit.program import Train


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    """FedPer's roles in two phases, in each of which the other part stands still.

    Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", arXiv:2102.07078.
    Chosen: the body's optimizer is that of the head, fresh in each phase. `order` is for comparison, the paper trains
    the head first.
    """

    source: ClassVar[str] = "Collins et al., arXiv:2102.07078"

    epochs: Annotated[int, Meta(ge=1)] = 1  # of the body
    head_epochs: Annotated[int, Meta(ge=1)] = 10
    order: Literal["head_first", "body_first"] = "head_first"

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        head = self.phase(("personal",), graph="train_head", epochs=self.head_epochs)
        body = self.phase(("shared",), graph="train_body")
        return (head, body) if self.order == "head_first" else (body, head)
