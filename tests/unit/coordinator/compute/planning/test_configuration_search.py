"""Which form a device gets: priced on real graphs of a tiny model, and held against every form that there is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.compute.planning.configuration_search import RUNNERS_UP, Choice, ConfigurationSearch, cost_on, grid
from coordinator.compute.planning.planned_device import PlannedDevice
from coordinator.compute.planning.planner import make_plan
from coordinator.compute.planning.trade_offs import TradeOff, trade_offs
from coordinator.config import RunConfig
from fedvit.blobs import BlobStore
from fedvit.errors import OverBudget
from fedvit.methods import METHODS, make_method
from fedvit.methods.base import Method
from fedvit.models import SMALL, build_vit
from fedvit.quantities import parse_bytes, parse_flops, parse_seconds
from fedvit.resources import Budget, BudgetKind, ProductRate, Speed

Configure = Callable[..., RunConfig]

# --- the grid -----------------------------------------------------------------------------------------

KIND = frozenset[BudgetKind]({"time"})


@st.composite
def trade_offs_of(draw: st.DrawFn) -> list[TradeOff]:
    """Some options, the shares of each falling."""
    given = []
    for number in range(draw(st.integers(0, 4))):
        shares = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)), reverse=True)
        given.append(TradeOff(f"option {number}", KIND, tuple(enumerate(shares))))
    return given


@given(trade_offs_of())
def test_the_grid_has_every_combination_once_and_shares_fall(some: list[TradeOff]) -> None:
    """Each option as it is, or with one of its values; what is kept is the product of the shares."""
    points = list(grid(some))
    shares = {trade_off.option: dict(trade_off.values) for trade_off in some}
    expected = [
        dict(point)
        for point in product(*([(), *((each.option, value) for value, _ in each.values)] for each in some))
        for point in [[item for item in point if item]]
    ]
    assert sorted(map(repr, (changes for changes, _ in points))) == sorted(map(repr, expected))
    for changes, quality in points:
        assert quality == pytest.approx(prod(shares[option][value] for option, value in changes.items()))
    quality = [quality for _, quality in points]
    assert quality == sorted(quality, reverse=True)
    assert points[0] == ({}, 1.0)


def test_of_equal_shares_fewer_changes_come_first() -> None:
    free = [TradeOff(option, KIND, ((True, 1.0),)) for option in ("a", "b")]
    assert [changes for changes, _ in grid(free)] == [{}, {"b": True}, {"a": True}, {"a": True, "b": True}]


# --- trade_offs of the methods -------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_may_give_up(name: str) -> None:
    """Every value makes a valid method of that kind, which keeps less the further it is from what was asked for; and no
    method gives up what it has given up."""
    method = make_method(name, {"epochs": 3})
    vit = build_vit(SMALL, 3, seed=0, options={"image_size": 16, "patch_size": 8, "width": 8, "depth": 3, "heads": 1})
    for model_patches in method.model_patches():
        model_patches.apply(vit, 0)
    possible = trade_offs(method, vit)
    assert {"recompute", "epochs"} <= {trade_off.option for trade_off in possible}
    assert len({trade_off.option for trade_off in possible}) == len(possible)
    for trade_off in possible:
        assert trade_off.helps
        shares = [share for _, share in trade_off.values]
        assert all(0 < share <= 1 for share in shares)
        assert shares == sorted(shares, reverse=True)
        for value, _ in trade_off.values:
            changed = make_method(name, {**msgspec.to_builtins(method), trade_off.option: value})
            assert changed == replace(method, **{trade_off.option: value})
            assert changed != method
            changed.groups(vit)
            left = {other.option: dict(other.values) for other in trade_offs(changed, vit)}
            if trade_off.option not in ("threshold",):  # a share of what is left can always be given up
                assert value not in left.get(trade_off.option, {})


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
MODEL = {"image_size": 32, "patch_size": 4, "width": 32, "depth": 2, "heads": 2, "mlp_ratio": 4.0}
# fmt: off
OPTIONS: dict[str, dict[str, Any]] = {
    "eftvit": {
        "mask": 0.9, "local_blocks": 1, "epochs": 2, "batch_size": 32, "micro_batch": 16, "frozen_precision": "fp16",
    },
    "fedavg": {"epochs": 3, "batch_size": 32, "micro_batch": 16},
    "apfl": {"epochs": 2, "batch_size": 2},
}
# fmt: on
LIMITS: dict[BudgetKind, str] = {
    "memory": "memory_bytes",
    "flops": "flops_per_round",
    "time": "round_deadline_s",
    "upload": "upload_bytes",
}  # fmt: skip
RSS_BYTES = 2_000_000
"""Of a device's process: next to nothing, so that what its work takes decides."""


