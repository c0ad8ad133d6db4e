"""LoRA-FAIR: the server corrects the mean of the second factors, so that the mean of the products is what is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from fedvit.methods.aggregators import Floats
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.rules.weighted_mean import WeightedMean, cohort_weights, move_tensors
from fedvit.models.vit import PatchViT

A, B = ".a", ".b"
"""Ends of the names of an addition's two factors: it is B A."""


@dataclass(frozen=True, kw_only=True)
class LoraFair(FedLora):
    """Devices train A and B as in Fed-LoRA. The server averages both, and moves the mean of B to where B A is near
    the mean of all B_k A_k.

    Source: Bian et al., "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization Refinement", ICCV
    2025, arXiv:2411.14961. Differs from the paper: products are compared by squared distance in place of the cosine, so
    that the correction has a closed form, and `residual` is in units of the mean of A A's diagonal.
    """

    source: ClassVar[str] = "Bian et al., ICCV 2025, arXiv:2411.14961"

    residual: Annotated[float, Meta(gt=0)] = 0.01  # how strongly the correction is held near 0 (paper: lambda)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return CorrectedMean(residual=self.residual)


@dataclass(frozen=True, kw_only=True)
class CorrectedMean(WeightedMean):
    """Adds D to the mean of the factors B: the D that minimises |(B + D) A - mean of B_k A_k|^2 + lambda |D|^2."""

    residual: float

    why_never_late = "its server multiplies the factors of one round's devices"
    why_no_regions = "its server multiplies the factors of each single device"
    averages = False

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        weights = cohort_weights(uploads, context.round)
        pairs = [(name.removesuffix(B) + A, name) for name in state.tensors if name.endswith(B)]
        means = {name: np.asarray(updated.tensors[name], np.float64) for pair in pairs for name in pair}
        # (mean of B_k A_k - B A) A', summed without a product as large as a layer
        errors: dict[str, Floats] = {b: -means[b] @ (means[a] @ means[a].T) for a, b in pairs}
        for upload in uploads:
            if not upload.samples:
                continue
            deltas = upload.load()
            for a, b in pairs:
                own_a, own_b = (np.add(state.tensors[name], deltas[name], dtype=np.float64) for name in (a, b))
                errors[b] += weights[upload.device] * own_b @ (own_a @ means[a].T)
        steps: dict[str, Floats] = {}
        for a, b in pairs:
            gram = means[a] @ means[a].T
            penalty = self.residual * np.trace(gram) / len(gram)
            steps[b] = np.linalg.solve(gram + penalty * np.eye(len(gram)), errors[b].T).T
        corrected, correction = move_tensors(updated, steps)
        return corrected, {**figures, "correction_norm": correction["update_norm"]}
