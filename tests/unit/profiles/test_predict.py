"""Seconds, memory and budgets of a round, from a speed that was measured: sums that are done by hand here."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.resources import Budget, BudgetKind, ProductKind, ProductRate, Speed
from profiles import predict as predict_module
from profiles.predict import BASE_RSS_BYTES, ENGINE_BYTES, LOADED_BYTES, ProductModel, Target, predict, seconds
from profiles.prediction import GraphWork, MemoryPhase, Prediction, ProductWork, ProgramCost

KINDS: tuple[ProductKind, ...] = ("weights", "gradient", "attention", "integers", "halves")
SIZES = ((1, 200, 768, 3072), (1, 800, 192, 768), (8, 50, 64, 50), (1, 2000, 128, 256), (1, 64, 768, 768))


def flops_of(batch: int, rows: int, inner: int, columns: int) -> int:
    return 2 * batch * rows * inner * columns


def true_s(batch: int, rows: int, inner: int, columns: int) -> float:
    """A machine of 10 GFLOP/s that packs 1 G elements a second and writes 0.5 G."""
    return flops_of(batch, rows, inner, columns) / 10e9 + batch * inner * columns / 1e9 + batch * rows * columns / 0.5e9


def rate(kind: ProductKind, *size: int) -> ProductRate:
    batch, rows, inner, columns = size
    return ProductRate(kind, batch, rows, inner, columns, flops_of(*size) / true_s(*size))


def work(kind: ProductKind, *size: int, count: float = 1.0) -> ProductWork:
    batch, rows, inner, columns = size
    return ProductWork(kind, batch, rows, inner, columns, count)


# --- products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_measured_is_reproduced(kind: ProductKind) -> None:
    model = ProductModel([rate(kind, *size) for size in SIZES] + [rate("weights", *size) for size in SIZES])
    for size in SIZES:
        assert model.seconds(work(kind, *size)) == pytest.approx(true_s(*size), rel=1e-6)


def test_times_between_sizes_follow_the_law_of_their_kind() -> None:
    model = ProductModel([rate("weights", *size) for size in SIZES])
    for size in ((1, 100, 384, 1152), (1, 1, 768, 768), (1, 5000, 64, 10)):
        assert model.seconds(work("weights", *size)) == pytest.approx(true_s(*size), rel=1e-6)
    # each kind has its own factors: Gradients are half as fast here; nothing was said of integers, which then are
    # as fast as weights
    size = (1, 200, 768, 768)
    slow = msgspec.structs.replace(rate("gradient", *size), flops_per_s=rate("gradient", *size).flops_per_s / 2)
    model = ProductModel([rate("weights", *size), slow])
    assert model.seconds(work("gradient", *size)) == pytest.approx(2 * model.seconds(work("weights", *size)))
    assert model.seconds(work("integers", *size)) <= model.seconds(work("weights", *size))
    # of one size time follows the flops: A single measurement says no more than a rate
    model = ProductModel([ProductRate("weights", 1, 200, 768, 768, 5e9)])
    for size in ((1, 200, 768, 768), (1, 10, 20, 30)):
        assert model.seconds(work("weights", *size)) == pytest.approx(flops_of(*size) / 5e9)


side = st.integers(1, 4096)


@given(
    rates=st.lists(
        st.builds(ProductRate, st.just("weights"), st.just(1), side, side, side, st.floats(1e7, 1e13)),
        min_size=1,
        max_size=8,
    ),
    batch=st.integers(1, 256),
    sides=st.tuples(side, side, side),
    axis=st.integers(0, 3),
    factor=st.integers(2, 5),
)
def test_a_larger_product_is_never_faster(
    rates: list[ProductRate], batch: int, sides: tuple[int, int, int], axis: int, factor: int
) -> None:
    """Whatever was measured, however odd: seconds are above zero, and grow with every side."""
    model = ProductModel(rates)
    size = [batch, *sides]
    least = model.seconds(work("weights", *size))
    size[axis] *= factor
    more = model.seconds(work("weights", *size))
    assert 0 < least <= more * (1 + 1e-9)
    assert more <= factor * least * (1 + 1e-9), "nor does it take more than so many of the smaller ones"


# --- seconds of a step --------------------------------------------------------------------------------

SPEED = Speed(
    threads=2,
    products=(ProductRate("weights", 1, 200, 768, 768, 1e9),),
    bytes_per_s={"Add": 2e9, "Concat": 1e9, "Softmax": 0.5e9, "DequantizeLinear": 0.25e9, "ReduceMean": 4e9},
    node_s=1e-5,
)


def some_work(scale: float = 1.0) -> GraphWork:
    """A quarter of a second of products, half a second of bytes, 100 operators: 1 ms."""
    return GraphWork(
        products=[work("weights", 1, 500, 500, 500, count=scale)], moved_bytes={"Add": 1e9 * scale}, nodes=100 * scale
    )


def test_seconds_are_those_of_products_bytes_and_operators() -> None:
    assert seconds(some_work(), SPEED) == {
        "products": pytest.approx(0.25),
        "memory": pytest.approx(0.5),
        "overhead": pytest.approx(1e-3),
    }


def test_the_fit_to_a_speed_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many Programs are looked at for the device, or for another that is as fast."""
    fitted = []

    class Counted(ProductModel):
        def __init__(self, rates: Sequence[ProductRate]) -> None:
            fitted.append(rates)
            super().__init__(rates)

    monkeypatch.setattr(predict_module, "ProductModel", Counted)
    for flops_per_s in (1.25e9, 1.25e9, 2.5e9, 1.25e9):
        rates = (ProductRate("weights", 3, 5, 7, 11, flops_per_s),)
        seconds(some_work(), msgspec.structs.replace(SPEED, products=rates))
    assert [rates[0].flops_per_s for rates in fitted] == [1.25e9, 2.5e9]


