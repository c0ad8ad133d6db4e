"""MOON: a step beside the paper's loss, what the server keeps of each device, and the effect of the contrast."""

import numpy as np
import torch
from torch import Tensor

from fedvit.methods import make_method
from fedvit.methods.base import Images, ServerState
from fedvit.methods.class_sums import read_features
from fedvit.methods.moon import PREVIOUS, contrast_features
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models.vit import PatchViT
from tests.support.method_steps import make_context
from tests.support.quadratic import BATCH, Inputs, in_double, small
from tests.support.steps import whole
from tests.support.uploads import upload

LR, MU, TAU = 0.1, 0.8, 0.5


def inputs_of(vit: PatchViT, options: dict[str, float]) -> Inputs:
    method = make_method("moon", options)
    (phase,) = method.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    return inputs | {"hyper/lr": torch.tensor(LR, dtype=torch.float64)}


def step(vit: PatchViT, options: dict[str, float], inputs: Inputs) -> Inputs:
    method = make_method("moon", options)
    return whole_step(method, vit, whole(method.phases(vit)[0]))(inputs)


def find_features(vit: PatchViT, inputs: Inputs, prefix: str) -> Tensor:
    tensors = {name: inputs[f"{prefix}{name}"] for name in vit.tensors()}
    return read_features(vit, tensors, Images(inputs["batch/patches"], None))[0]


def test_a_step_minimises_the_papers_loss(vit: PatchViT) -> None:
    inputs = inputs_of(vit, {"mu": MU, "tau": TAU})
    after = step(vit, {"mu": MU, "tau": TAU}, inputs)
    leaves = {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in vit.tensors()}
    features, logits = read_features(vit, leaves, Images(inputs["batch/patches"], None))
    shared, last = (find_features(vit, inputs, prefix) for prefix in ("anchor/", f"tensor/{PREVIOUS}"))
    near, far = (torch.exp(torch.cosine_similarity(features, other) / TAU) for other in (shared, last))
    entropy = torch.nn.functional.cross_entropy(logits, inputs["batch/labels"], reduction="none")
    weight = inputs["batch/weight"]
    ((entropy - MU * torch.log(near / (near + far))) * weight).sum().div(weight.sum()).backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        want = inputs[f"tensor/{name}"] - LR * leaf.grad
        torch.testing.assert_close(after[f"new/tensor/{name}"], want, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(after["metric/loss"], (entropy * weight).sum().detach() / weight.sum())


def test_features_without_a_direction_pull_nothing() -> None:
    """An image for which every number behind a last ReLU is 0 must not end the training."""
    features, shared, last = torch.zeros(2, 4), torch.ones(2, 4), torch.eye(2, 4)
    features[1] = 1
    features.requires_grad_()
    contrast = contrast_features(features, shared, last, TAU)
    contrast.sum().backward()
    assert features.grad is not None
    assert features.grad.isfinite().all()
    torch.testing.assert_close(contrast[0].detach(), torch.tensor(2.0).log())


def test_before_its_first_answer_a_device_trains_as_in_fedavg(vit: PatchViT) -> None:
    """The shared model is what it sent last, so that both cosines are the same."""
    inputs = inputs_of(vit, {})
    inputs |= {f"tensor/{name}": inputs[f"anchor/{name}"] for name in vit.tensors()}
    inputs |= {f"tensor/{PREVIOUS}{name}": inputs[f"anchor/{name}"] for name in vit.tensors()}
    with_contrast, without = step(vit, {"mu": 5.0}, inputs), step(vit, {"mu": 0.0}, inputs)
    for name in vit.tensors():
        got, want = with_contrast[f"new/tensor/{name}"], without[f"new/tensor/{name}"]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_the_contrast_moves_features_to_the_shared_models(vit: PatchViT) -> None:
    ahead = {}
    for mu in (0.0, 5.0):
        inputs = inputs_of(vit, {"mu": mu})
        for _ in range(20):
            after = step(vit, {"mu": mu}, inputs)
            inputs |= {name.removeprefix("new/"): value for name, value in after.items() if name.startswith("new/")}
        own, shared, last = (find_features(vit, inputs, kind) for kind in ("tensor/", "anchor/", f"tensor/{PREVIOUS}"))
        gain = torch.cosine_similarity(own, shared) - torch.cosine_similarity(own, last)
        ahead[mu] = float(gain[inputs["batch/weight"] > 0].mean())
    assert ahead[5.0] > ahead[0.0] + 0.01


def test_the_server_keeps_what_each_device_sent_last() -> None:
    rule = make_method("moon").server_rule(small())
    state, last = ServerState({"x": np.zeros(2)}), dict[str, np.ndarray]()
    for number, cohort in enumerate((("a", "b"), ("b", "c"), ("a",)), 1):
        context = make_context(small(), number)
        updates = {device: np.array([number, ord(device)], float) for device in cohort}
        last |= {device: state.tensors["x"] + update for device, update in updates.items()}
        mean = state.tensors["x"] + sum(updates.values()) / len(updates)
        state, _ = rule.close(state, [upload(device, 4, {"x": update}) for device, update in updates.items()], context)
        np.testing.assert_allclose(state.tensors["x"], mean)
        for device in "abcd":
            want = last.get(device, state.tensors["x"])
            np.testing.assert_allclose(rule.generate(state, device, 0)[f"{PREVIOUS}x"], want)
