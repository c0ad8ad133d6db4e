"""Laws of server optimizers hold for fedvit's own, and refuse optimizers that break them."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedvit.methods import server_optimizers
from fedvit.methods.aggregators import Floats
from fedvit.methods.fedopt import FedOpt
from fedvit.methods.server_optimizers import SERVER_OPTIMIZERS, Moments, ServerOptimizer
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.server_optimizers import (
    LAWS,
    go_with_the_update,
    leave_its_inputs_alone,
    resume_from_moments,
    stand_still_without_an_update,
)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_fedvits_own_optimizers_obey_the_laws(law: Law, name: str) -> None:
    assert find_break(law, name) is None


def test_the_option_names_all_of_them() -> None:
    (meta,) = FedOpt.__annotations__["server_optimizer"].__metadata__
    assert meta.extra["names"] == [*SERVER_OPTIMIZERS]


@dataclass(frozen=True, kw_only=True)
class Drifting(ServerOptimizer):
    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        return update + self.lr, {}


@dataclass(frozen=True, kw_only=True)
class Opposite(ServerOptimizer):
    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        return -update, {}


@dataclass(frozen=True, kw_only=True)
class Counting(ServerOptimizer):
    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        count = vars(self).get("count", 0) + 1
        object.__setattr__(self, "count", count)
        return update / count, {}


@dataclass(frozen=True, kw_only=True)
class InPlace(ServerOptimizer):
    def step(self, update: Floats, moments: Moments) -> tuple[Floats, dict[str, Floats]]:
        update *= self.lr
        return update, {"first": np.zeros_like(update)}


@pytest.mark.parametrize(
    ("kind", "law", "reason"),
    [
        (Drifting, stand_still_without_an_update, "the step is 0.1"),
        (Opposite, go_with_the_update, "round 1: the step is against the update"),
        (Counting, resume_from_moments, "round 1: the step depends"),
        (InPlace, leave_its_inputs_alone, "it changes the update"),
    ],
)
def test_a_broken_optimizer_is_found(
    kind: type[ServerOptimizer], law: Law, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server_optimizers.SERVER_OPTIMIZERS, "adam", kind)  # type: ignore[arg-type]
    found = find_break(law, "adam")
    assert found is not None
    assert reason in found
