"""Analytic: the head is the ridge regression over the features of all devices, solved once from their sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.errors import EmptyCohort
from fedvit.methods.base import (
    GroupRule,
    Method,
    RoundContext,
    ServerRule,
    ServerState,
    StepInputs,
    StepResult,
    Upload,
    cross_entropy,
    run_model,
)
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.parts import HEAD
from fedvit.methods.sketch import expand_weights, sketch_features
from fedvit.models.vit import PatchViT
from fedvit.program import Draw, Role, Train
from fedvit.secure import SUM
from fedvit.tensors import Array

FITTED, HELD_OUT = "fitted", "held_out"
"""The two parts of a device's images, each with sums of its own."""
GRAM, MOMENTS = "gram", "moments"
"""The sums of a part: products of features with features, and of features with classes."""
SUMS = "sums/"
"""Beginning of the names of a device's sums in the server's memory."""
TOTAL, LOST, IMAGES = "total", "lost", "images"
"""The slots of a device: a sum, the digits that it has lost to rounding, and the number of images behind it."""
SIDE = 16
"""Rows of F'F that are computed and sent together, from their own diagonal on: little more than its upper half."""

Floats = npt.NDArray[np.float64]
Lambda = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Analytic(Method):
    """Devices send G = F'F and M = F'Y of their features F and classes Y; the server solves (G + lambda I) W = M.

    Sums of devices are the sums of all their images, so any partition has the same solution, in one round. A device
    sends them divided by its number of images. The mean of devices by images, times all images, is then the sum, so
    that secure sums and regions need nothing else. A device that comes again replaces its own sums; new ones are
    added, and `forget` removes some. A secure sum replaces everything before it. One batch in `hold_out` is
    summed apart: the lambda is that with the smallest squared error on these images, and the head is then solved from
    all. With `sketch` the features are first added up to fewer numbers, for wide backbones: the head is a slightly
    worse one of the same shape. Every image is read once; options of gradients (`epochs`, `lr`, `optimizer`, ...) have
    no effect.
    Source: Fed3R (Fani et al., ICML 2024, arXiv:2406.01116): W = (sum G_k + lambda I)^-1 sum M_k over devices k; AFL
    (Zhuang et al., arXiv:2405.16240) gives the same W by its absolute aggregation law. Differs from both: lambda is in
    units of the mean square of a feature, and one of several is chosen by held-out sums.
    """

    source: ClassVar[str] = "AFL, arXiv:2405.16240; Fed3R, arXiv:2406.01116"
    one_gradient: ClassVar[bool] = False
    why_one_class = "its sums are of features by class"
    is_probe: ClassVar[bool] = True
    loop_options: ClassVar[tuple[str, ...]] = (*Method.loop_options, "lambdas", "forget")

    # times the mean of G's diagonal
    lambdas: Annotated[tuple[Lambda, ...], Meta(min_length=1)] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    hold_out: Annotated[int, Meta(ge=2)] = 10  # of this many batches one chooses the lambda
    bias: bool = False  # of the head: it needs the number of images of each class, which is then sent, too
    forget: tuple[str, ...] = ()  # names or patterns of devices whose sums are removed
    sketch: Annotated[int, Meta(ge=1)] | None = None  # numbers in place of a feature's in the sums; None: all of them

    @property
    def reads_text(self) -> bool:
        return False

    # --- tensors --------------------------------------------------------------------------------------

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        classes, width = vit.tensors()["head.weight"].shape
        count = count_sent(width, self.sketch)
        shapes = {GRAM: (count_gram_values(count),), MOMENTS: (count + self.bias, classes)}
        return {f"{part}.{name}": torch.zeros(shape) for part in (FITTED, HELD_OUT) for name, shape in shapes.items()}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        # the server's sums stay zero, so that a device's change is its own sum, and they are fetched once
        return (
            GroupRule("sums", Role.SHARED, (f"{FITTED}.*", f"{HELD_OUT}.*")),
            GroupRule("head", Role.GLOBAL, HEAD),
            GroupRule("backbone", Role.FROZEN, ("*",)),
        )

    # --- the device's half ----------------------------------------------------------------------------

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        def body(vit: PatchViT) -> tuple[Tensor, Tensor]:
            features = vit.features(vit.run_to_class(vit.embed(*inputs.images), 0))
            return features, vit.head(features)

        features, logits = run_model(vit, fixed, body)
        sent = sketch_features(features, count_sent(features.shape[1], self.sketch))
        batch = sum_products(sent, inputs.labels, inputs.weight, logits.shape[1], bias=self.bias)
        held_out = self._hold_out(calculus.inputs["hyper/step"], inputs)
        new: dict[str, Tensor] = {}
        for part, share in ((FITTED, 1 - held_out), (HELD_OUT, held_out)):
            for kind, value in batch.items():
                name = f"{part}.{kind}"
                total, lost, images = (calculus.inputs[f"slot/{slot}/{name}"] for slot in (TOTAL, LOST, IMAGES))
                total, lost = add_compensated(total, lost, share * value)
                images = images + inputs.weight.sum()
                calculus.slots |= {f"{TOTAL}/{name}": total, f"{LOST}/{name}": lost, f"{IMAGES}/{name}": images}
                new[name] = total / (images.clamp(min=1) * find_unit(kind, sent.shape[1]))
        return StepResult(inputs.mean(cross_entropy(logits, inputs.labels)), new, {})

    def _hold_out(self, step: Tensor, inputs: StepInputs) -> Tensor:
        """() 1 for a batch that is summed apart: never the first, and none of a single image, whose features its sum
        would tell."""
        is_chosen = (step.long() + inputs.draws[HELD_OUT].squeeze(0)) % self.hold_out == 0
        return is_chosen.to(inputs.weight.dtype) * (inputs.weight.sum() > 1).to(inputs.weight.dtype)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        # of the draws none chooses the first batch
        draw = Draw(name=HELD_OUT, low=0, high=self.hold_out - 1, count=1)
        return (self.phase(("sums",), epochs=1, slots=(TOTAL, LOST, IMAGES), draws=(draw,)),)

    # --- the server's half ----------------------------------------------------------------------------

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return RidgeRegression(lambdas=self.lambdas, bias=self.bias, forget=self.forget, sketch=self.sketch)


