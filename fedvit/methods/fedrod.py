"""FedRoD: a generic head that serves every class alike, and a personal one for what the device sees most."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedvit.methods.base import Forward, GroupRule, Images, Method, ServerRule, StepInputs, cross_entropy, run_model
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.extra_head import ExtraHead
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

PERSONAL_HEAD = "personal_head"

ABSENT = -1e9
"""Stands for log 0: as good as minus infinity in a softmax, but no NaN when multiplied by 0."""


@dataclass(frozen=True, kw_only=True)
class FedRoD(Method):
    """Extractor and generic head learn by balanced softmax and are averaged; the personal head stays.

    Source: Chen and Chao, arXiv:2107.00778, with a linear personal head. Both losses are minimised in one
    step, which is the same as two steps, since neither reaches the other's tensors. The personal head reads the
    class token before the final norm, as in FedTP's code, where that norm belongs to the generic head; the paper's
    heads read the same features: `personal_reads` "normed". Both heads use the method's optimizer. In FedTP's code
    the personal head has SGD of its own without momentum and weight decay, which is the same at momentum 0.
    The paper reports two accuracies, that of both heads together on a device's own classes and that of the generic
    head: `evaluate_with` says which one is tested, and does not change what is trained. The variant that makes the
    personal head from the class distribution is not here.
    """

    source: ClassVar[str] = "Chen and Chao, arXiv:2107.00778"
    why_one_class = "its balanced loss weighs classes by their images"

    personal_reads: Literal["class_token", "normed"] = "class_token"  # before the final norm, or as the generic head
    evaluate_with: Literal["both", "generic"] = "both"  # heads that answer in a test

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (ExtraHead(name=PERSONAL_HEAD),)

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("personal_head", Role.LOCAL, (f"{PERSONAL_HEAD}.*",)),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        heads = two_heads(vit, tensors, images, normed=self.personal_reads == "normed")
        return Forward(heads.generic + heads.personal if self.evaluate_with == "both" else heads.generic, {})

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        heads = two_heads(vit, tensors, inputs.images, normed=self.personal_reads == "normed")
        return Objective(two_head_loss(heads, inputs), {})

    def generic_logits(self, vit: PatchViT, tensors: Named, images: Images) -> Tensor:
        return two_heads(vit, tensors, images).generic

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return WeightedMean()


class TwoHeads(NamedTuple):
    """The answers of two heads for a batch. Letters: B samples, C classes, D width."""

    generic: Tensor  # (B, C)
    personal: Tensor  # (B, C), from detached features
    features: Tensor  # (B, D) what the personal head reads


def two_heads(vit: PatchViT, tensors: Named, images: Images, *, normed: bool = False) -> TwoHeads:
    """The personal head reads the class token before the final norm, or `normed`, as the generic head does."""

    def body(vit: PatchViT) -> TwoHeads:
        x_BND = vit.run_to_class(vit.embed(*images), 0)
        features = vit.features(x_BND, normed=normed)
        return TwoHeads(vit.classify(x_BND), vit.head(features.detach(), PERSONAL_HEAD), features)

    heads: TwoHeads = run_model(vit, tensors, body)
    return heads


def two_head_loss(heads: TwoHeads, inputs: StepInputs) -> Tensor:
    """Balanced softmax for the generic head, plus cross-entropy of the sum for the personal one alone.

    Balanced softmax adds log pi_c to the logits, pi the device's share of each class; class counts do the same,
    as they differ from shares by a constant.
    """
    counts = inputs.facts["class_counts"]
    prior = torch.where(counts > 0, torch.log(counts.clamp(min=1)), ABSENT)
    balanced = cross_entropy(heads.generic + prior, inputs.labels)
    own = cross_entropy(heads.generic.detach() + heads.personal, inputs.labels)
    return inputs.mean(balanced + own)
