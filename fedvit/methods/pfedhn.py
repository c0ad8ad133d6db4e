"""pFedHN: a hypernetwork on the server writes every device's whole model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import GroupRule, Method, ServerRule
from fedvit.methods.generators.hypernetwork import Hypernetwork, list_generated_shapes
from fedvit.methods.optimizers import MomentumSgd
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train


@dataclass(frozen=True, kw_only=True)
class PFedHN(Method):
    """All tensors are generated from an embedding of the device; with `personal_head` (pFedHN-PC) all but the head.

    Source: Shamsian et al., "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628. The paper asks
    one device per round (the run's `cohort = 1`), for 5000 rounds, and has embeddings of floor(1 + N/4) numbers, N
    the number of devices; the default is that of 50. Chosen: factors of layer norms begin around 1, since features
    would vanish with fresh ones; embeddings of devices that were not asked stay (`all_embeddings` moves them, as the
    released code's dense table does). FedTP's code runs it with embeddings of 128 numbers, `hidden = 150`, 5 epochs
    in place of 50 batches (`steps = 0`), a rate of 0.01 and no clipping.
    """

    source: ClassVar[str] = "Shamsian et al., arXiv:2103.04628"

    batch_size: Annotated[int, Meta(ge=1)] = 64
    lr: Annotated[float, Meta(gt=0)] = 0.005
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Meta(ge=0)] = 5e-5
    clip_norm: Annotated[float, Meta(gt=0)] | None = 50.0

    steps: Annotated[int, Meta(ge=0)] = 50  # batches in place of epochs; 0: epochs
    personal_head: bool = False
    embedding_dim: Annotated[int, Meta(ge=1)] = 13
    hidden: Annotated[int, Meta(ge=1)] = 100
    server_lr: Annotated[float, Meta(gt=0)] | None = None  # None: the paper's, 0.05 with a personal head, else 0.01
    server_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    server_weight_decay: Annotated[float, Meta(ge=0)] = 1e-3
    server_clip_norm: Annotated[float, Meta(gt=0)] | None = 50.0
    all_embeddings: bool = False

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("head", Role.LOCAL, HEAD if self.personal_head else ()),
            GroupRule("model", Role.GENERATED, ("*",)),
        )

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        groups = ("head", "model") if self.personal_head else ("model",)
        return (self.phase(groups, epochs=self.steps or self.epochs, steps=self.steps or None),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return GeneratorUpdate(
            generator=Hypernetwork(
                targets=list_generated_shapes(self, vit), embedding_dim=self.embedding_dim, hidden=self.hidden
            ),
            optimizer=MomentumSgd(momentum=self.server_momentum, weight_decay=self.server_weight_decay),
            lr=self.server_lr or (0.05 if self.personal_head else 0.01),
            clip_norm=self.server_clip_norm,
            all_embeddings=self.all_embeddings,
        )