def sum_products(features_BD: Tensor, labels: Tensor, weight: Tensor, classes: int, *, bias: bool) -> dict[str, Tensor]:
    """F'F, in the rows' order from the diagonal's block on, and F'Y, with the number of images of each class."""
    features_BD = features_BD * weight.unsqueeze(1)
    chosen_BC = (labels.unsqueeze(1) == torch.arange(classes, device=labels.device)).to(features_BD.dtype)
    width = features_BD.shape[1]
    rows = [features_BD[:, first : first + SIDE].T @ features_BD[:, first:] for first in range(0, width, SIDE)]
    augmented_BD = torch.cat([features_BD, weight.unsqueeze(1)], dim=1) if bias else features_BD
    return {GRAM: torch.cat([row.flatten() for row in rows]), MOMENTS: augmented_BD.T @ chosen_BC}


def count_sent(width: int, sketch: int | None) -> int:
    """Return the numbers of a feature in the sums."""
    return width if sketch is None else min(width, sketch)


def find_unit(kind: str, width: int) -> float:
    """Return the unit in which a mean of products is sent, so that it is at most 1 and fits a secure sum's range.

    That holds if the numbers of a feature have a mean square of 1, as behind a LayerNorm: no mean of products of two
    numbers is then above the width, and none of a number with a class above its root.
    """
    return float(width if kind == GRAM else width**0.5)