@dataclass(frozen=True)
class Bench:
    """A run's fitter, which prices each graph once for all tests."""

    method: Method
    search: ConfigurationSearch

    def target(self, budget: Budget | None = None, **changed: Any) -> PlannedDevice:
        usual = PlannedDevice(
            device="pi",
            speed=SPEED,
            source="measured",
            mode=None,
            budget=budget or Budget(),
            images=48,
            test_images=10,
            base_rss_bytes=RSS_BYTES,
        )
        return usual._replace(**changed)

    def find(self, budget: Budget | None = None, **changed: Any) -> tuple[Method, Choice]:
        return self.search.find(self.method, self.target(budget, **changed))

    def asked(self) -> dict[BudgetKind, float]:
        """What the method needs as it was asked for, on a device with a memory budget: it has loaded its engine."""
        return needs(self.find(Budget(memory_bytes=10**12))[1])

    def every_candidate(self, target: PlannedDevice) -> Iterator[tuple[float, tuple[BudgetKind, ...]]]:
        """(share, what is exceeded) of every combination; where memory counts, with one image at a time, too."""
        for changes, quality in grid(trade_offs(self.method, self.search.vit)):
            changed = replace(self.method, **changes)
            few = changed.one_gradient and target.budget.memory_bytes is not None
            sizes = (changed.micro_batch, 1) if few else (changed.micro_batch,)
            for size in sizes:
                candidate = replace(changed, micro_batch=size)
                cost = cost_on(target, self.search.program_of(candidate))
                yield quality, self.search.candidate(cost, changes, quality, target).prediction.over


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
            made[name] = Bench(plan.method, plan.search)
        return made[name]

    return bench


NAMES = ("eftvit", "fedavg", "apfl")


@pytest.mark.parametrize("name", NAMES)
def test_without_a_budget_a_device_gets_what_was_asked_for(name: str, bench: Callable[[str], Bench]) -> None:
    method, choice = bench(name).find()
    assert method == bench(name).method
    assert (choice.chosen.changes, choice.chosen.quality) == ({}, 1.0)
    assert (choice.rejected, choice.runners_up) == ([], [])
    assert choice.device == "pi"


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_that_is_just_met_changes_nothing(name: str, bench: Callable[[str], Bench]) -> None:
    asked = bench(name).asked()
    for kind, needed in asked.items():
        method, choice = bench(name).find(limit(kind, 1.001 * needed))
        assert method == bench(name).method, kind
        assert choice.chosen.quality == 1.0


def check(made: Bench, target: PlannedDevice, method: Method, choice: Choice) -> None:
    """The choice fits, is what it says, and no other form that keeps more would fit."""
    chosen = choice.chosen
    assert chosen.prediction.over == ()
    assert replace(made.method, **chosen.changes) == method
    assert (choice.device, choice.budget) == (target.device, target.budget)
    again = cost_on(target, made.search.program_of(method))
    assert choice.cost == again
    shares = {trade_off.option: dict(trade_off.values) for trade_off in trade_offs(made.method, made.search.vit)}
    given_up = {option: value for option, value in chosen.changes.items() if option != "micro_batch"}
    assert chosen.quality == pytest.approx(prod(shares[option][value] for option, value in given_up.items()))
    for candidate in choice.runners_up:
        assert candidate.prediction.over == ()
        assert candidate.quality <= chosen.quality
    assert len(choice.runners_up) <= RUNNERS_UP
    for candidate in choice.rejected:
        assert candidate.prediction.over
        assert candidate.quality >= chosen.quality
    best = max((quality for quality, over in made.every_candidate(target) if not over), default=0.0)
    assert chosen.quality >= best - 1e-9, choice


