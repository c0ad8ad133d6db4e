"""EFTViT: devices train the first blocks on masked patches, the server trains the rest on their features."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedvit.known_values import SPARED_BLOCKS
from fedvit.methods.base import (
    PREDICT,
    Forward,
    Gathered,
    GroupRule,
    Images,
    Method,
    ServerRule,
    StepInputs,
    StepResult,
    run_model,
)
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.rules.feature_training import FeatureTraining, features_into
from fedvit.models.vit import ModelPart, PatchViT
from fedvit.program import Collect, Evaluate, Role, Train, count_kept_patches

CLIENT, KEEP = "client.", "keep_head"
"""Beginning of the names of a device's own head, and the graph that keeps it after training."""


@dataclass(frozen=True, kw_only=True)
class EFTViT(Method):
    """Local blocks stay on the device; the gradient reaches them through a frozen copy of the global ones.

    Source: "EFTViT: Efficient Federated Training of Vision Transformers with Masked Images on
    Resource-Constrained Clients", arXiv:2412.00334. Chosen where the paper is silent: learning rate,
    the median over the classes that a device has, evaluation with the newest global module and head.
    Where the paper contradicts itself (sections 3.5 and 3.6), `server_data` selects. The paper's sampling by the median
    is to upload equally many features of each class. It does not where a class has too few images; `sampler`
    "balanced" does. The server also learns how many images a device has, and the names of its classes. Devices may have
    different splits and mask ratios (the run's `variants`), which the paper only tests one at a time. The paper does
    not say whose head answers: `client_head` is that of the device's last training, whose loss is then that on one
    batch.
    """

    source: ClassVar[str] = "EFTViT, arXiv:2412.00334"
    why_no_patches = "the features that it sends have one label each"
    loop_options: ClassVar[tuple[str, ...]] = (*Method.loop_options, "threshold", "sampler")

    epochs: Annotated[int, Meta(ge=1)] = 5
    optimizer: Literal["sgd", "adamw"] = "adamw"
    lr: Annotated[float, Meta(gt=0)] = 1e-4  # paper's value is unknown; 5e-5 suits pretrained weights
    weight_decay: Annotated[float, Meta(ge=0)] = 0.05
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_rounds: Annotated[int, Meta(ge=0)] = 5

    # blocks that the device trains (paper: M); at least one is left to the server
    local_blocks: Annotated[int, Meta(ge=1, extra={SPARED_BLOCKS: 1})] = 2
    mask: Annotated[float, Meta(ge=0, lt=1)] = 0.75  # (paper: r)
    threshold: Annotated[float, Meta(gt=0)] = 1.0  # times the median: features uploaded per class
    sampler: Literal["median", "balanced"] = "median"  # balanced: exactly as many of each class; median: the paper's
    server_epochs: Annotated[int, Meta(ge=1)] = 2  # passes over the features per round (paper: E_s)
    server_lr: Annotated[float, Meta(gt=0)] | None = None  # None: the devices' lr
    server_batch_size: Annotated[int, Meta(ge=1)] = 32
    server_data: Literal["store", "latest"] = "store"  # features of every device so far, or of this round's
    client_head: bool = False  # devices answer with the head that they trained last, not with the server's
    feature_store_bytes: Annotated[int, Meta(ge=1)] | None = None  # most that the store keeps; None: no limit

    def needs(self) -> frozenset[ModelPart]:
        return super().needs() | {"blocks"}

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        head = {name: value for name, value in vit.tensors().items() if name.startswith("head.")}
        return {f"{CLIENT}{name}": value for name, value in head.items()} if self.client_head else {}

    @property
    def why_one_class(self) -> str | None:
        return "sampler = 'balanced' counts images by class" if self.sampler == "balanced" else None

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        # a group a block, so that devices of every split fetch the same blobs
        blocks = (
            GroupRule(f"block.{block}", Role.GLOBAL, (f"blocks.{block}.*",))
            for block in range(self.local_blocks, vit.depth)
        )
        client = (GroupRule("client_head", Role.LOCAL, (f"{CLIENT}*",)),) if self.client_head else ()
        return (
            *client,
            GroupRule("head", Role.SEEDED, ("head.*",)),
            GroupRule("norm", Role.GLOBAL, ("norm.*", "attn_pool.*", "fc_norm.*")),
            *blocks,
            GroupRule("local", Role.LOCAL, ("*",)),
        )

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        def body(vit: PatchViT) -> tuple[Tensor, Tensor]:
            features = vit.run_blocks(vit.embed(*images), 0, self.local_blocks)
            return vit.classify(vit.run_to_class(features, self.local_blocks)), features

        logits, features = run_model(vit, tensors, body)
        return Forward(logits, {features_into(self.local_blocks): features})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        tokens = vit.prefix_tokens + count_kept_patches(vit.patches, self.mask)
        features = Collect(features_into(self.local_blocks), (tokens, vit.width), self.threshold, sampler=self.sampler)
        train = self.phase(("local", "head"), collect=features)
        if not self.client_head:
            return (train,)
        return (train, self.phase(("client_head",), graph=KEEP, update=None, slots=(), epochs=1, steps=1))

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != KEEP:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        loss, collected, _ = self.objective(vit, phase, {**fixed, **updated}, inputs)
        return StepResult(loss, {name: fixed[name.removeprefix(CLIENT)] for name in updated}, collected)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        if not self.client_head:
            return super().predict(vit, tensors, images, gathered)
        own = {name.removeprefix(CLIENT): value for name, value in tensors.items() if name.startswith(CLIENT)}
        return self.forward(vit, {**tensors, **own}, images).logits

    def evaluate(self, vit: PatchViT) -> Evaluate:
        # the paper keeps the class distribution on the device, which counts of test images by class would tell
        return Evaluate(graph=PREDICT, counts_classes=False)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return FeatureTraining(
            epochs=self.server_epochs,
            batch_size=self.server_batch_size,
            optimizer=self.optimizer_rule(),
            lr=self.server_lr or self.lr,
            keep=self.server_data == "store",
            store_bytes=self.feature_store_bytes,
        )