def add_compensated(total: Tensor, lost: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Add a value to a sum in float32 whose error does not grow with the number of values; `lost` starts at zero.

    Source: Kahan, "Further remarks on reducing truncation errors", Communications of the ACM 8, 1965.
    """
    value = value - lost
    new = total + value
    return new, (new - total) - value


def count_gram_values(width: int) -> int:
    """Count the numbers that are sent of F'F.

    >>> count_gram_values(192) / 192**2
    0.5416666666666666
    """
    return sum(min(SIDE, width - first) * (width - first) for first in range(0, width, SIDE))


# --- the server -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RidgeSums:
    """G and M over some images, in float64. Letters: D numbers of a feature, C classes."""

    gram: Floats  # (D, D), with a bias (D + 1, D + 1)
    moments: Floats  # (D, C), with a bias (D + 1, C): the last row counts images

    def __add__(self, other: "RidgeSums") -> "RidgeSums":
        return RidgeSums(self.gram + other.gram, self.moments + other.moments)

    @classmethod
    def of(cls, gram: Floats, moments: Floats, width: int) -> "RidgeSums":
        """Unfold sums as devices send them. The bias' row of G is the sum of M's columns: each image has one class."""
        gram, moments = gram * find_unit(GRAM, width), moments * find_unit(MOMENTS, width)
        square, place = np.zeros((len(moments),) * 2), 0
        for first in range(0, width, SIDE):
            rows = slice(first, min(first + SIDE, width))
            size = (rows.stop - first) * (width - first)
            block = gram[place : place + size].reshape(rows.stop - first, width - first)
            square[rows, first:width] = block
            square[first:width, rows] = block.T
            place += size
        if len(moments) > width:
            square[width] = square[:, width] = moments.sum(axis=1)
        return cls(square, moments)

    def solve(self, strength: float) -> Floats:
        """Return W of (G + lambda I) W = M; `strength` is lambda in units of the mean of G's diagonal."""
        penalty = strength * np.trace(self.gram) / len(self.gram)
        weights: Floats = np.linalg.solve(self.gram + penalty * np.eye(len(self.gram)), self.moments)
        return weights

    def measure_loss(self, weights: Floats) -> float:
        """Squared error of all images, |F W - Y|^2, without its part |Y|^2, which all weights share."""
        return float((weights * (self.gram @ weights - 2 * self.moments)).sum())


class Kept(NamedTuple):
    """The newest sums of a device, divided by its number of images."""

    images: int
    means: Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class RidgeRegression(ServerRule):
    """Adds the sums of all devices up, and solves for the head; each device's newest sums stay in the memory.

    They are added anew in every round, in the order of the devices' names: without a device the head is, to the last
    bit, the one that it would be if the device had never been asked. A region, or a secure sum, is as one device.
    """

    lambdas: tuple[float, ...]
    bias: bool
    forget: tuple[str, ...] = ()
    sketch: int | None = None

    why_never_late = None
    """Sums of images under a frozen backbone do not get old."""
    averages = False

    @property
    def why_no_regions(self) -> str | None:
        return "its option forget removes single devices, which a sum or mean of several hides" if self.forget else None

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort when no device's sums are left."""
        memory = {name: value for name, value in state.memory.items() if not name.startswith(SUMS)}
        by_device = dict(self._list_kept(state, uploads))
        if not by_device:
            raise EmptyCohort("FV1502", f"round {context.round}: no device's sums are left")
        width = state.tensors["head.weight"].shape[1]
        count = count_sent(width, self.sketch)
        names = [f"{part}.{name}" for part in (FITTED, HELD_OUT) for name in (GRAM, MOMENTS)]
        totals: dict[str, Floats] = {name: np.zeros(state.tensors[name].shape) for name in names}
        for device in sorted(by_device):
            images, means = by_device[device]
            memory[f"{SUMS}{device}/{IMAGES}"] = np.array([images], np.int64)
            for name, total in totals.items():
                value = np.asarray(means[name], np.float32)
                total += images * value.astype(np.float64)
                memory[f"{SUMS}{device}/{name}"] = value
        fitted, held_out = (
            RidgeSums.of(totals[f"{part}.{GRAM}"], totals[f"{part}.{MOMENTS}"], count) for part in (FITTED, HELD_OUT)
        )
        strength = self._choose(fitted, held_out)
        solved = self.make_tensors(fitted + held_out, strength, sum(kept.images for kept in by_device.values()))
        solved["head.weight"] = expand_weights(solved["head.weight"].T, width).T
        tensors = {name: solved.get(name, value).astype(value.dtype) for name, value in state.tensors.items()}
        kept_bytes = sum(value.nbytes for name, value in memory.items() if name.startswith(SUMS))
        figures = {"ridge": strength, "kept_devices": float(len(by_device)), "kept_bytes": float(kept_bytes)}
        return replace(state, tensors=tensors, memory=memory), figures

    def make_tensors(self, sums: RidgeSums, strength: float, images: int) -> dict[str, Floats]:
        """Return the values that follow from the sums of so many images: the head."""
        weights = sums.solve(strength)
        width = len(weights) - self.bias
        bias = weights[width] if self.bias else np.zeros(weights.shape[1])
        return {"head.weight": weights[:width].T, "head.bias": bias}

    def _list_kept(self, state: ServerState, uploads: Sequence[Upload]) -> Iterator[tuple[str, Kept]]:
        """Yield every device with its sums; newer ones of a device come later."""
        # a secure sum may have any device in it: beside sums of single devices it would count their images twice
        is_secure = any(upload.device == SUM for upload in uploads)
        for prefix, names in state.memory_names.items():
            device = prefix.removeprefix(SUMS)
            if prefix.startswith(SUMS) and not self._is_forgotten(device) and is_secure == (device == SUM):
                kept = {name.rpartition("/")[2]: state.memory[name] for name in names}
                yield device, Kept(int(kept.pop(IMAGES)[0]), kept)
        for upload in uploads:
            if not self._is_forgotten(upload.device):
                yield upload.device, Kept(upload.samples, upload.load())

    def _is_forgotten(self, device: str) -> bool:
        return any(device == pattern or fnmatchcase(device, pattern) for pattern in self.forget)

    def _choose(self, fitted: RidgeSums, held_out: RidgeSums) -> float:
        """Choose the lambda whose solution for the fitted images errs least on the others.

        Without held-out images, as on small devices, it is the middle one of the list.
        """
        if not held_out.gram.any() or not fitted.gram.any():
            return self.lambdas[len(self.lambdas) // 2]
        return min(self.lambdas, key=lambda strength: held_out.measure_loss(fitted.solve(strength)))
