"""FedCP: a step beside the paper's policy and loss, its MMD beside the Gaussian one, and the server's heads."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm, linear, normalize

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, ServerState
from fedvit.methods.fedcp import BANDWIDTHS, OWN_HEAD, POLICY, POLICY_NORM
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.method_steps import assert_descent, make_context, make_inputs, make_leaves, read, run_step
from tests.support.quadratic import Inputs
from tests.support.uploads import upload

LR, LAM = 0.05, 0.6
MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2}


def make_vit() -> PatchViT:
    return build_model(make_method("fedcp"), SMALL, 3, seed=0, options=MODEL).double()


def split(features: Tensor, tensors: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Own and shared features, with a softmax over pairs."""
    hidden = linear(
        features * normalize(rows.sum(dim=0), dim=0), tensors[f"{POLICY}.weight"], tensors[f"{POLICY}.bias"]
    )
    norm = layer_norm(hidden, hidden.shape[1:], tensors[f"{POLICY_NORM}.weight"], tensors[f"{POLICY_NORM}.bias"])
    shares = torch.softmax(torch.relu(norm).view(len(features), 2, -1), dim=1)
    return features * shares[:, 0], features * shares[:, 1]


def answer(features: tuple[Tensor, Tensor], tensors: Inputs) -> Tensor:
    own, shared = features
    return linear(own, tensors[f"{OWN_HEAD}.weight"], tensors[f"{OWN_HEAD}.bias"]) + linear(
        shared, tensors["head.weight"], tensors["head.bias"]
    )


def test_a_step_minimises_the_papers_loss() -> None:
    method, vit = make_method("fedcp", {"lam": LAM}), make_vit()
    inputs = make_inputs(method, vit, LR)
    leaves = make_leaves(inputs, method.names_with(vit, Role.SHARED, Role.GENERATED))
    tensors = {**leaves, "head.weight": inputs["tensor/head.weight"], "head.bias": inputs["tensor/head.bias"]}
    real = inputs["batch/weight"] > 0
    features, _ = read(vit, tensors, inputs)
    first, _ = read(vit, {**tensors, **{n: inputs[f"anchor/{n}"] for n in leaves if f"anchor/{n}" in inputs}}, inputs)
    logits = answer(split(features, leaves, inputs[f"anchor/{OWN_HEAD}.weight"]), tensors)
    entropy = cross_entropy(logits[real], inputs["batch/labels"][real])
    gap = features[real].mean(dim=0) - first[real].mean(dim=0)
    (entropy + LAM * sum(2 - 2 * torch.exp(-gap.square().sum() / (2 * a)) for a in BANDWIDTHS)).backward()
    after = run_step(method, vit, inputs)
    assert_descent(after, inputs, leaves, LR)
    torch.testing.assert_close(after["metric/loss"], entropy.detach())


def test_the_two_means_of_near_features_are_as_far_apart_as_the_features() -> None:
    draw = torch.Generator().manual_seed(0)
    one, other = (0.1 * torch.randn(20, 8, generator=draw, dtype=torch.float64) + shift for shift in (0.0, 0.2))

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        return sum(
            (torch.exp(-torch.cdist(left, right).square() / (2 * a)).mean() for a in BANDWIDTHS), torch.zeros(())
        )

    gaussian = kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)
    means = kernel(one[:1] * 0, one[:1] * 0) * 2 - 2 * kernel(one.mean(dim=0)[None], other.mean(dim=0)[None])
    torch.testing.assert_close(means, gaussian, rtol=0.03, atol=0)


def test_both_heads_answer_with_the_policy_of_the_newest_own_head() -> None:
    method, vit = make_method("fedcp"), make_vit()
    tensors = {n: v + 0.1 * torch.randn(v.shape).double() for n, v in method.tensors(vit).items()}
    images = torch.randn(2, 4, 192, dtype=torch.float64)
    got = method.predict(vit, tensors, Images(images, None), None)
    features, _ = read(vit, tensors, {"batch/patches": images})
    torch.testing.assert_close(got, answer(split(features, tensors, tensors[f"{OWN_HEAD}.weight"]), tensors))
    assert method.generic_logits(vit, tensors, Images(images, None)) is None


def test_the_shared_head_goes_half_of_the_way_to_the_mean_of_the_own_ones() -> None:
    rule = make_method("fedcp").server_rule(make_vit())
    state = ServerState({"body": np.zeros(2), "head.weight": np.full(2, 8.0), "head.bias": np.full(2, 8.0)})
    own = {"a": 8.0, "b": 8.0}  # the shared head is a new device's own
    shared = 8.0
    for number in (1, 2):
        uploads = []
        for device, step, images in (("a", 1.0, 10), ("b", -2.0, 30)):
            deltas = {f"{OWN_HEAD}.{part}": np.full(2, step) for part in ("weight", "bias")}
            uploads.append(upload(device, images, {"body": np.full(2, step), **deltas}))
            own[device] += step
        state, _ = rule.close(state, uploads, make_context(make_vit(), number))
        shared = 0.5 * shared + 0.5 * (0.25 * own["a"] + 0.75 * own["b"])
        np.testing.assert_allclose(state.tensors["body"], -1.25 * number)
        for part in ("weight", "bias"):
            np.testing.assert_allclose(state.tensors[f"head.{part}"], shared, rtol=1e-6)
            for device, value in own.items():
                np.testing.assert_allclose(rule.generate(state, device, 0)[f"{OWN_HEAD}.{part}"], value)
