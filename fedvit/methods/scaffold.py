"""SCAFFOLD: control variates take out of each step the direction in which a device differs from all."""

from dataclasses import dataclass
from typing import ClassVar

from fedvit.errors import ConfigError
from fedvit.methods.aggregators import Floats
from fedvit.methods.base import ServerRule
from fedvit.methods.linear_term import DeviceDelta, LinearTerms, WithLinearTerm
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class Scaffold(WithLinearTerm):
    """A step is x <- x - lr (g - c_i + c). After K steps c_i becomes c_i - c + (x_start - x) / (K lr), option II.

    c is the mean of all c_i. The server computes them: it knows each device's update, number of images and rate.
    Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
    arXiv:1910.06378, algorithm 1. Differs from the paper: devices weigh as in FedAvg, the server's rate is 1, and c is
    the mean over devices that have answered. It is defined for plain SGD alone.
    """

    source: ClassVar[str] = "Karimireddy et al., ICML 2020, arXiv:1910.06378"

    def __post_init__(self) -> None:
        if self.optimizer != "sgd" or self.momentum:
            given = f"optimizer = {self.optimizer!r}" if self.optimizer != "sgd" else f"momentum = {self.momentum}"
            raise ConfigError("FV1104", f"option {given} is not for method 'scaffold', which is defined for plain SGD")

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return ControlVariates(epochs=self.epochs, batch_size=self.batch_size, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class ControlVariates(LinearTerms):
    """v_i is c_i. `epochs`, `batch_size` and `lr` stand in for what an upload does not tell."""

    epochs: int
    batch_size: int
    lr: float

    def follow(self, own: Floats, common: Floats, answer: DeviceDelta) -> Floats:
        steps = answer.upload.count_steps(self.epochs, self.batch_size)
        lr = (answer.upload.lr or self.lr) * answer.lr_scale
        return own - common - answer.update / (steps * lr)

    def make_term(self, own: Floats, common: Floats) -> Floats:
        return common - own
