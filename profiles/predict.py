"""Predicts the cost of a Program on one device: seconds by a roofline over its operators, memory, energy, budgets."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from fedvit.resources import Budget, BudgetKind, ProductKind, ProductRate, Speed
from profiles.prediction import GraphWork, Prediction, ProductWork, ProgramCost

BASE_RSS_BYTES = 62_000_000
"""Resident memory of an idle device's process, if the device did not report it."""
ENGINE_BYTES = 44_000_000
"""Memory that the process with a working onnxruntime adds: code, threads, buffers, and copies of shared pages."""
LOADED_BYTES = 29_000_000
"""The part of ENGINE_BYTES that is present once it is loaded, as on a device with a memory budget before any task."""


class Target(NamedTuple):
    """A device that a cost is predicted for, beside its speed and its budget."""

    device: str
    source: Literal["measured", "catalogue"] | None  # of its speed
    mode: str | None = None  # power mode of the catalogue
    power_w: tuple[float, float] | None = None  # idle, under load
    # that its process holds before it has any work, with the engine loaded where it has a memory budget
    base_rss_bytes: int | None = None


def predict(
    cost: ProgramCost,
    speed: Speed | None,
    target: Target,
    budget: Budget | None = None,
    corrections: Mapping[BudgetKind, float] | None = None,
) -> Prediction:
    """Predict the cost of a round on a device of this speed.

    `corrections` are factors by which predictions for this device were too low before.
    """
    factors = corrections or {}
    parts = seconds(cost.step_work, speed) if speed else {}
    step_s = sum(parts.values()) * factors.get("time", 1.0) if speed else None
    train_s = None if step_s is None else cost.steps * step_s
    later_train_s = None
    if speed and cost.later_step_work:
        later_train_s = cost.steps * sum(seconds(cost.later_step_work, speed).values()) * factors.get("time", 1.0)
    evaluate_s = None
    if speed:
        evaluate_s = -(-cost.test_images // cost.answer_size) * sum(seconds(cost.answer_work, speed).values())
    limits = budget or Budget()
    software = BASE_RSS_BYTES + ENGINE_BYTES
    if target.base_rss_bytes is not None:
        software = target.base_rss_bytes + ENGINE_BYTES - (LOADED_BYTES if limits.memory_bytes is not None else 0)
    memory = [msgspec.structs.replace(phase, parts={"software": software, **phase.parts}) for phase in cost.memory]
    loaded_w = target.power_w[1] if target.power_w else None
    peak = int(max(phase.total_bytes for phase in memory) * factors.get("memory", 1.0))
    return Prediction(
        device=target.device,
        source=target.source,
        mode=target.mode,
        step_s=step_s,
        train_s=train_s,
        evaluate_s=evaluate_s,
        bound=max(parts.items(), key=lambda item: item[1])[0] if parts else None,
        memory=memory,
        peak_rss_bytes=peak,
        energy_j=None if loaded_w is None or train_s is None else train_s * loaded_w,
        power_w=loaded_w,
        over=_over(cost, train_s, peak, limits),
        load_per_core=speed.load_per_core if speed else None,
        later_train_s=later_train_s,
    )


def _over(cost: ProgramCost, train_s: float | None, peak_bytes: int, budget: Budget) -> tuple[BudgetKind, ...]:
    spent: dict[BudgetKind, tuple[float | None, float | None]] = {
        "memory": (peak_bytes, budget.memory_bytes),
        "flops": (cost.flops_round, budget.flops_per_round),
        "time": (train_s, budget.round_deadline_s),
        "upload": (cost.bytes_up, budget.upload_bytes),
    }
    return tuple(
        kind for kind, (needed, limit) in spent.items() if needed is not None and limit is not None and needed > limit
    )


# --- seconds ------------------------------------------------------------------------------------------

Bound = Literal["products", "memory", "overhead"]


def seconds(work: GraphWork, speed: Speed) -> dict[Bound, float]:
    """Seconds by kind of work: operators run one after another, each at its own rate."""
    rates = _product_model(speed.products)
    plain = speed.bytes_per_s["Add"]
    return {
        "products": sum(product.count * rates.seconds(product) for product in work.products),
        "memory": sum(updated / _rate(speed, op, plain) for op, updated in work.moved_bytes.items()),
        "overhead": work.nodes * speed.node_s,
    }


_LIKE = {
    "Split": "Concat", "Slice": "Concat", "Gather": "Concat", "Expand": "Concat", "Pad": "Concat",
    "ReduceSum": "ReduceMean", "ReduceMax": "ReduceMean", "ReduceMin": "ReduceMean", "LogSoftmax": "Softmax",
    "Tanh": "Erf", "QuantizeLinear": "DequantizeLinear", "LayerNorm": "LayerNormalization",
    "LayerNormGrad": "LayerNormalization", "GeluGrad": "Gelu",
}  # fmt: skip
"""Operators that are not measured, and measured ones of the same speed."""


def _rate(speed: Speed, op: str, plain: float) -> float:
    return speed.bytes_per_s.get(op) or speed.bytes_per_s.get(_LIKE.get(op, "Add")) or plain


class ProductModel:
    """Seconds of a product of any size, from those that were measured.

    Each kind's seconds are a sum, with factors that fit the measured ones best: of its FLOPs, of the right operand's
    elements (which is packed anew each time), and of the result's.
    """

    def __init__(self, rates: Sequence[ProductRate]) -> None:
        by_kind: dict[ProductKind, list[ProductRate]] = defaultdict(list)
        for rate in rates:
            by_kind[rate.kind].append(rate)
        self._factors = {kind: _fit(measured) for kind, measured in by_kind.items()}

    def seconds(self, product: ProductWork) -> float:
        factors = self._factors.get(product.kind)
        if factors is None:
            factors = self._factors["weights"]
        return float(_terms(product) @ factors)


@lru_cache(maxsize=64)
def _product_model(rates: tuple[ProductRate, ...]) -> ProductModel:
    """Cached, as a plan prices several Programs for each device."""
    return ProductModel(rates)


def _terms(product: ProductRate | ProductWork) -> Any:
    flops = 2 * product.batch * product.rows * product.inner * product.columns
    right = product.batch * product.inner * product.columns
    out = product.batch * product.rows * product.columns
    return np.array([flops, right, out], np.float64)


def _fit(measured: Sequence[ProductRate]) -> Any:
    """Non-negative factors that minimise relative errors."""
    from scipy.optimize import nnls  # imported late: saves half a second at the coordinator's start

    terms = np.stack([_terms(rate) for rate in measured])
    taken = np.array([terms_of[0] / rate.flops_per_s for terms_of, rate in zip(terms, measured, strict=True)])
    factors, _ = nnls(terms / taken[:, None], np.ones(len(measured)))
    return factors
