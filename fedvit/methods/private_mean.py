"""The mean of clipped updates with Gaussian noise: differential privacy for whole devices."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fedvit.methods.aggregators import Aggregator, Delta, Floats, norm_of


@dataclass(frozen=True, eq=False)
class PrivateMean(Aggregator):
    """The sum of the deltas, each at most `clip` long, plus noise of std `noise_multiplier * clip`, / `denominator`.

    The denominator is fixed before any device answers, and all devices weigh the same: neither may depend on the data.
    Adding or taking away one device moves the sum by at most `clip`, so that a round is one Gaussian mechanism.
    Devices clip, too, but a server that promises privacy does not trust them with it.
    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models", arXiv:1710.06963, the
    estimator with a fixed denominator. The noise consists of floating-point numbers,
    whose lowest bits can be attacked (Mironov 2012).
    """

    clip: float
    noise_multiplier: float
    denominator: int  # devices that are expected in a round
    draw: np.random.Generator

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        total: dict[str, Floats] = {}
        for delta in deltas:
            tensors = delta.load()
            factor = self.clip / max(norm_of(tensors, names), self.clip)
            for name in sorted(tensors.keys() & set(names)):
                step = tensors[name].astype(np.float64) * factor
                total[name] = total[name] + step if name in total else step
        spread = self.noise_multiplier * self.clip
        return {
            name: (value + self.draw.normal(0.0, spread, value.shape)) * (scale / self.denominator)
            for name, value in total.items()
        }
