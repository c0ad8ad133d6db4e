"""FedTP: a hypernetwork on the server writes every device's self-attention; the rest is averaged."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import PREDICT, Forward, Gathered, GroupRule, Images, Method, ServerRule, StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedrod import PERSONAL_HEAD, two_head_loss, two_heads
from fedvit.methods.generators.hypernetwork import Hypernetwork, list_generated_shapes
from fedvit.methods.knn_per import FEATURES, mixture, remembering, with_features
from fedvit.methods.optimizers import MomentumSgd
from fedvit.methods.parts import HEAD, QKV
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.together import Together
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.extra_head import ExtraHead
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import ModelPart, PatchViT
from fedvit.program import Evaluate, Role, Train

_MLP = ("blocks.*.mlp.fc1.*", "blocks.*.mlp.fc2.*")
_NORM = ("blocks.*.norm1.*", "blocks.*.norm2.*")
PARTS = {"attention": QKV, "mlp": _MLP, "norm": _NORM, "encoder": QKV + _MLP + _NORM}
_NEEDS: dict[str, tuple[ModelPart, ...]] = {
    "attention": ("attention",),
    "mlp": ("mlp",),
    "norm": ("norms",),
    "encoder": ("attention", "mlp", "norms"),
}


@dataclass(frozen=True, kw_only=True)
class FedTP(Method):
    """The weights of queries, keys and values are generated from an embedding of the device.

    Source: Li et al., "FedTP: Federated Learning by Transformer Personalization", arXiv:2211.01572. The server
    descends (equations 7 to 10 read literally would ascend). Embeddings of devices that were not asked stay
    (`all_embeddings` moves them as the released code's dense table does). The paper's model has no bias of queries,
    keys and values and heads of width 64: model options `qkv_bias = false`, `head_width = 64`; a bias that the
    model has is shared. The server descends with the paper's rate, 0.01; the released code has the same rate, with
    momentum 0.9 and weight decay 1e-3. Released code has further values that are options here: `dropout` 0.1, and of
    the model `position_std = 1` (positions and the class token begin standard normal), `first_values = "torch"` and
    `norm_eps = 1e-5`. It also normalises images by CIFAR's mean and deviation, here 0.5 and 0.5.
    `head` and `knn_weight` are the paper's extensions by FedPer, FedRoD and kNN, `parts` its Table V. Its study of
    novel devices is `novel`: "own" trains their embeddings alone, "generator" the hypernetwork with them.
    """

    source: ClassVar[str] = "FedTP, arXiv:2211.01572"

    epochs: Annotated[int, Meta(ge=1)] = 5
    batch_size: Annotated[int, Meta(ge=1)] = 64

    parts: Literal["attention", "mlp", "norm", "encoder"] = "attention"  # what is generated
    head: Literal["shared", "local", "rod"] = "shared"  # local: as FedPer; rod: FedRoD's two heads
    knn_weight: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of the nearest training images' vote; paper's 0.6; 0: off
    neighbours: Annotated[int, Meta(ge=1)] = 10
    capacity: Annotated[int, Meta(ge=1)] = 1000  # training images that a device remembers to vote
    embedding_dim: Annotated[int, Meta(ge=1)] = 32  # released code: 128
    hidden: Annotated[int, Meta(ge=1)] = 150
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # paper: beta
    server_momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # released code: 0.9
    server_weight_decay: Annotated[float, Meta(ge=0)] = 0.0  # released code: 1e-3
    all_embeddings: bool = False

    @property
    def reads_text(self) -> bool:
        return self.head != "rod" and not self.knn_weight and not self.dropout

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (ExtraHead(name=PERSONAL_HEAD),) if self.head == "rod" else ()

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {*_NEEDS[self.parts]}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        local = {"shared": (), "local": HEAD, "rod": (f"{PERSONAL_HEAD}.*",)}[self.head]
        return (
            GroupRule("head", Role.LOCAL, local),
            GroupRule(self.parts, Role.GENERATED, PARTS[self.parts]),
            GroupRule("shared", Role.SHARED, ("*",)),
        )

    @property
    def why_one_class(self) -> str | None:
        if self.head == "rod" or self.knn_weight:
            return "the heads of FedRoD and the vote of neighbours (head = 'rod', knn_weight) need classes"
        return None

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        if self.head == "rod":
            heads = two_heads(vit, tensors, images)
            return Forward(heads.generic + heads.personal, {FEATURES: heads.features})
        return with_features(vit, tensors, images)

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        if self.head == "rod":
            return Objective(two_head_loss(two_heads(vit, tensors, inputs.images), inputs), {})
        return super().objective(vit, phase, tensors, inputs)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        forward = self.forward(vit, tensors, images)
        if gathered is None:
            return forward.logits
        return mixture(forward, gathered, weight=self.knn_weight, neighbours=self.neighbours, scale=1.0)

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return remembering(vit, self.capacity) if self.knn_weight else Evaluate(graph=PREDICT)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        learns = GeneratorUpdate(
            generator=Hypernetwork(
                targets=list_generated_shapes(self, vit), embedding_dim=self.embedding_dim, hidden=self.hidden
            ),
            optimizer=MomentumSgd(momentum=self.server_momentum, weight_decay=self.server_weight_decay),
            lr=self.server_lr,
            all_embeddings=self.all_embeddings,
        )
        return Together((WeightedMean(), learns))
