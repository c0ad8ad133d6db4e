"""FedOpt and FedNova: the server's step beside their papers' equations."""

import numpy as np
import pytest

from fedvit.methods import make_method
from fedvit.methods.base import ServerRule, ServerState
from fedvit.tensors import Array
from tests.support.method_steps import make_context
from tests.support.quadratic import small
from tests.support.uploads import upload

UPDATES = (np.array([1.0, -0.5]), np.array([0.3, 0.1]), np.array([-2.0, 0.02]))
RATE, BETA1, BETA2, TAU = 0.1, 0.9, 0.99, 1e-3


def run(rule: ServerRule) -> Array:
    """One device's updates, one a round."""
    state = ServerState({"x": np.zeros(2)})
    for number, update in enumerate(UPDATES, 1):
        state, _ = rule.close(state, [upload("a", 5, {"x": update})], make_context(small(), number))
    return state.tensors["x"]


@pytest.mark.parametrize("optimizer", ["adagrad", "yogi", "adam"])
def test_the_server_moves_by_algorithm_2(optimizer: str) -> None:
    x, m, v = np.zeros(2), np.zeros(2), np.full(2, TAU**2)
    for update in UPDATES:
        m = BETA1 * m + (1 - BETA1) * update
        if optimizer == "adagrad":
            v = v + update**2
        elif optimizer == "yogi":
            v = v - (1 - BETA2) * update**2 * np.sign(v - update**2)
        else:
            v = BETA2 * v + (1 - BETA2) * update**2
        x = x + RATE * m / (np.sqrt(v) + TAU)
    method = make_method("fedopt", {"server_optimizer": optimizer, "server_lr": RATE})
    np.testing.assert_allclose(run(method.server_rule(small())), x, rtol=1e-5)


def test_momentum_is_fedavgm_and_without_it_fedavg() -> None:
    x, m = np.zeros(2), np.zeros(2)
    for update in UPDATES:
        m = BETA1 * m + update
        x = x + m
    options = {"server_optimizer": "momentum", "server_lr": 1.0}
    np.testing.assert_allclose(run(make_method("fedopt", options).server_rule(small())), x, rtol=1e-6)
    plain = make_method("fedopt", {**options, "beta1": 0.0}).server_rule(small())
    np.testing.assert_allclose(run(plain), sum(UPDATES), rtol=1e-6)


def test_fednova_divides_each_update_by_its_steps() -> None:
    # fednova divides each update by its steps: Batches of 4: 3 images take 1 step an epoch, 9 images take 3; of
    # both 2 epochs
    rule = make_method("fednova", {"epochs": 2, "batch_size": 4}).server_rule(small())
    updates = {"a": (3, np.array([1.0])), "b": (9, np.array([6.0])), "none": (0, np.array([0.0]))}
    uploads = [upload(device, images, {"x": update}) for device, (images, update) in updates.items()]
    state, _ = rule.close(ServerState({"x": np.zeros(1)}), uploads, make_context(small(), 1))
    mean_steps = 0.25 * 2 + 0.75 * 6
    np.testing.assert_allclose(state.tensors["x"], [mean_steps * (0.25 * 1.0 / 2 + 0.75 * 6.0 / 6)])
    # fednova divides by the steps that devices have counted: Devices of variants have other epochs, and a cap of
    # samples changes no steps
    rule = make_method("fednova", {"epochs": 2, "batch_size": 4}).server_rule(small())
    uploads = [upload("a", 3, {"x": np.array([1.0])}, steps=5), upload("b", 9, {"x": np.array([6.0])}, steps=2)]
    state, _ = rule.close(ServerState({"x": np.zeros(1)}), uploads, make_context(small(), 1))
    mean_steps = 0.25 * 5 + 0.75 * 2
    np.testing.assert_allclose(state.tensors["x"], [mean_steps * (0.25 * 1.0 / 5 + 0.75 * 6.0 / 2)])
    uploads = [upload("a", 5, {"x": np.array([1.0])}), upload("b", 7, {"x": np.array([3.0])})]
    after = [
        make_method(name, {"batch_size": 8})
        .server_rule(small())
        .close(ServerState({"x": np.zeros(1)}), uploads, make_context(small(), 1))
        for name in ("fednova", "fedavg")
    ]
    np.testing.assert_allclose(after[0][0].tensors["x"], after[1][0].tensors["x"])
