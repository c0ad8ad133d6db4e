"""Personal analytic head: the regression over everybody's images and, with a weight of its own, the device's again."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods.analytic import (
    FITTED,
    GRAM,
    HELD_OUT,
    MOMENTS,
    SIDE,
    Analytic,
    Floats,
    RidgeRegression,
    RidgeSums,
    find_unit,
)
from fedvit.methods.base import Forward, GroupRule, Images, ServerRule, StepInputs, StepResult, cross_entropy, run_model
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.parts import HEAD
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

OWN, ROOT, WHITENED = "own_head", "root", "whitened"
"""The difference of a device's head from everybody's; and what the server publishes of everybody's sums."""
SOLVE = "solve"
"""The graph that solves for the own head."""
ITERATIONS = 20
"""Steps of an inversion: enough for condition numbers of 50,000."""

Weight = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class PersonalAnalytic(Analytic):
    """A device adds its own sums to everybody's once more, `own_weight` times as heavy as all of them together.

    With N images of everybody and n of the device it solves (G/N + lambda I + w G_k/n) W = M/N + w M_k/n. The weight w
    is one of `own_weights`: that with the smallest squared error on the images that the device holds out; without
    such images, the mean of all. The difference from everybody's head stays on the device, and is added to the newest
    head from the server. The server publishes R with R R = (G/N + lambda I)^-1 and V = R M/N, so that the device
    solves the well-conditioned system (I + w R G_kR/n) U = V + w R M_k/n, and W = R U. In the first round nothing is
    published yet: a run needs two. Every image is read once a round, and one batch a second time.
    Source: none; the sums are those of `analytic`. The inverse is that of Schulz, "Iterative Berechnung der reziproken
    Matrix", ZAMM 13, 1933.
    """

    source: ClassVar[str] = "AFL, arXiv:2405.16240, with each device's own sums added again"

    hold_out: Annotated[int, Meta(ge=2)] = 3  # of this many batches one chooses the weight, and the lambda
    own_weights: Annotated[tuple[Weight, ...], Meta(min_length=1)] = (0.01, 0.1, 0.3, 1.0, 3.0)

    def __post_init__(self) -> None:
        if self.bias:
            raise ConfigError("FV1104", "option bias = True: the personal head has no bias; leave it out")
        if self.sketch is not None:
            raise ConfigError("FV1104", f"option sketch = {self.sketch}: a device needs all sums; leave it out")

    # --- tensors --------------------------------------------------------------------------------------

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        weight = vit.tensors()["head.weight"]
        return {
            **super().extra_tensors(vit),
            OWN: torch.zeros_like(weight),
            ROOT: torch.eye(weight.shape[1]),
            WHITENED: torch.zeros_like(weight).T.contiguous(),
        }

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        # a novel device needs its own sums, too
        sums = Role.LOCAL if self.novel else Role.SHARED
        return (
            GroupRule("sums", sums, (f"{FITTED}.*", f"{HELD_OUT}.*")),
            GroupRule("own", Role.LOCAL, (OWN,)),
            GroupRule("head", Role.GLOBAL, (*HEAD, ROOT, WHITENED)),
            GroupRule("backbone", Role.FROZEN, ("*",)),
        )

    # --- the device's half ----------------------------------------------------------------------------

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        def body(vit: PatchViT) -> tuple[Tensor, Tensor]:
            features = vit.features(vit.run_to_class(vit.embed(*images), 0))
            return features, vit.head(features)

        features, logits = run_model(vit, tensors, body)
        return Forward(logits + features @ tensors[OWN].T, {})

    def generic_logits(self, vit: PatchViT, tensors: Named, images: Images) -> Tensor:
        return self.forward(vit, {**tensors, OWN: torch.zeros_like(tensors[OWN])}, images).logits

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        if phase.graph != SOLVE:
            return super().local_step(calculus, vit, phase, updated, fixed, inputs)
        own = solve_own({**fixed, **updated}, self.own_weights)
        logits = self.forward(vit, {**fixed, OWN: own}, inputs.images).logits
        return StepResult(inputs.mean(cross_entropy(logits, inputs.labels)), {OWN: own}, {})

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        # the loss of the second is that of the new head on one batch
        return (*super().phases(vit), self.phase(("own",), graph=SOLVE, slots=(), epochs=1, steps=1))

    # --- the server's half ----------------------------------------------------------------------------

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return PublishedRegression(lambdas=self.lambdas, bias=False, forget=self.forget)


