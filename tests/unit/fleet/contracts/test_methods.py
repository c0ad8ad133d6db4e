"""Laws of methods hold for fedvit's own, and refuse methods that break them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
from torch import Tensor

import fedvit.methods
from fedvit.methods.base import StepInputs
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.models.vit import PatchViT
from fedvit.program import Train
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.methods import LAWS, agree_with_torch, name_its_source


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["eftvit", "fedper", "feddf", "analytic"])
def test_fedvits_own_methods_obey_the_laws(law: Law, name: str) -> None:
    """One method for each kind of server rule: features, updates, images of its own, sums."""
    assert find_break(law, name) is None


@dataclass(frozen=True, kw_only=True)
class Anonymous(FedAvg):
    """A method of nobody."""

    source: ClassVar[str] = "somebody"


@dataclass(frozen=True, kw_only=True)
class Infinite(FedAvg):
    """Its loss is not a number. Source: none."""

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        plain = super().objective(vit, phase, tensors, inputs)
        zero: Tensor = plain.loss * 0
        return plain._replace(loss=plain.loss + zero / zero)


@pytest.mark.parametrize(
    ("kind", "law", "reason"),
    [
        (Anonymous, name_its_source, "its docstring has no line 'Source: ...'"),
        (Infinite, agree_with_torch, "differs from torch by nan"),
    ],
)
def test_a_broken_method_is_found(kind: type[FedAvg], law: Law, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fedvit.methods.METHODS, "fedavg", kind)
    found = find_break(law, "fedavg")
    assert found is not None
    assert reason in found
