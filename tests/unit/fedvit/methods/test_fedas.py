"""FedAS: the alignment and the measurements beside the paper's equations, and the server's weights."""

import numpy as np
import torch
from torch.nn.functional import cross_entropy, mse_loss

from fedvit.methods import make_method
from fedvit.methods.base import ServerState
from fedvit.methods.fedas import ALIGN, FISHER, MEASURE, OWN_PROTOTYPES, TOTAL
from fedvit.models.vit import PatchViT
from tests.support.method_steps import assert_descent, make_context, make_inputs, make_leaves, read, run_step
from tests.support.quadratic import after as put_back
from tests.support.quadratic import small
from tests.support.uploads import upload

LR = 0.1


def test_the_body_is_aligned_with_the_own_prototypes_that_there_are(vit: PatchViT) -> None:
    method = make_method("fedas", {"align_lr": LR, "momentum": 0.9})  # momentum is of the training alone
    inputs = make_inputs(method, vit, 0.1 * LR, ALIGN)  # late in a schedule
    inputs[f"tensor/{OWN_PROTOTYPES}"][:, -1] = torch.tensor([1.0, 0.0, 1.0])
    leaves = make_leaves(inputs, method.names_in(vit, "body"))
    head = {name: inputs[f"tensor/{name}"] for name in ("head.weight", "head.bias")}
    features, logits = read(vit, {**leaves, **head}, inputs)
    real, labels = inputs["batch/weight"] > 0, inputs["batch/labels"]
    assert {0, 2} <= set(labels[real].tolist())
    loss = torch.zeros((), dtype=torch.float64)
    for label in (0, 2):
        chosen = features[real & (labels == label)]
        loss = loss + mse_loss(chosen, inputs[f"tensor/{OWN_PROTOTYPES}"][label, :-1].expand_as(chosen))
    loss.backward()
    after = run_step(method, vit, inputs, ALIGN)
    assert_descent(after, inputs, leaves, LR)
    torch.testing.assert_close(after["metric/loss"], cross_entropy(logits[real], labels[real]).detach())


def test_a_device_without_prototypes_keeps_the_body_as_it_came(vit: PatchViT) -> None:
    method = make_method("fedas")
    inputs = make_inputs(method, vit, LR, ALIGN)
    inputs[f"tensor/{OWN_PROTOTYPES}"].zero_()
    after = run_step(method, vit, inputs, ALIGN)
    for name in method.names_in(vit, "body"):
        torch.testing.assert_close(after[f"new/tensor/{name}"], inputs[f"tensor/{name}"], rtol=0, atol=0)


def test_alignment_brings_features_to_the_prototypes(vit: PatchViT) -> None:
    method, apart = make_method("fedas", {"align_lr": LR}), []
    inputs = make_inputs(method, vit, LR, ALIGN)
    inputs[f"tensor/{OWN_PROTOTYPES}"][:, -1] = 1
    for _ in range(30):
        features, _ = read(vit, {n: inputs[f"tensor/{n}"] for n in vit.tensors()}, inputs)
        gap = features - inputs[f"tensor/{OWN_PROTOTYPES}"][inputs["batch/labels"], :-1]
        apart.append(float(gap[inputs["batch/weight"] > 0].square().mean()))
        inputs = put_back(inputs, run_step(method, vit, inputs, ALIGN))
    assert apart[-1] < 0.7 * apart[0]


def test_prototypes_and_the_trace_are_those_of_all_batches(vit: PatchViT) -> None:
    """Two batches without the last class, which keeps no prototype."""
    method, trace, seen, labels_seen = make_method("fedas"), 0.0, [], []
    inputs = make_inputs(method, vit, LR, MEASURE)
    inputs |= {f"slot/{TOTAL}/{name}": torch.zeros_like(inputs[f"tensor/{name}"]) for name in (FISHER, OWN_PROTOTYPES)}
    for seed in (1, 2):
        batch = {n: v for n, v in make_inputs(method, vit, LR, MEASURE, seed=seed).items() if n.startswith("batch/")}
        inputs |= {**batch, "batch/labels": batch["batch/labels"] % 2}
        leaves = make_leaves(inputs, list(vit.tensors()))
        features, logits = read(vit, leaves, inputs)
        real, labels = inputs["batch/weight"] > 0, inputs["batch/labels"]
        cross_entropy(logits[real], labels[real]).backward()
        trace += sum(float(leaf.grad.square().sum()) for leaf in leaves.values() if leaf.grad is not None)
        seen.append(features[real].detach())
        labels_seen.append(labels[real])
        after = run_step(method, vit, inputs, MEASURE)
        inputs = put_back(inputs, after)
    features, labels = torch.cat(seen), torch.cat(labels_seen)
    torch.testing.assert_close(after[f"new/tensor/{FISHER}"], torch.tensor([trace], dtype=torch.float64))
    got = after[f"new/tensor/{OWN_PROTOTYPES}"]
    for label in (0, 1):
        torch.testing.assert_close(got[label, :-1], features[labels == label].mean(dim=0))
    torch.testing.assert_close(got[:, -1], torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))


def test_devices_weigh_by_their_trace_and_the_server_keeps_prototypes() -> None:
    vit = small()
    rule, shape = make_method("fedas").server_rule(vit), (3, vit.width + 1)
    state = ServerState({"body": np.zeros(2, np.float32), FISHER: np.zeros(1, np.float32)})
    np.testing.assert_array_equal(rule.generate(state, "a", 0)[OWN_PROTOTYPES], np.zeros(shape))
    for number in (1, 2):
        uploads = [
            upload(
                device,
                images,
                {"body": np.full(2, step), FISHER: np.array([trace]), OWN_PROTOTYPES: np.full(shape, step, np.float32)},
            )
            for device, images, step, trace in (("a", 90, 1.0, 2.0), ("b", 10, 5.0, 6.0))
        ]
        state, _ = rule.close(state, uploads, make_context(vit, number))
        np.testing.assert_allclose(state.tensors["body"], 4.0 * number)  # (2 * 1 + 6 * 5) / 8
        np.testing.assert_array_equal(state.tensors[FISHER], 0)
        np.testing.assert_allclose(rule.generate(state, "b", 0)[OWN_PROTOTYPES], 5.0 * number)
    claims = [upload(device, 1, {"body": np.full(2, step), FISHER: np.array([trace]), OWN_PROTOTYPES: np.zeros(shape)})
              for device, step, trace in (("a", 0.0, 2.0), ("b", 0.0, 2.0), ("c", 1.0, 1e38))]  # fmt: skip
    after, _ = rule.close(state, claims, make_context(vit))
    np.testing.assert_allclose(after.tensors["body"], state.tensors["body"] + 20 / 24, rtol=1e-6)
    flat = [upload(device, 1, {"body": np.full(2, step), FISHER: np.zeros(1), OWN_PROTOTYPES: np.zeros(shape)})
            for device, step in (("a", 1.0), ("b", 5.0))]  # fmt: skip
    after, _ = rule.close(state, flat, make_context(vit))
    np.testing.assert_allclose(after.tensors["body"], state.tensors["body"] + 3.0)
