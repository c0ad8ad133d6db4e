"""An optimizer of the server: Lion, whose steps have one size (Chen et al., arXiv:2302.06675, algorithm 2)."""

from dataclasses import dataclass

import numpy as np

from fedvit.methods.aggregators import Floats
from fedvit.methods.server_optimizers import FIRST, Moments, ServerOptimizer


@dataclass(frozen=True, kw_only=True)
class ServerLion(ServerOptimizer):
    """The server moves by lr sign(beta1 m + (1 - beta1) D); m becomes beta2 m + (1 - beta2) D."""

    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        first = moments.get(FIRST, np.zeros_like(update))
        step = self.lr * np.sign(self.beta1 * first + (1 - self.beta1) * update)
        return step, {FIRST: self.beta2 * first + (1 - self.beta2) * update}
