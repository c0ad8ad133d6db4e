"""Move the shared tensors by the mean of the cohort's deltas."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from fedvit.errors import EmptyCohort
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload


class WeightedMean(ServerRule):
    """Each device weighs as much as it has training images, among those whose result was accepted.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    arXiv:1602.05629, algorithm 1; weights over the sampled devices, not over all.
    """

    def close(
        self, state: ServerState, uploads: Iterable[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Sums are float64. Raises EmptyCohort when no upload holds a sample."""
        uploads = [upload for upload in uploads if upload.samples > 0]
        samples = sum(upload.samples for upload in uploads)
        if not samples:
            raise EmptyCohort(f"round {context.round}: no accepted result holds a training image")
        mean: dict[str, np.ndarray] = {}
        for upload in uploads:
            weight = upload.samples / samples
            for name, delta in upload.load().items():
                step = delta.astype(np.float64) * weight
                mean[name] = mean[name] + step if name in mean else step
        moved = {name: (state.tensors[name] + step).astype(state.tensors[name].dtype) for name, step in mean.items()}
        norm = float(np.sqrt(sum(float(np.square(step).sum()) for step in mean.values())))
        return replace(state, tensors={**state.tensors, **moved}), {"update_norm": norm}
