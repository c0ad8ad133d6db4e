"""pFedPG: the server generates a few prompts for every device, whose backbone stays frozen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods.base import (
    PREDICT,
    Gathered,
    GroupRule,
    Images,
    Method,
    RoundContext,
    ServerRule,
    ServerState,
    Upload,
)
from fedvit.methods.calculus import Named
from fedvit.methods.generators.base import Generator
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.generators.prompts import BASE, PromptAttention, PromptBasis, PromptStatistics
from fedvit.methods.optimizers import AdamW, Sgd
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.generator_update import SHARED, GeneratorUpdate
from fedvit.methods.rules.together import Together
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Role, Train

PROMPTS = "prompts.tokens"
COMMON = "base_prompts"
"""The base as devices see it, where they are tested with it."""


@dataclass(frozen=True, kw_only=True)
class PFedPG(Method):
    """Devices tune their prompts and a head of their own; the server learns from how the prompts changed.

    Source: Yang et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
    Generation", arXiv:2308.15367. The server descends (equations 4 and 5 read literally would ascend). Chosen where
    the paper is silent: one attention head of full width, one descriptor token, VPT's first values, the mean over
    devices (`server_weights` "sum" is the paper's, with a step that grows with the fleet), and an evaluation with the
    prompts as the device adapted them. In the paper all devices take part in every round.
    Differs from the paper, whose equation 3 with VPT's first values makes the same prompts for all devices:
    descriptors and base prompts of a size of 0.06 have products near zero, the softmax is uniform, and plain SGD of a
    rate of 0.001 does not move the descriptors. So the attention is a softmax of cosines with a fixed scale
    (`normalise`), in which no base prompt gets more than about nine tenths of the weight, and the server's optimizer
    is AdamW with a rate of 0.01, whose steps do not depend on how small a gradient is. For W_Q, W_K, W_V and W_O its
    rate is divided by the width: with the whole rate the softmax saturates within ten rounds, and descriptors get no
    gradient any more. The paper's reading is `normalise` false, `server_optimizer` "sgd", `server_lr` 0.001.
    """

    source: ClassVar[str] = "pFedPG, arXiv:2308.15367"

    epochs: Annotated[int, Meta(ge=1)] = 5
    batch_size: Annotated[int, Meta(ge=1)] = 64
    lr: Annotated[float, Meta(gt=0)] = 0.25  # (paper: gamma)
    weight_decay: Annotated[float, Meta(ge=0)] = 0.001

    steps: Annotated[int, Meta(ge=1)] | None = None  # batches in place of epochs; 1 is the paper's algorithm 1
    tokens: Annotated[int, Meta(ge=1)] = 10  # prompts (paper: K)
    generator: Literal["attention", "mlp", "adain", "basis"] = "attention"  # basis: the same prompts for all devices
    descriptor_tokens: Annotated[int, Meta(ge=1)] = 1  # attention only: 1, or as many as `tokens`
    zero_output: bool = False  # attention only: devices begin with equal prompts
    normalise: bool = True  # attention only: a softmax of scaled cosines, not of products
    hidden: Annotated[int, Meta(ge=1)] = 100  # mlp only
    server_optimizer: Literal["sgd", "adamw"] = "adamw"
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # (paper: alpha, 0.001)
    server_weights: Literal["equal", "sum", "samples"] = "equal"
    # prompts in a test: as the device adapted them, fresh from the generator, or the base that all devices share
    evaluate_with: Literal["adapted", "fresh", "base"] = "adapted"

    def model_patches(self) -> tuple[ModelPatch, ...]:
        return (Prompts(tokens=self.tokens),)

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return {COMMON: vit.tensors()[PROMPTS]} if self.evaluate_with == "base" else {}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        if self.descriptor_tokens not in (1, self.tokens):
            raise ConfigError(
                "FV1104", f"option descriptor_tokens = {self.descriptor_tokens} must be 1 or tokens = {self.tokens}"
            )
        if self.evaluate_with == "base" and self.generator == "mlp":
            raise ConfigError("FV1104", "option evaluate_with = 'base': the generator 'mlp' has no base")
        return (
            GroupRule("prompts", Role.GENERATED, (PROMPTS,)),
            GroupRule("head", Role.LOCAL, HEAD),
            GroupRule("base", Role.GLOBAL, (COMMON,)),
            GroupRule("backbone", Role.FROZEN, ("*",)),
        )

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("prompts", "head"), epochs=self.steps or self.epochs, steps=self.steps),)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        prompts = COMMON if self.evaluate_with == "base" else PROMPTS
        return self.forward(vit, {**tensors, PROMPTS: tensors[prompts]}, images).logits

    def evaluate(self, vit: PatchViT) -> Evaluate:
        return Evaluate(graph=PREDICT, kept=("prompts",) if self.evaluate_with == "adapted" else ())

    def server_rule(self, vit: PatchViT) -> ServerRule:
        learns = GeneratorUpdate(
            generator=self._generator(vit),
            optimizer=AdamW() if self.server_optimizer == "adamw" else Sgd(),
            lr=self.server_lr,
            weights=self.server_weights,
        )
        return Together((learns, PublishBase())) if self.evaluate_with == "base" else learns

    def _generator(self, vit: PatchViT) -> Generator:
        first = vit.tensors()[PROMPTS]
        bound = math.sqrt(6 / (3 * vit.patch_size**2 + vit.width))  # as the prompts themselves begin
        match self.generator:
            case "attention":
                return PromptAttention(
                    target=PROMPTS,
                    first=first,
                    bound=bound,
                    descriptor_tokens=self.descriptor_tokens,
                    zero_output=self.zero_output,
                    normalise=self.normalise,
                    # AdamW moves every entry by the rate, and a product adds up `width` entries
                    matrix_rate=1 / vit.width if self.server_optimizer == "adamw" else 1.0,
                )
            case "mlp":  # one linear layer for all prompts is one for each, side by side
                return Hypernetwork(targets={PROMPTS: tuple(first.shape)}, embedding_dim=vit.width, hidden=self.hidden)
            case "adain":
                return PromptStatistics(target=PROMPTS, first=first, bound=bound)
            case "basis":
                return PromptBasis(target=PROMPTS, first=first)


class PublishBase(ServerRule):
    """Gives devices the base that the generator learnt."""

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        return replace(state, tensors={**state.tensors, COMMON: state.memory[f"{SHARED}{BASE}"]}), {}
