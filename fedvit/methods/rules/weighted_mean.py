"""Move the shared tensors by what the cohort's deltas come to: their mean, unless the run says otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedvit.errors import EmptyCohort
from fedvit.methods.aggregators import Delta, Floats
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload


@dataclass(frozen=True, kw_only=True)
class WeightedMean(ServerRule):
    """Each device weighs as much as it has training images, among those whose result was accepted.

    That is the run's aggregator "mean"; any other (`RoundContext.aggregator`) treats devices as equals.

    Tensors of an upload that the server does not hold are ignored: they belong to another rule.
    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
    arXiv:1602.05629, algorithm 1; weights over the sampled devices, not over all.
    """

    mixing: float = 1.0  # share of the way from the old tensors to the mean (pFedMe: beta)

    @property
    def why_never_late(self) -> str | None:
        """A delta is a step, which can be applied to a newer state (Nguyen et al., arXiv:2106.06639)."""
        return None

    @property
    def discounts(self) -> bool:
        return True

    @property
    def why_no_regions(self) -> str | None:
        """The weighted mean of weighted means is that of all devices."""
        return None

    def weigh(self, uploads: Sequence[Upload], round_number: int) -> list[Delta]:
        """Raises EmptyCohort when no upload holds a sample."""
        return weight_deltas(uploads, round_number)

    def average(self, state: ServerState, uploads: Sequence[Upload], context: RoundContext) -> dict[str, Floats]:
        """The aggregator's step for each shared tensor. Sums are float64.

        Raises EmptyCohort when no upload holds a sample, or too few came for the aggregator."""
        return context.aggregator.combine(self.weigh(uploads, context.round), state.tensors.keys(), self.mixing)

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Discounts are not normalised: a late cohort changes the server less. Raises EmptyCohort as `average` does."""
        return move_tensors(state, self.average(state, uploads, context))


def move_tensors(state: ServerState, steps: Mapping[str, Floats]) -> tuple[ServerState, dict[str, float]]:
    """Add steps to the server's tensors; return also the norm of all steps together, for the report."""
    updated = {
        name: np.add(state.tensors[name], step).astype(state.tensors[name].dtype) for name, step in steps.items()
    }
    norm = float(np.sqrt(sum(float(np.square(step).sum()) for step in steps.values())))
    return replace(state, tensors={**state.tensors, **updated}), {"update_norm": norm}


def weight_deltas(uploads: Sequence[Upload], round_number: int) -> list[Delta]:
    """The deltas of all devices with samples, with their weights. Raises EmptyCohort when no upload holds a sample."""
    weights = cohort_weights(uploads, round_number)
    return [
        Delta(weights[upload.device] * upload.discount, upload.load) for upload in uploads if weights[upload.device]
    ]


def cohort_weights(uploads: Sequence[Upload], round_number: int) -> dict[str, float]:
    """Device -> its share of the training images of all whose result was accepted; they sum to 1.

    Raises EmptyCohort when no upload holds a sample.
    """
    samples = sum(upload.samples for upload in uploads)
    if not samples:
        raise EmptyCohort("FV1502", f"round {round_number}: no accepted result holds a training image")
    return {upload.device: upload.samples / samples for upload in uploads}