DEAR = ("eftvit", "apfl")
"""Methods with so many forms that to price each of them takes ten seconds."""


def mark_dear(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow if case[0] in DEAR else ())


CASES = [
    (name, kind, share)
    for name, kinds in {
        "eftvit": ("memory", "flops", "time", "upload"),
        "fedavg": ("memory", "flops", "time"),
        "apfl": ("memory", "flops", "time"),
    }.items()
    for kind in kinds
    for share in (0.98, 0.8, 0.55, 0.45)
    if not (kind == "memory" and share < 0.9)
]


@pytest.mark.parametrize(("name", "kind", "share"), [mark_dear(*case) for case in CASES])
def test_the_form_that_keeps_the_most_is_chosen(
    name: str, kind: BudgetKind, share: float, bench: Callable[[str], Bench]
) -> None:
    """A part of what the method needs as it was asked for; where no form fits, that is said."""
    made = bench(name)
    target = made.target(limit(kind, share * made.asked()[kind]))
    try:
        method, choice = made.search.find(made.method, target)
    except OverBudget:
        assert all(over for _, over in made.every_candidate(target))
    else:
        assert choice.chosen.changes
        check(made, target, method, choice)


@pytest.mark.parametrize("name", ["eftvit", "fedavg"])
def test_a_deadline_is_met_where_every_operator_takes_long(name: str, bench: Callable[[str], Bench]) -> None:
    """One image at a time would then take many times as long: that says nothing of what a deadline allows."""
    made = bench(name)
    slow = msgspec.structs.replace(SPEED, node_s=1e-3)
    asked = made.find(speed=slow)[1].chosen.prediction
    assert asked.bound == "overhead"
    assert asked.train_s is not None
    target = made.target(limit("time", 0.6 * asked.train_s), speed=slow)
    method, choice = made.search.find(made.method, target)
    assert choice.chosen.changes.keys() == {"epochs"}
    check(made, target, method, choice)


def test_what_saves_memory_alone_does_not_raise_the_fewest_flops(bench: Callable[[str], Bench]) -> None:
    """Blocks that are computed again take more FLOPs; the smallest budget is that of a form without them."""
    made = bench("fedavg")
    target = made.target(Budget())

    def flops(**changes: Any) -> int:
        candidate = replace(made.method, **changes)
        return cost_on(target, made.search.program_of(candidate)).flops_round

    least = flops(epochs=1)
    assert flops(epochs=1, recompute=True) > least
    method, choice = made.find(Budget(flops_per_round=least))
    assert choice.chosen.changes == {"epochs": 1}
    assert method.epochs == 1


@pytest.mark.slow
def test_several_budgets_at_once(bench: Callable[[str], Bench]) -> None:
    """Less memory, and half the time: both are kept."""
    made = bench("eftvit")
    asked = made.asked()
    for memory, time in ((0.985, 0.9), (0.985, 0.55), (1.1, 0.5)):
        budget = limit("memory", memory * asked["memory"]).tightest(limit("time", time * asked["time"]))
        target = made.target(budget)
        check(made, target, *made.search.find(made.method, target))


