"""SCAFFOLD and FedDyn: a device's step, and the server beside the papers' algorithms with state on devices."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods import make_method
from fedvit.methods.base import ServerRule, ServerState
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.linear_term import TERM
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models.vit import PatchViT
from fedvit.tensors import Array
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.quadratic import BATCH, Inputs, in_double, small
from tests.support.steps import whole
from tests.support.uploads import upload

LR, EPOCHS, BATCH_SIZE, ALPHA = 0.1, 2, 4, 0.5
IMAGES = {"a": 6, "b": 6, "c": 6}
"""Two batches of an epoch, four steps of a round."""
TARGETS = {"a": np.array([1.0, -2.0]), "b": np.array([3.0, 0.5]), "c": np.array([-2.0, 1.0])}
"""Device i has the loss |x - target_i|^2 / 2."""
COHORTS = (("a", "b"), ("b", "c"), ("a", "c"), ("a", "b", "c"))


def inputs_of(name: str, vit: PatchViT) -> tuple[Inputs, Callable[[Inputs], dict[str, Tensor]]]:
    method = make_method(name, {"lr": LR})
    (phase,) = method.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    inputs |= {"hyper/lr": torch.tensor(LR, dtype=torch.float64)}
    return inputs, whole_step(method, vit, whole(phase))


def test_a_step_is_that_of_fedavg_and_the_term(vit: PatchViT) -> None:
    fedavg = FedAvg(lr=LR)
    for name, alpha in (("scaffold", 0.0), ("feddyn", 0.01)):
        inputs, step = inputs_of(name, vit)
        after = step(inputs)
        plain = whole_step(fedavg, vit, whole(fedavg.phases(vit)[0]))(inputs)
        torch.testing.assert_close(after["metric/loss"], plain["metric/loss"])
        for tensor in vit.tensors():
            pull = inputs[f"tensor/{TERM}{tensor}"]
            if alpha:
                pull = pull + alpha * (inputs[f"tensor/{tensor}"] - inputs[f"anchor/{tensor}"])
            want = plain[f"new/tensor/{tensor}"] - LR * pull
            torch.testing.assert_close(after[f"new/tensor/{tensor}"], want, rtol=1e-9, atol=1e-12)


def run(rule: ServerRule, pull: float, counted: Mapping[str, int] = MappingProxyType({})) -> Array:
    """Some rounds in which devices follow the terms of the server; return the server's last x.

    A device that has `counted` its steps made so many, others as many as the options say.
    """
    state = ServerState({"x": np.zeros(2)})
    for number, cohort in enumerate(COHORTS, 1):
        uploads = []
        for device in cohort:
            term = rule.generate(state, device, 0)[f"{TERM}x"]
            start = x = state.tensors["x"]
            for _ in range(counted.get(device, EPOCHS * 2)):
                x = x - LR * (x - TARGETS[device] + term + pull * (x - start))
            uploads.append(upload(device, IMAGES[device], {"x": x - start}, steps=counted.get(device)))
        state, _ = rule.close(state, uploads, make_context(small(), number))
    return state.tensors["x"]


@pytest.mark.parametrize("counted", [{}, {"a": 9, "c": 1}], ids=["as planned", "more and fewer steps"])
def test_scaffold_is_that_of_the_paper(counted: dict[str, int]) -> None:
    """Algorithm 1, option II, with c_i on the devices; c is the mean over those that have answered."""
    x, own = np.zeros(2), dict[str, Array]()
    for cohort in COHORTS:
        common = sum(own.values(), np.zeros(2)) / max(1, len(own))
        ends = {}
        for device in cohort:
            control, y, steps = own.get(device, np.zeros(2)), x, counted.get(device, EPOCHS * 2)
            for _ in range(steps):
                y = y - LR * (y - TARGETS[device] - control + common)
            own[device] = control - common + (x - y) / (steps * LR)
            ends[device] = y
        x = sum(ends.values(), np.zeros(2)) / len(ends)
    method = make_method("scaffold", {"lr": LR, "epochs": EPOCHS, "batch_size": BATCH_SIZE})
    np.testing.assert_allclose(run(method.server_rule(small()), 0.0, counted), x, atol=1e-5)


def test_feddyn_is_that_of_the_paper() -> None:
    """Algorithm 1 with g_i on the devices; h is the mean of g_i over those that have answered."""
    x, own = np.zeros(2), dict[str, Array]()
    for cohort in COHORTS:
        ends = {}
        for device in cohort:
            slope, y = own.get(device, np.zeros(2)), x
            for _ in range(EPOCHS * 2):
                y = y - LR * (y - TARGETS[device] - slope + ALPHA * (y - x))
            own[device] = slope - ALPHA * (y - x)
            ends[device] = y
        h = sum(own.values(), np.zeros(2)) / len(own)
        x = sum(ends.values(), np.zeros(2)) / len(ends) - h / ALPHA
    rule = make_method("feddyn", {"lr": LR, "alpha": ALPHA}).server_rule(small())
    np.testing.assert_allclose(run(rule, ALPHA), x, atol=1e-4)


def test_scaffold_and_feddyn_find_the_optimum_of_all_devices_and_fedavg_does_not() -> None:
    """Devices with different curvatures drift to their own optimum within a round."""
    curvatures = {"a": 0.2, "b": 1.0, "c": 4.0}
    optimum = sum(c * TARGETS[d] for d, c in curvatures.items()) / sum(curvatures.values())

    def end(rule: ServerRule, pull: float = 0.0, steps: int = EPOCHS * 2) -> Array:
        state = ServerState({"x": np.zeros(2)})
        for number in range(60):
            uploads = []
            for device, curvature in curvatures.items():
                term = rule.generate(state, device, 0).get(f"{TERM}x", np.zeros(2))
                start = x = state.tensors["x"]
                for _ in range(steps):
                    x = x - LR * (curvature * (x - TARGETS[device]) + term + pull * (x - start))
                uploads.append(upload(device, IMAGES[device], {"x": x - start}))
            state, _ = rule.close(state, uploads, make_context(small(), number))
        return state.tensors["x"]

    scaffold = make_method("scaffold", {"lr": LR, "epochs": EPOCHS, "batch_size": BATCH_SIZE}).server_rule(small())
    assert np.abs(end(scaffold) - optimum).max() < 0.01
    feddyn = make_method("feddyn", {"lr": LR, "alpha": ALPHA}).server_rule(small())
    assert np.abs(end(feddyn, ALPHA, steps=50) - optimum).max() < 0.01
    assert np.abs(end(FedAvg().server_rule(small())) - optimum).max() > 0.1


@pytest.mark.parametrize("options", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_scaffold_is_for_plain_sgd(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104")):
        make_method("scaffold", dict(options))
