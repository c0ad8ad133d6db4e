"""Optimizers as tensor arithmetic, so that they become part of the traced step.

Each equals its namesake in torch.optim with zero initial state; export verifies that.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """One update rule; what it remembers per tensor is named in `slots` and starts at zero."""

    slots: ClassVar[tuple[str, ...]]

    @abstractmethod
    def update(
        self, value: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New value and new slots of one tensor; `step` counts from 1."""

    @abstractmethod
    def in_torch(self, values: ParamsT, lr: float) -> torch.optim.Optimizer:
        """The same rule in torch.optim: used on the server, and to verify graphs."""


@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent; weight decay is added to the gradient."""

    slots: ClassVar[tuple[str, ...]] = ()
    weight_decay: float = 0.0

    def update(
        self, value: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return value - lr * self._decay(value, grad), {}

    def _decay(self, value: Tensor, grad: Tensor) -> Tensor:
        return grad + self.weight_decay * value if self.weight_decay else grad

    def in_torch(self, values: ParamsT, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(values, lr=lr, weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class MomentumSgd(Sgd):
    """SGD with heavy-ball momentum, no dampening."""

    slots: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    momentum: float = 0.9

    def update(
        self, value: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        buffer = self.momentum * slots["momentum_buffer"] + self._decay(value, grad)
        return value - lr * buffer, {"momentum_buffer": buffer}

    def in_torch(self, values: ParamsT, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(values, lr=lr, weight_decay=self.weight_decay, momentum=self.momentum)


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay. Source: Loshchilov and Hutter, arXiv:1711.05101."""

    slots: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def update(
        self, value: Tensor, grad: Tensor, slots: Mapping[str, Tensor], lr: Tensor, step: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.beta1 * slots["exp_avg"] + (1 - self.beta1) * grad
        square = self.beta2 * slots["exp_avg_sq"] + (1 - self.beta2) * grad * grad
        # lr * (m / c1) / (sqrt(v / c2) + eps), multiplied by sqrt(c2) / sqrt(c2); in float32 c2 would lose five digits
        exact = step.double()
        correction = torch.sqrt(1 - self.beta2**exact)
        scale = (lr * correction / (1 - self.beta1**exact)).to(value.dtype)
        correction = correction.to(value.dtype)
        updated = value * (1 - lr * self.weight_decay) - scale * mean / (torch.sqrt(square) + self.eps * correction)
        return updated, {"exp_avg": mean, "exp_avg_sq": square}

    def in_torch(self, values: ParamsT, lr: float) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(values, lr=lr, betas=betas, eps=self.eps, weight_decay=self.weight_decay)
