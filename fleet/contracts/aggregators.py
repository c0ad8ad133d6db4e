"""Laws of aggregators, which combine the updates of a cohort."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedvit.errors import ConfigError, EmptyCohort
from fedvit.methods.aggregators import Delta, Floats, make_aggregator
from fedvit.tensors import Array, Tensors
from fleet.contracts.laws import Law, require

DEVICES = 9
MALICIOUS_SHARE = 0.2
SHAPES = {"blocks.0.weight": (3, 4), "head.bias": (5,)}


def keep_what_all_agree_on(name: str) -> None:
    """It makes of equal updates that update, whatever the weights."""
    for update in _make_updates(3):
        step = _combine(name, _weigh([update] * DEVICES))
        require(_are_close(step, update), f"{DEVICES} equal updates give another step")


def ignore_the_order(name: str) -> None:
    """The order of the updates does not matter."""
    deltas = _weigh(_make_updates(DEVICES))
    step = _combine(name, deltas)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(DEVICES)
        require(_are_close(_combine(name, [deltas[place] for place in order]), step), f"order {order} gives another")


def stay_within_the_updates(name: str) -> None:
    """No number of its step is larger than that of every update."""
    updates = _make_updates(DEVICES)
    for tensor, value in _combine(name, _weigh(updates)).items():
        most = np.max([np.abs(update[tensor]) for update in updates], axis=0)
        require(bool((np.abs(value) <= most + 1e-6).all()), f"its step for {tensor} is larger than all updates")


def multiply_by_the_scale(name: str) -> None:
    """A scale of one half halves its step, and other tensors are left out."""
    deltas = _weigh(_make_updates(DEVICES))
    whole, half = (make_aggregator(name, MALICIOUS_SHARE).combine(deltas, {"head.bias"}, scale) for scale in (1, 0.5))
    require(half.keys() == {"head.bias"}, f"asked for head.bias, it returns {sorted(half)}")
    require(np.allclose(half["head.bias"], whole["head.bias"] / 2, rtol=1e-5), "scale 0.5 does not halve its step")


def refuse_what_is_not_finite(name: str) -> None:
    """An update that is not a number makes no step that is not one."""
    for wrong in (np.nan, np.inf):
        updates = _make_updates(DEVICES)
        updates[0]["head.bias"][2] = wrong
        try:
            step = _combine(name, _weigh(updates))
        except (ConfigError, EmptyCohort):
            continue
        require(all(np.isfinite(value).all() for value in step.values()), f"an update with {wrong} gives such a step")


LAWS: tuple[Law, ...] = (
    keep_what_all_agree_on,
    ignore_the_order,
    stay_within_the_updates,
    multiply_by_the_scale,
    refuse_what_is_not_finite,
)


def _combine(name: str, deltas: Sequence[Delta]) -> dict[str, Floats]:
    return make_aggregator(name, MALICIOUS_SHARE).combine(deltas, {*SHAPES})


def _make_updates(count: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(count)
    return [{name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(count)]


def _weigh(updates: Sequence[Tensors]) -> list[Delta]:
    weights = np.arange(1, len(updates) + 1)
    return [
        Delta(float(weight), partial(dict, update))
        for weight, update in zip(weights / weights.sum(), updates, strict=True)
    ]


def _are_close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one)