@pytest.mark.parametrize(("name", "kind"), [mark_dear(*case) for case in sorted({case[:2] for case in CASES})])
def test_the_smallest_budget_is_named_and_would_do(name: str, kind: BudgetKind, bench: Callable[[str], Bench]) -> None:
    """Far too little of one kind: the message says how much would be enough, in three digits, rounded up; with that
    much it fits, and with a few percent less it does not."""
    made = bench(name)
    with pytest.raises(OverBudget) as refused:
        made.find(limit(kind, 0.001 * made.asked()[kind]))
    said = str(refused.value)
    assert said.startswith("nothing fits pi: its ")
    assert said.count("would be needed") == 1
    needed = amount(kind, said.partition("at least ")[2].removesuffix(" would be needed"))
    target = made.target(limit(kind, needed))
    check(made, target, *made.search.find(made.method, target))
    less = made.target(limit(kind, 0.98 * needed))
    assert all(over for _, over in made.every_candidate(less))
    with pytest.raises(OverBudget):
        made.search.find(made.method, less)


def amount(kind: BudgetKind, said: str) -> float:
    """What a message says, as a person would type it."""
    read: Callable[[str], float] = {"time": parse_seconds, "flops": parse_flops}.get(kind, parse_bytes)
    return read(said)


def test_memory_is_saved_by_fewer_images_at_a_time_first(bench: Callable[[str], Bench]) -> None:
    """That costs no accuracy, so all is kept; more than one where there is room for them."""
    made = bench("fedavg")
    asked = made.asked()["memory"]
    least = replace(made.method, micro_batch=1)
    target = made.target(Budget(memory_bytes=10**12))
    smallest = made.search.candidate(cost_on(target, made.search.program_of(least)), {}, 1.0, target)
    one = smallest.prediction.peak_rss_bytes / 0.88
    assert one < 0.98 * asked
    sizes = []
    for room in (0.05, 0.3, 0.6, 0.9):
        method, choice = made.find(limit("memory", one + room * (asked - one)))
        assert choice.chosen.quality == 1.0
        assert choice.chosen.changes == {"micro_batch": method.micro_batch}
        assert choice.cost.run_size == method.micro_batch
        sizes.append(method.micro_batch or 0)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < 16


def test_an_optimizer_with_8_bits_fits_a_budget_that_32_exceed(configure: Configure, tmp_path: Path) -> None:
    options = {"optimizer": "adamw", "momentum": 0.0, "batch_size": 8, "micro_batch": 1, "recompute": True}
    config = configure("fedavg", options, model_options={**MODEL, "width": 128}, budget={"memory_budget": "1GB"})
    plan = make_plan(config, ("a", "b"), BlobStore(tmp_path))
    made = Bench(plan.method, plan.search)
    smaller = Bench(replace(plan.method, optimizer_bits=8), plan.search)
    asked, least = (each.asked()["memory"] for each in (made, smaller))
    assert least < 0.98 * asked
    method, choice = made.find(limit("memory", (asked + least) / 2))
    assert choice.chosen.changes == {"optimizer_bits": 8, "micro_batch": 1}
    assert method == smaller.method


def test_a_method_that_takes_its_batch_as_a_whole_gets_a_smaller_one(bench: Callable[[str], Bench]) -> None:
    made = bench("apfl")
    method, choice = made.find(limit("memory", 0.99 * made.asked()["memory"]))
    assert choice.chosen.changes.keys() <= {"batch_size", "recompute"}
    assert method.micro_batch is None


def test_who_was_wrong_before_gets_less(bench: Callable[[str], Bench]) -> None:
    """The same budget; the device took 1.6 times as long as was predicted."""
    made = bench("fedavg")
    budget = limit("time", 1.1 * made.asked()["time"])
    assert made.find(budget)[0] == made.method
    method, choice = made.find(budget, corrections=(("time", 1.6),))
    assert choice.chosen.changes == {"epochs": 2}
    assert method.epochs == 2
    assert choice.chosen.prediction.train_s == pytest.approx(1.6 * made.asked()["time"] * 2 / 3, rel=1e-3)


def test_without_a_speed_no_deadline_can_be_missed(bench: Callable[[str], Bench]) -> None:
    method, choice = bench("fedavg").find(Budget(round_deadline_s=1e-9), speed=None, source=None)
    assert method == bench("fedavg").method
    assert choice.chosen.prediction.train_s is None


