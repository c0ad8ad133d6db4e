"""Which form a device gets: priced on real graphs of a tiny model, and held against every form that there is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import RunConfig
from coordinator.fitting import Choice, Fitter, Target, grid
from coordinator.planner import make_plan
from fedvit.blobs import BlobStore
from fedvit.methods import METHODS, make_method
from fedvit.methods.base import Economy, Method
from fedvit.models import SMALL, build_vit
from fedvit.resources import Budget, BudgetKind, ProductRate, Speed

Configure = Callable[..., RunConfig]

# --- the grid -----------------------------------------------------------------------------------------

KIND = frozenset[BudgetKind]({"time"})


@st.composite
def economies_of(draw: st.DrawFn) -> list[Economy]:
    """Some options, the shares of each falling."""
    given = []
    for number in range(draw(st.integers(0, 4))):
        shares = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)), reverse=True)
        given.append(Economy(f"option {number}", KIND, tuple(enumerate(shares))))
    return given


@given(economies_of())
def test_the_grid_has_every_combination_once_and_shares_fall(economies: list[Economy]) -> None:
    """Each option as it is, or with one of its values; what is kept is the product of the shares."""
    points = list(grid(economies))
    shares = {economy.option: dict(economy.values) for economy in economies}
    expected = [
        dict(point)
        for point in product(*([(), *((each.option, value) for value, _ in each.values)] for each in economies))
        for point in [[item for item in point if item]]
    ]
    assert sorted(map(repr, (changes for changes, _ in points))) == sorted(map(repr, expected))
    for changes, kept in points:
        assert kept == pytest.approx(prod(shares[option][value] for option, value in changes.items()))
    kept = [kept for _, kept in points]
    assert kept == sorted(kept, reverse=True)
    assert points[0] == ({}, 1.0)


def test_of_equal_shares_fewer_changes_come_first() -> None:
    free = [Economy(option, KIND, ((True, 1.0),)) for option in ("a", "b")]
    assert [changes for changes, _ in grid(free)] == [{}, {"b": True}, {"a": True}, {"a": True, "b": True}]


# --- economies of the methods -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_may_give_up(name: str) -> None:
    """Every value makes a valid method of that kind, which keeps less the further it is from what was asked for; and no
    method gives up what it has given up."""
    method = make_method(name, {"epochs": 3})
    vit = build_vit(SMALL, 3, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "depth": 3, "heads": 1})
    for surgery in method.surgery():
        surgery.apply(vit, 0)
    economies = method.economies(vit)
    assert {"recompute", "epochs"} <= {economy.option for economy in economies}
    assert len({economy.option for economy in economies}) == len(economies)
    for economy in economies:
        assert economy.helps
        shares = [share for _, share in economy.values]
        assert all(0 < share <= 1 for share in shares)
        assert shares == sorted(shares, reverse=True)
        for value, _ in economy.values:
            changed = make_method(name, {**msgspec.to_builtins(method), economy.option: value})
            assert changed == replace(method, **{economy.option: value})
            assert changed != method
            changed.groups(vit)
            left = {other.option: dict(other.values) for other in changed.economies(vit)}
            if economy.option not in ("threshold",):  # a share of what is left can always be given up
                assert value not in left.get(economy.option, {})


# --- fitting ------------------------------------------------------------------------------------------

SPEED = Speed(
    threads=1,
    products=(
        ProductRate("weights", 1, 200, 768, 768, 4e8),
        ProductRate("gradient", 1, 768, 200, 768, 4e8),
        ProductRate("attention", 24, 197, 64, 197, 4e8),
        ProductRate("integers", 1, 200, 768, 768, 4e8),
    ),
    bytes_per_s={"Add": 2e8},
    node_s=2e-7,
)
MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_ratio": 4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "eftvit": {"mask": 0.5, "local_blocks": 1, "epochs": 2, "batch_size": 32, "micro_batch": 16},
    "fedavg": {"epochs": 3, "batch_size": 32, "micro_batch": 16},
    "apfl": {"epochs": 2, "batch_size": 32},
}
LIMITS: dict[BudgetKind, str] = {
    "memory": "memory_bytes", "flops": "flops_per_round", "time": "round_deadline_s", "upload": "upload_bytes",
}  # fmt: skip
RSS_BYTES = 2_000_000
"""Of a device's process: next to nothing, so that what its work takes decides."""


@dataclass(frozen=True)
class Bench:
    """A run's fitter, which prices each graph once for all tests."""

    method: Method
    fitter: Fitter

    def target(self, budget: Budget | None = None, **changed: Any) -> Target:
        usual = Target(
            device="pi",
            speed=SPEED,
            source="measured",
            mode=None,
            budget=budget or Budget(),
            images=40,
            test_images=10,
            base_rss_bytes=RSS_BYTES,
        )
        return usual._replace(**changed)

    def fit(self, budget: Budget | None = None, **changed: Any) -> tuple[Method, Choice]:
        return self.fitter.fit(self.method, self.target(budget, **changed))

    def asked(self) -> dict[BudgetKind, float]:
        """What the method needs as it was asked for."""
        return needs(self.fit()[1])

    def every_form(self, target: Target) -> Iterator[tuple[float, tuple[BudgetKind, ...]]]:
        """(share, what is exceeded) of every combination, as usual and with one image at a time."""
        for changes, kept in grid(self.method.economies(self.fitter.vit)):
            changed = replace(self.method, **changes)
            sizes = (changed.micro_batch, 1) if changed.one_gradient else (None,)
            for size in sizes:
                form = replace(changed, micro_batch=size)
                cost = self.fitter.cost_of(form, self.fitter._graphs(form), target)
                yield kept, self.fitter.form(cost, changes, kept, target).prediction.over


def needs(choice: Choice) -> dict[BudgetKind, float]:
    """The budgets with which a form just fits; a part of a memory budget is left free."""
    prediction, cost = choice.chosen.prediction, choice.cost
    assert prediction.train_s is not None
    return {
        "memory": prediction.peak_rss_bytes / 0.88,
        "flops": cost.flops_round,
        "time": prediction.train_s,
        "upload": cost.bytes_up,
    }


def limit(kind: BudgetKind, value: float) -> Budget:
    return Budget(**{LIMITS[kind]: value if kind == "time" else int(value)})


@pytest.fixture(scope="module")
def bench(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    made: dict[str, Bench] = {}

    def bench(name: str) -> Bench:
        if name not in made:
            config = configure(name, OPTIONS[name], model_options=MODEL, budget={"memory_budget": "1GB"})
            plan = make_plan(config, ("a", "b", "c"), BlobStore(tmp_path_factory.mktemp("blobs")))
            made[name] = Bench(plan.method, plan.fitter)
        return made[name]

    return bench
