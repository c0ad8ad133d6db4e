"""FedOpt: the server takes the mean update for a gradient, and moves the model with an optimizer of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from fedvit.methods.aggregators import Floats
from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean, move_tensors
from fedvit.models.vit import PatchViT

ServerOptimizer = Literal["momentum", "adagrad", "yogi", "adam"]
FIRST, SECOND = "first_moment", "second_moment"


@dataclass(frozen=True, kw_only=True)
class FedOpt(FedAvg):
    """Devices train as in FedAvg. With the mean update D the server moves by server_lr m / (v^.5 + tau).

    m = beta1 m + (1 - beta1) D, and v grows by D^2 (`adagrad`), becomes beta2 v + (1 - beta2) D^2 (`adam`), or
    v - (1 - beta2) D^2 sign(v - D^2) (`yogi`). `momentum` is FedAvgM: m = beta1 m + D, and the server moves by
    server_lr m. v begins at tau^2.
    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295, algorithm 2; FedAvgM: Hsu et
    al., arXiv:1909.06335. Differs from the first: devices weigh as in FedAvg.
    """

    source: ClassVar[str] = "Reddi et al., ICLR 2021, arXiv:2003.00295; Hsu et al., arXiv:1909.06335"
    loop_options: ClassVar[tuple[str, ...]] = ("epochs", "server_optimizer", "server_lr", "beta1", "beta2", "tau")

    server_optimizer: ServerOptimizer = "adam"
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # FedAvgM: 1
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Meta(gt=0)] = 1e-3

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return AdaptiveMean(
            optimizer=self.server_optimizer, lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveMean(WeightedMean):
    """Moves the shared tensors by an optimizer whose gradient is what the run's aggregator makes of the updates."""

    optimizer: ServerOptimizer
    lr: float
    beta1: float
    beta2: float
    tau: float

    why_never_late = "its server's moments are those of whole rounds"

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        steps, memory = {}, dict(state.memory)
        for name, update in self.average(state, uploads, context).items():
            steps[name], kept = self._step(name, update, state)
            memory |= {key: value.astype(np.float32) for key, value in kept.items()}
        return move_tensors(replace(state, memory=memory), steps)

    def _step(self, name: str, update: Floats, state: ServerState) -> tuple[Floats, dict[str, Floats]]:
        def recall(moment: str, start: float) -> Floats:
            kept = state.memory.get(f"{moment}/{name}")
            return np.full(update.shape, start) if kept is None else np.asarray(kept, np.float64)

        first = recall(FIRST, 0.0)
        if self.optimizer == "momentum":
            first = self.beta1 * first + update
            return self.lr * first, {f"{FIRST}/{name}": first}
        square = np.square(update)
        second = recall(SECOND, self.tau**2)
        first = self.beta1 * first + (1 - self.beta1) * update
        match self.optimizer:
            case "adagrad":
                second = second + square
            case "yogi":
                second = second - (1 - self.beta2) * square * np.sign(second - square)
            case "adam":
                second = self.beta2 * second + (1 - self.beta2) * square
        step = self.lr * first / (np.sqrt(second) + self.tau)
        return step, {f"{FIRST}/{name}": first, f"{SECOND}/{name}": second}
