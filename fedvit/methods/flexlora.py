"""FlexLoRA: devices train additions of different rank; the server averages the products, and splits the mean by SVD."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods.aggregators import Floats
from fedvit.methods.base import Forward, GroupRule, Images, RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.calculus import Named
from fedvit.methods.fed_lora import ADDITIONS, FedLora
from fedvit.methods.parts import HEAD
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights, move_tensors
from fedvit.models.model_patch import seed_random
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Array, Tensors

A, B = ".a", ".b"
"""Ends of the names of an addition's two factors: it is B A."""


@dataclass(frozen=True, kw_only=True)
class FlexLora(FedLora):
    """Additions have rank `own_rank` on a device, at most `rank`. The server averages the products B A.

    `own_rank` may differ between devices: by `variants`, and by the budgets of devices, which it is reduced to. Each
    rank has tensors and graphs of its own, so a device computes, fetches and sends no more than these.
    Source: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources", NeurIPS 2024, arXiv:2402.11505. Chosen here: of the singular value decomposition U S V', B gets U S
    and A gets V'; an addition's factor is alpha / `rank` on every device, so that products can be compared; the head
    is trained, and averaged as in FedAvg.
    """

    source: ClassVar[str] = "Bai et al., NeurIPS 2024, arXiv:2402.11505"

    own_rank: Annotated[int, Meta(ge=1)] | None = None  # of a device's additions; None: `rank`

    def __post_init__(self) -> None:
        if self.own_rank is not None and self.own_rank > self.rank:
            raise ConfigError(
                "FV1104",
                f"option own_rank = {self.own_rank} of method 'flexlora' must be at most rank = {self.rank}, the "
                "largest of all devices",
            )

    @property
    def smaller_rank(self) -> int | None:
        """Rank of the device's additions; None if it is the largest."""
        return None if self.own_rank == self.rank else self.own_rank

    def name_own(self, name: str) -> str:
        """Return the name of the device's factor in place of one of the largest rank, which has the model's name."""
        return name if self.smaller_rank is None else f"rank{self.smaller_rank}.{name}"

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        extra: dict[str, Tensor] = {}
        if (rank := self.smaller_rank) is None:
            return extra
        for name, (rows, columns) in list_factors(vit).items():
            if name.endswith(B):
                extra[self.name_own(name)] = torch.zeros(rows, rank)
                continue
            limit = columns**-0.5  # as the largest rank begins
            with seed_random(vit.seed, name):
                extra[self.name_own(name)] = torch.empty(rank, columns).uniform_(-limit, limit)
        return extra

    def tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        replaced = list_factors(vit) if self.smaller_rank else {}
        return {name: value for name, value in super().tensors(vit).items() if name not in replaced}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("head", Role.SHARED, HEAD),
            # a group a rank: the server holds those of all devices
            GroupRule(f"rank{self.smaller_rank or self.rank}", Role.SHARED, (self.name_own(ADDITIONS),)),
            GroupRule("backbone", Role.FROZEN, ("*",)),
        )

    def forward(self, vit: PatchViT, tensors: Named, images: Images) -> Forward:
        own = {name: tensors[self.name_own(name)] for name in list_factors(vit)}
        return super().forward(vit, {**tensors, **own}, images)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return SplitMean()


def list_factors(vit: PatchViT) -> dict[str, torch.Size]:
    """Names and shapes of the factors of the model's additions, which have the largest rank."""
    return {name: value.shape for name, value in vit.vit.named_parameters() if fnmatchcase(name, ADDITIONS)}


class Pair(NamedTuple):
    """Names of the two factors of an addition in one rank."""

    rank: int
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class SplitMean(WeightedMean):
    """Averages the products B A of all devices, and gives each rank the nearest product of this rank."""

    why_never_late = "its server multiplies the factors of one round's devices"
    why_no_regions = "its server multiplies the factors of each single device"
    averages = False

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """In memory is the product of each addition. Raises EmptyCohort as the mean does."""
        pairs = find_pairs(state.tensors)
        factors = {name for by_rank in pairs.values() for pair in by_rank for name in (pair.a, pair.b)}
        others = ServerState({name: value for name, value in state.tensors.items() if name not in factors})
        updated, figures = move_tensors(state, self.average(others, uploads, context))
        split: Tensors = {}
        squared_norm, kept, whole = figures["update_norm"] ** 2, 0.0, 0.0
        for addition, mean in average_products(state, pairs, uploads, context.round).items():
            left, values, right = np.linalg.svd(mean, full_matrices=False)
            for rank, a, b in pairs[addition]:
                split[a], split[b] = np.zeros_like(state.tensors[a]), np.zeros_like(state.tensors[b])
                kept_values = values[:rank]  # fewer than `rank` if the model is narrower: the rest stays zero
                split[a][: len(kept_values)] = right[:rank]
                split[b][:, : len(kept_values)] = left[:, :rank] * kept_values
            largest = pairs[addition][0]
            squared_norm += float(np.square(mean - multiply(largest, state.tensors)).sum())
            kept += float(np.square(values[: largest.rank]).sum())
            whole += float(np.square(values).sum())
        figures = {"update_norm": float(np.sqrt(squared_norm)), "products_kept": kept / whole if whole else 1.0}
        return replace(updated, tensors={**updated.tensors, **split}), figures


def find_pairs(tensors: Mapping[str, Array]) -> dict[str, list[Pair]]:
    """The factors of each addition, those of the largest rank first."""
    found: dict[str, list[Pair]] = {}
    for name, value in tensors.items():
        if name.endswith(A) and fnmatchcase(name, f"*{ADDITIONS}"):
            addition = name[name.index("blocks.") :].removesuffix(A)
            found.setdefault(addition, []).append(Pair(len(value), name, name.removesuffix(A) + B))
    return {addition: sorted(pairs, reverse=True) for addition, pairs in found.items()}


def average_products(
    state: ServerState, pairs: Mapping[str, Iterable[Pair]], uploads: Sequence[Upload], round_number: int
) -> dict[str, Floats]:
    """The weighted mean of the devices' products of each addition. Raises EmptyCohort as the mean does."""
    weights, means = cohort_weights(uploads, round_number), dict[str, Floats]()
    for upload in uploads:
        if not weights[upload.device]:
            continue
        deltas = upload.load()
        for addition, by_rank in pairs.items():
            pair = next(pair for pair in by_rank if pair.a in deltas)
            ends = {name: np.add(state.tensors[name], deltas[name], dtype=np.float64) for name in (pair.a, pair.b)}
            product = weights[upload.device] * multiply(pair, ends)
            means[addition] = means[addition] + product if addition in means else product
    return means


def multiply(pair: Pair, tensors: Mapping[str, Array]) -> Floats:
    """B A in float64."""
    product: Floats = np.matmul(tensors[pair.b], tensors[pair.a], dtype=np.float64)
    return product
