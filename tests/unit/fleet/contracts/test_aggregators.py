"""Laws of aggregators hold for fedvit's own, and refuse aggregators that break them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pytest

from fedvit.methods import aggregators
from fedvit.methods.aggregators import AGGREGATORS, Aggregator, Delta, Floats, Mean
from fleet.contracts import find_break
from fleet.contracts.aggregators import (
    LAWS,
    ignore_the_order,
    keep_what_all_agree_on,
    multiply_by_the_scale,
    refuse_what_is_not_finite,
    stay_within_the_updates,
)
from fleet.contracts.laws import Law


@pytest.mark.parametrize("name", AGGREGATORS)
@pytest.mark.parametrize("law", [law for law in LAWS if law is not refuse_what_is_not_finite])
def test_fedvits_own_aggregators_obey_the_laws(law: Law, name: str) -> None:
    """The last law is for packages: no update that is not finite reaches an aggregator."""
    assert find_break(law, name) is None


@dataclass(frozen=True)
class _Changed(Aggregator):
    change: Callable[[Sequence[Delta], float], tuple[Sequence[Delta], float]]

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        changed, factor = self.change(deltas, scale)
        return Mean().combine(changed, names, factor)


@pytest.mark.parametrize(
    ("change", "law", "reason"),
    [
        (lambda deltas, scale: (deltas[1:], scale), keep_what_all_agree_on, "give another step"),
        (lambda deltas, scale: ([deltas[0]._replace(weight=1.0)], scale), ignore_the_order, "gives another"),
        (lambda deltas, scale: (deltas, 100 * scale), stay_within_the_updates, "is larger than all updates"),
        (lambda deltas, scale: (deltas, 1.0), multiply_by_the_scale, "does not halve"),
        (lambda deltas, scale: (deltas, scale), refuse_what_is_not_finite, "an update with nan gives such a step"),
    ],
)
def test_a_broken_aggregator_is_found(
    change: Callable[..., object], law: Law, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aggregators.AGGREGATORS, "mean", lambda _: _Changed(change))  # type: ignore[arg-type]
    found = find_break(law, "mean")
    assert found is not None
    assert reason in found
