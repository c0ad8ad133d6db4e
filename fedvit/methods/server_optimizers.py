"""Optimizers of the server, which take a cohort's mean update for a gradient.

An installed package adds its own by entry points (docs/plugins.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedvit import plugins
from fedvit.errors import ConfigError
from fedvit.methods.aggregators import Floats

Moments = Mapping[str, Floats]
"""Values that an optimizer keeps of a tensor from round to round; the server stores them as float32."""

FIRST, SECOND = "first_moment", "second_moment"


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(ABC):
    """Turns the update of one tensor into its step. It has no state beside the moments that it returns."""

    lr: float
    beta1: float
    beta2: float
    tau: float

    @abstractmethod
    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        """Return the step and the new moments; in the first round there are none."""


@dataclass(frozen=True, kw_only=True)
class ServerMomentum(ServerOptimizer):
    """FedAvgM: m = beta1 m + D, and the server moves by lr m."""

    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        first = self.beta1 * moments.get(FIRST, np.zeros_like(update)) + update
        return self.lr * first, {FIRST: first}


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptimizer(ServerOptimizer):
    """The server moves by lr m / (v^.5 + tau), with m = beta1 m + (1 - beta1) D; v begins at tau^2."""

    @abstractmethod
    def square(self, second: Floats, squared: Floats) -> Floats:
        """Return the new v for D^2."""

    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        first = self.beta1 * moments.get(FIRST, np.zeros_like(update)) + (1 - self.beta1) * update
        second = self.square(moments.get(SECOND, np.full(update.shape, self.tau**2)), np.square(update))
        return self.lr * first / (np.sqrt(second) + self.tau), {FIRST: first, SECOND: second}


@dataclass(frozen=True, kw_only=True)
class ServerAdagrad(AdaptiveOptimizer):
    def square(self, second: Floats, squared: Floats) -> Floats:
        return second + squared


@dataclass(frozen=True, kw_only=True)
class ServerYogi(AdaptiveOptimizer):
    def square(self, second: Floats, squared: Floats) -> Floats:
        square: Floats = second - (1 - self.beta2) * squared * np.sign(second - squared)
        return square


@dataclass(frozen=True, kw_only=True)
class ServerAdam(AdaptiveOptimizer):
    def square(self, second: Floats, squared: Floats) -> Floats:
        return self.beta2 * second + (1 - self.beta2) * squared


SERVER_OPTIMIZERS: Mapping[str, type[ServerOptimizer]] = {
    "momentum": ServerMomentum,
    "adagrad": ServerAdagrad,
    "yogi": ServerYogi,
    "adam": ServerAdam,
}


def make_server_optimizer(name: str, *, lr: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """Make an optimizer by name; steps of a package's are checked each time.

    Raises ConfigError for an unknown name, and if a package's cannot be used.
    """
    plugins.check_value(plugins.SERVER_OPTIMIZERS, "server_optimizer", name, SERVER_OPTIMIZERS)
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau}
    entry = plugins.find_entry(plugins.SERVER_OPTIMIZERS, name, SERVER_OPTIMIZERS)
    if entry is None:
        return SERVER_OPTIMIZERS[name](**numbers)
    kind = plugins.load_class(plugins.SERVER_OPTIMIZERS, entry, ServerOptimizer)  # type: ignore[type-abstract]
    made = plugins.make(plugins.SERVER_OPTIMIZERS, entry, lambda: kind(**numbers))
    return CheckedOptimizer(name=name, rule=made, **numbers)


@dataclass(frozen=True, kw_only=True)
class CheckedOptimizer(ServerOptimizer):
    """An optimizer of a package, whose step and moments must be finite numbers of the tensor's shape."""

    name: str
    rule: ServerOptimizer

    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        """Raises ConfigError for a wrong result."""
        step, kept = self.rule.step(update, moments)
        for what, value in {"step": step, **kept}.items():
            if np.shape(value) != update.shape:
                wrong = f"has shape {np.shape(value)}, expected {update.shape}"
            elif not np.isfinite(value).all():
                wrong = "is not finite"
            else:
                continue
            raise ConfigError("FV1485", f"server optimizer {self.name!r}: its {what} {wrong}")
        return step, kept
