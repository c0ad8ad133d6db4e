"""FedDBE: two steps beside the paper's loss, the server's consensus, and the effect of the pull to it."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy, linear

from fedvit.methods import make_method
from fedvit.methods.base import ServerState
from fedvit.methods.feddbe import AGREED, CONSENSUS, OWN_BIAS, RUNNING
from fedvit.models.vit import PatchViT
from tests.support.method_steps import assert_descent, make_context, make_inputs, make_leaves, read, run_step
from tests.support.quadratic import after as put_back
from tests.support.uploads import upload

LR, KAPPA, MU = 0.05, 0.7, 0.3


def test_steps_minimise_the_papers_loss_with_a_running_mean_from_zero(vit: PatchViT) -> None:
    method = make_method("feddbe", {"kappa": KAPPA, "mean_momentum": MU})
    inputs, running = make_inputs(method, vit, LR), torch.zeros(vit.width, dtype=torch.float64)
    unit = vit.width**0.5
    inputs |= {f"tensor/{RUNNING}": running.clone(), f"tensor/{AGREED}": torch.ones(1, dtype=torch.float64)}
    weight = inputs["batch/weight"]
    for _ in range(2):
        leaves = make_leaves(inputs, [*vit.tensors(), OWN_BIAS])
        features, _ = read(vit, leaves, inputs)
        mean = features[weight > 0].mean(dim=0)
        running = (1 - MU) * running.detach() + MU * mean
        logits = linear(features + leaves[OWN_BIAS], leaves["head.weight"], leaves["head.bias"])
        entropy = cross_entropy(logits[weight > 0], inputs["batch/labels"][weight > 0])
        pull = (0.5 * (running - unit * inputs[f"tensor/{CONSENSUS}"]) ** 2).mean()
        (entropy + KAPPA * pull).backward()
        after = run_step(method, vit, inputs)
        assert_descent(after, inputs, leaves, LR)
        torch.testing.assert_close(after["metric/loss"], entropy.detach())
        torch.testing.assert_close(after[f"new/tensor/{RUNNING}"] * unit, running.detach(), rtol=1e-9, atol=1e-12)
        inputs = put_back(inputs, after)


def test_the_own_bias_is_read_by_the_own_answer_alone(vit: PatchViT) -> None:
    method = make_method("feddbe", {"optimizer": "sgd", "momentum": 0.9})
    inputs = make_inputs(method, vit, LR)
    after = run_step(method, vit, inputs)
    assert not after[f"new/slot/momentum_buffer/{RUNNING}"].any()
    assert after[f"new/slot/momentum_buffer/{OWN_BIAS}"].any()


def test_the_first_rounds_mean_is_the_consensus_from_then_on(vit: PatchViT) -> None:
    rule = make_method("feddbe").server_rule(vit)
    state = ServerState({"x": np.zeros(2), RUNNING: np.zeros(3), CONSENSUS: np.zeros(3), AGREED: np.zeros(1)})
    for number, means in enumerate(([1.0, 4.0], [7.0, 7.0]), 1):
        sizes = {"a": 10, "b": 20}
        uploads = [
            upload(device, images, {"x": np.ones(2), RUNNING: np.full(3, mean)})
            for (device, images), mean in zip(sizes.items(), means, strict=True)
        ]
        state, _ = rule.close(state, uploads, make_context(vit, number))
        np.testing.assert_allclose(state.tensors["x"], number)
        np.testing.assert_allclose(state.tensors[CONSENSUS], 3.0, rtol=1e-6)  # (10 * 1 + 20 * 4) / 30
        np.testing.assert_array_equal(state.tensors[RUNNING], 0)
        np.testing.assert_array_equal(state.tensors[AGREED], 1)


def test_the_pull_moves_the_features_mean_to_the_consensus(vit: PatchViT) -> None:
    apart = {}
    for kappa in (0.0, 20.0):
        method = make_method("feddbe", {"kappa": kappa, "mean_momentum": 1.0})
        inputs = make_inputs(method, vit, LR) | {f"tensor/{AGREED}": torch.ones(1, dtype=torch.float64)}
        for _ in range(20):
            inputs = put_back(inputs, run_step(method, vit, inputs))
        gap = inputs[f"tensor/{RUNNING}"] - inputs[f"tensor/{CONSENSUS}"]
        apart[kappa] = float(gap.square().sum())
    assert apart[20.0] < 0.3 * apart[0.0]