@pytest.mark.parametrize(
    ("op", "bytes_per_s"),
    [
        ("Softmax", 0.5e9),
        ("LogSoftmax", 0.5e9),
        ("Slice", 1e9),
        ("Split", 1e9),
        ("Gather", 1e9),
        ("ReduceSum", 4e9),
        ("QuantizeLinear", 0.25e9),
        ("Mul", 2e9),
        ("Tanh", 2e9),  # as Erf, which this device did not measure
        ("NeverHeardOf", 2e9),
    ],
)
def test_an_operator_that_was_not_measured_is_as_fast_as_one_like_it(op: str, bytes_per_s: float) -> None:
    assert seconds(GraphWork(products=[], moved_bytes={op: 1e9}, nodes=0), SPEED)["memory"] == pytest.approx(
        1e9 / bytes_per_s
    )


def test_no_work_takes_no_time() -> None:
    assert seconds(GraphWork(products=[], moved_bytes={}, nodes=0), SPEED) == {
        "products": 0,
        "memory": 0,
        "overhead": 0,
    }


# --- a round ------------------------------------------------------------------------------------------

MB = 1_000_000


def a_cost(**changed: Any) -> ProgramCost:
    """40 steps of 0.751 s; 25 test images, 10 at a time, each time a tenth of a step's work."""
    cost = ProgramCost(
        method="fedavg",
        model="small",
        options={},
        batch_size=8,
        run_size=4,
        kept_patches=16,
        mask_ratio=0.0,
        parameters_trained=1,
        parameters_frozen=1,
        parameters_local=1,
        flops_forward=1,
        flops_backward=1,
        flops=[],
        flops_evaluate=1,
        step_work=some_work(),
        answer_work=some_work(0.1),
        answer_size=10,
        steps=40,
        images=320,
        test_images=25,
        flops_round=7_000,
        bytes_once=1,
        bytes_down=1,
        bytes_up=900,
        memory=[
            MemoryPhase(phase="train", parts={"weights": 5 * MB, "activations": 20 * MB}),
            MemoryPhase(phase="upload", parts={"weights": 9 * MB}),
            MemoryPhase(phase="evaluate", parts={"weights": 9 * MB, "activations": 10 * MB}),
        ],
    )
    return msgspec.structs.replace(cost, **changed)


STEP_S = 0.25 + 0.5 + 1e-3
PEAK = BASE_RSS_BYTES + ENGINE_BYTES + 25 * MB


def predict_round(
    cost: ProgramCost | None = None,
    speed: Speed | None = SPEED,
    budget: Budget | None = None,
    corrections: dict[BudgetKind, float] | None = None,
    **target: Any,
) -> Prediction:
    known = Target("pi", "measured" if speed else None, **target)
    return predict(cost or a_cost(), speed, known, budget, corrections)


