"""FedNTD: on the classes that an image does not have, each device keeps to the answers of the round's start."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import StepInputs, cross_entropy
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.fedrod import ABSENT
from fedvit.models.vit import PatchViT
from fedvit.program import Train


@dataclass(frozen=True, kw_only=True)
class FedNTD(FedAvg):
    """A device minimises its loss + beta KL(q | p): p and q are the answers of its model and of the round's first one,
    at temperature tau, over all classes but the image's own.

    Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS
    2022, arXiv:2106.03097. Differs from the paper: the divergence is not multiplied by tau^2.
    """

    source: ClassVar[str] = "Lee et al., NeurIPS 2022, arXiv:2106.03097"
    why_one_class = "it distils the answers for the classes that are not a sample's own"

    beta: Annotated[float, Meta(ge=0)] = 1.0  # strength of the distillation; 0 is FedAvg
    tau: Annotated[float, Meta(gt=0)] = 1.0  # temperature of both answers

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        logits, collected = self.forward(vit, tensors, inputs.images)
        first = self.forward(vit, {**tensors, **inputs.anchors}, inputs.images).logits
        loss = inputs.mean(cross_entropy(logits, inputs.labels))
        apart = diverge_on_others(first / self.tau, logits / self.tau, inputs.labels)
        return Objective(loss + self.beta * inputs.mean(apart), collected, shown=loss)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",), anchors=("model",)),)


def diverge_on_others(teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
    """Per sample: KL(teacher | student) of softmaxes over all classes but the label's; of text the mean of positions.

    (B, C) logits and (B,) labels, or (B, T, C) and (B, T), give (B,).
    """
    is_label = (labels.unsqueeze(-1) == torch.arange(student.shape[-1], device=labels.device)).to(student.dtype)
    are_others = (is_label == 0).to(student.dtype)
    wanted, answer = (torch.log_softmax(logits + ABSENT * is_label, dim=-1) for logits in (teacher, student))
    apart = (are_others * wanted.exp() * (wanted - answer)).sum(dim=-1)
    return apart if apart.ndim == 1 else apart.mean(dim=1)
