"""FedOpt: the server takes the mean update for a gradient, and moves the model with an optimizer of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean, move_tensors
from fedvit.methods.server_optimizers import ServerOptimizer, make_server_optimizer
from fedvit.models.vit import PatchViT


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
    loop_options: ClassVar[tuple[str, ...]] = (
        *FedAvg.loop_options,
        "server_optimizer",
        "server_lr",
        "beta1",
        "beta2",
        "tau",
    )

    server_optimizer: Annotated[
        str, Meta(extra={"plugins": "server optimizer", "names": ["momentum", "adagrad", "yogi", "adam"]})
    ] = "adam"
    server_lr: Annotated[float, Meta(gt=0)] = 0.01  # FedAvgM: 1
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Meta(gt=0)] = 1e-3

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return AdaptiveMean(
            optimizer=make_server_optimizer(
                self.server_optimizer, lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau
            )
        )


@dataclass(frozen=True, kw_only=True)
class AdaptiveMean(WeightedMean):
    """Moves the shared tensors by an optimizer whose gradient is what the run's aggregator makes of the updates."""

    optimizer: ServerOptimizer

    why_never_late = "its server's moments are those of whole rounds"

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        steps, memory = {}, dict(state.memory)
        for name, update in self.average(state, uploads, context).items():
            moments = {
                key.removesuffix(f"/{name}"): np.asarray(value, np.float64)
                for key, value in state.memory.items()
                if key.endswith(f"/{name}")
            }
            steps[name], kept = self.optimizer.step(update, moments)
            memory |= {f"{moment}/{name}": value.astype(np.float32) for moment, value in kept.items()}
        return move_tensors(replace(state, memory=memory), steps)
