"""An aggregator: the weighted mean of updates, none longer than their median length."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fedvit.errors import EmptyCohort
from fedvit.methods.aggregators import Aggregator, Delta, Floats, Mean, norm_of


@dataclass(frozen=True)
class ClippedMean(Aggregator):
    """Updates that are longer than the median are scaled down to it, by a smaller weight."""

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        if not deltas:
            raise EmptyCohort("FV1502", "no update is left to aggregate")
        norms = [norm_of(delta.load(), names) for delta in deltas]
        limit = float(np.median(norms))
        shorter = [
            Delta(delta.weight * min(1.0, limit / max(norm, 1e-12)), delta.load)
            for delta, norm in zip(deltas, norms, strict=True)
        ]
        return Mean().combine(shorter, names, scale)
