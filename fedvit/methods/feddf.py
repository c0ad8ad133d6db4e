"""FedDF: the server averages, and then learns the devices' mean answers on images of its own."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.base import ServerRule
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.distillation import Distillation
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class FedDF(FedAvg):
    """Devices train as in FedAvg. Their mean begins a distillation of their mean logits, on unlabelled images.

    The images are those of the run's `server_data`.
    Source: Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
    arXiv:2006.07242, algorithm 1. Differs from the paper: a fixed number of steps, without early stopping, which needs
    labels on the server; images are not augmented, so that teachers answer once.
    """

    source: ClassVar[str] = "Lin et al., NeurIPS 2020, arXiv:2006.07242"
    why_one_class = "its server distils a distribution over classes"

    server_steps: Annotated[int, Meta(ge=1, le=100_000)] = 200  # batches of the server's images in a round (paper: N)
    server_batch_size: Annotated[int, Meta(ge=1, le=65_536)] = 64
    server_lr: Annotated[float, Meta(gt=0)] = 0.001  # of Adam, at first

    @property
    def reads_text(self) -> bool:
        return False

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return Distillation(steps=self.server_steps, batch_size=self.server_batch_size, lr=self.server_lr)