def test_devices_of_one_run_get_different_forms(bench: Callable[[str], Bench]) -> None:
    """By their speed and by how many images they have; what was priced for one is known for the other."""
    made = bench("fedavg")
    budget = limit("time", 1.01 * made.asked()["time"])
    priced = {method.as_traced() for method in made.search.priced}
    slower = msgspec.structs.replace(
        SPEED,
        products=tuple(msgspec.structs.replace(rate, flops_per_s=rate.flops_per_s / 3) for rate in SPEED.products),
        bytes_per_s={"Add": SPEED.bytes_per_s["Add"] / 2},
        node_s=2 * SPEED.node_s,
    )
    given = {
        "fast": made.find(budget, device="fast")[0].epochs,
        "slow": made.find(budget, device="slow", speed=slower)[0].epochs,
        "rich": made.find(budget, device="rich", images=60)[0].epochs,
    }
    assert given == {"fast": 3, "slow": 1, "rich": 2}
    assert {method.as_traced() for method in made.search.priced} == priced


@pytest.mark.parametrize("updates", [{}, {"features": "int8"}])
def test_a_candidate_costs_what_its_program_does(updates: dict[str, str], configure: Configure, tmp_path: Path) -> None:
    """Several epochs share the graphs of one, but not the phases; features are sent with the run's codec."""
    plan = make_plan(configure("eftvit", {"epochs": 2}, updates=updates), ("a", "b"), BlobStore(tmp_path))
    for method in (plan.method, replace(plan.method, epochs=5)):
        ours, real = (priced.cost(images=300, test_images=60) for priced in (
            plan.search.program_of(method), plan.priced(method),
        ))  # fmt: skip
        assert ours == real
        assert ours.bytes_up


def test_what_the_server_has_not_is_not_given_up(bench: Callable[[str], Bench]) -> None:
    """Of masks, say, only those that are allowed are tried."""
    made = bench("eftvit")
    asked: list[Method] = []

    def allowed(method: Method) -> bool:
        asked.append(method)
        return not (method.mask != 0.9 or method.epochs == 1)  # type: ignore[attr-defined]

    strict = replace(made, search=replace(made.search, allowed=allowed))
    budget = limit("upload", 0.6 * made.asked()["upload"])
    assert made.find(budget)[1].chosen.changes.keys() & {"mask", "threshold"}
    _, choice = strict.find(budget)
    assert choice.chosen.changes.keys() == {"threshold"}
    assert asked
    with pytest.raises(OverBudget):
        strict.find(limit("flops", 0.6 * made.asked()["flops"]))


def test_images_are_small_only_where_the_device_knows_of_its_budget(bench: Any) -> None:
    """Under the run's budget alone a device keeps all of its decoded images, up to 64 MB, and is planned for so."""
    made = bench("fedavg")
    target = made.target(Budget(memory_bytes=10**9))._replace(images=10**4)
    image_bytes = 3 * made.search.vit.image_size**2
    assert 10**4 * image_bytes < 10**9 // 32  # with this budget all are kept in any case
    small = target._replace(budget=Budget(memory_bytes=16 * 10**4 * image_bytes))
    parts = [
        cost_on(each, made.search.program_of(made.method)).memory[0].parts["images"]
        for each in (target, small, small._replace(budget_is_own=False))
    ]
    assert parts[0] == parts[2] == parts[1] + 10**4 * image_bytes


def test_a_device_with_kernels_is_planned_for_with_them(bench: Any) -> None:
    """Its training takes less time and memory; FLOPs and bytes stay."""
    made = bench("fedavg")
    plain = made.target()
    own = made.target(speed=msgspec.structs.replace(SPEED, kernels=True))
    before, after = (made.search.find(made.method, planned)[1].chosen.prediction for planned in (plain, own))
    assert after.step_s < before.step_s
    assert after.peak_rss_bytes < before.peak_rss_bytes
    costs = [cost_on(planned, made.search.program_of(made.method)) for planned in (plain, own)]
    assert costs[0].flops_round == costs[1].flops_round
    assert costs[0].bytes_up == costs[1].bytes_up