def test_a_round_is_its_steps() -> None:
    made = predict_round(mode="15W")
    assert (made.device, made.source, made.mode) == ("pi", "measured", "15W")
    assert made.step_s == pytest.approx(STEP_S)
    assert made.train_s == pytest.approx(40 * STEP_S)
    assert made.evaluate_s == pytest.approx(3 * STEP_S / 10)
    assert made.bound == "memory"
    assert predict_round(a_cost(test_images=0)).evaluate_s == 0


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("products", {"products": [work("weights", 1, 500, 500, 500, count=9)]}),
        ("overhead", {"nodes": 1e6}),
        ("memory", {}),
    ],
)
def test_what_takes_most_of_a_step_is_named(part: str, changed: dict[str, Any]) -> None:
    assert predict_round(a_cost(step_work=msgspec.structs.replace(some_work(), **changed))).bound == part


def test_without_a_speed_there_is_no_time() -> None:
    """Nor energy; memory is predicted all the same, and no deadline can be missed."""
    made = predict_round(speed=None, budget=Budget(round_deadline_s=1e-9, memory_bytes=1), power_w=(2.0, 5.0))
    assert (made.step_s, made.train_s, made.evaluate_s, made.bound, made.energy_j) == (None,) * 5
    assert made.source is None
    assert made.peak_rss_bytes > 0
    assert made.over == ("memory",)


def test_energy_is_time_under_load() -> None:
    made = predict_round(power_w=(2.0, 5.0))
    assert made.power_w == 5.0
    assert made.energy_j == pytest.approx(40 * STEP_S * 5.0)
    assert (predict_round().energy_j, predict_round().power_w) == (None, None)


def test_memory_is_the_highest_phase_with_the_software() -> None:
    made = predict_round()
    assert made.peak_rss_bytes == PEAK
    assert [phase.parts["software"] for phase in made.memory] == [BASE_RSS_BYTES + ENGINE_BYTES] * 3
    assert [phase.phase for phase in made.memory] == ["train", "upload", "evaluate"]


@pytest.mark.parametrize(
    ("budget", "software"),
    [
        (None, 50 * MB + ENGINE_BYTES),
        (Budget(upload_bytes=10**9), 50 * MB + ENGINE_BYTES),
        (Budget(memory_bytes=10**9), 50 * MB + ENGINE_BYTES - LOADED_BYTES),
    ],
)
def test_software_is_what_the_device_said(budget: Budget | None, software: int) -> None:
    """With a memory budget a device has loaded the engine before it says what it holds."""
    made = predict_round(base_rss_bytes=50 * MB, budget=budget)
    assert made.memory[0].parts["software"] == software
    assert made.peak_rss_bytes == software + 25 * MB


LIMITS: list[tuple[BudgetKind, str, float]] = [
    ("memory", "memory_bytes", PEAK),
    ("flops", "flops_per_round", 7_000),
    ("upload", "upload_bytes", 900),
]


@pytest.mark.parametrize(("kind", "key", "needed"), LIMITS)
def test_a_budget_that_is_just_met_is_kept(kind: BudgetKind, key: str, needed: int) -> None:
    assert predict_round(budget=Budget(**{key: needed})).over == ()
    assert predict_round(budget=Budget(**{key: needed - 1})).over == (kind,)


def test_budgets_that_are_exceeded_are_named() -> None:
    assert predict_round(budget=Budget(round_deadline_s=40 * STEP_S * 1.001)).over == ()
    assert predict_round(budget=Budget(round_deadline_s=40 * STEP_S * 0.999)).over == ("time",)
    everything = Budget(memory_bytes=1, flops_per_round=1, round_deadline_s=1.0, upload_bytes=1)
    assert predict_round(budget=everything).over == ("memory", "flops", "time", "upload")
    assert predict_round(budget=Budget()).over == ()


def test_what_was_too_low_before_is_corrected() -> None:
    """By a factor each; FLOPs and bytes are counted and need none."""
    made = predict_round(corrections={"time": 1.5, "memory": 1.25})
    assert made.step_s == pytest.approx(1.5 * STEP_S)
    assert made.train_s == pytest.approx(1.5 * 40 * STEP_S)
    assert made.peak_rss_bytes == int(1.25 * PEAK)
    assert predict_round(budget=Budget(memory_bytes=PEAK), corrections={"memory": 1.01}).over == ("memory",)
    assert predict_round(budget=Budget(round_deadline_s=40 * STEP_S * 1.1), corrections={"time": 1.2}).over == ("time",)