def solve_own(tensors: Named, weights: tuple[float, ...]) -> Tensor:
    """Return the difference (C, D) of a device's head from everybody's. Letters: A weights, C classes, D width."""
    root_DD, start_DC = tensors[ROOT], tensors[WHITENED]
    gram_DD, moments_DC = whiten(root_DD, tensors[f"{FITTED}.{GRAM}"], tensors[f"{FITTED}.{MOMENTS}"])
    held_DD, held_DC = whiten(root_DD, tensors[f"{HELD_OUT}.{GRAM}"], tensors[f"{HELD_OUT}.{MOMENTS}"])
    weights_A11 = torch.tensor(weights, device=root_DD.device).reshape(-1, 1, 1)
    solved_ADC = solve_whitened(gram_DD, moments_DC, start_DC, weights_A11)
    products_ADC = held_DD.expand(len(weights), *held_DD.shape) @ solved_ADC
    losses_A = (solved_ADC * (products_ADC - 2 * held_DC)).sum(dim=(1, 2))
    is_best_A = (losses_A == -(-losses_A).amax(dim=0)).to(losses_A.dtype)  # all, if no image was held out
    weight = (is_best_A * weights_A11.flatten()).sum() / is_best_A.sum()
    solved_1DC = solve_whitened(gram_DD + held_DD, moments_DC + held_DC, start_DC, weight.reshape(1, 1, 1))
    own: Tensor = (root_DD @ (solved_1DC.squeeze(0) - start_DC)).T / find_unit(MOMENTS, len(root_DD))
    return own


def whiten(root_DD: Tensor, gram: Tensor, moments_DC: Tensor) -> tuple[Tensor, Tensor]:
    """Return R'GR and R'M for R = `root_DD`, and G as devices send it: rows from the diagonal's block on."""
    width, place, rows = len(root_DD), 0, []
    for first in range(0, width, SIDE):
        side = min(SIDE, width - first)
        block = gram[place : place + side * (width - first)].reshape(side, width - first)
        # what lies on the diagonal is in a block and in its transpose
        rows.append(block @ root_DD[first:] - block[:, :side] @ root_DD[first : first + side] / 2)
        place += side * (width - first)
    half_DD = root_DD.T @ torch.cat(rows)
    return half_DD + half_DD.T, root_DD.T @ moments_DC


def solve_whitened(gram_DD: Tensor, moments_DC: Tensor, start_DC: Tensor, weights_A11: Tensor) -> Tensor:
    """Return U (A, D, C) of (I + w G) U = V + w M for A weights w, with V = `start_DC`.

    The inverse X of a matrix B is the limit of X (2 I - B X), here from I / (1 + w |G| / 2): eigenvalues of B are
    between 1 and 1 + w |G|.
    """
    count, width = len(weights_A11), len(gram_DD)
    places = torch.arange(width, device=gram_DD.device)
    identity_DD = (places.unsqueeze(1) == places).to(gram_DD.dtype)
    matrix_ADD = identity_DD + weights_A11 * gram_DD
    norm = torch.sqrt(gram_DD.square().sum())
    inverse_ADD = identity_DD / (1 + weights_A11 * norm / 2)
    for _ in range(ITERATIONS):
        inverse_ADD = 2 * inverse_ADD - inverse_ADD @ (matrix_ADD @ inverse_ADD)
    right_ADC = start_DC + weights_A11 * moments_DC
    return inverse_ADD @ right_ADC.expand(count, *right_ADC.shape[1:])


@dataclass(frozen=True, kw_only=True)
class PublishedRegression(RidgeRegression):
    """Also makes what devices solve with: a root of the inverse of everybody's sums."""

    def make_tensors(self, sums: RidgeSums, strength: float, images: int) -> dict[str, Floats]:
        width = len(sums.gram)
        gram = sums.gram / (images * find_unit(GRAM, width))
        penalty = strength * np.trace(gram) / width
        values, vectors = np.linalg.eigh(gram)
        # eigenvalues of sums are not negative, but for rounding; of all roots the symmetric one follows small changes
        root = vectors / np.sqrt(np.maximum(values, 0) + penalty) @ vectors.T
        whitened = root.T @ sums.moments / (images * find_unit(MOMENTS, width))
        return {**super().make_tensors(sums, strength, images), ROOT: root, WHITENED: whitened}
