"""FedALA: steps of the shares beside the paper's equations, what the server keeps, and the effect of the mix."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedvit.methods import make_method
from fedvit.methods.base import ServerState
from fedvit.methods.fedala import HEAD_TENSORS, LAST, MIX, SHARE
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.method_steps import make_context, make_inputs, read, run_step
from tests.support.quadratic import Inputs
from tests.support.quadratic import after as put_back
from tests.support.uploads import upload

ETA = 0.8


def find_loss(vit: PatchViT, inputs: Inputs, head: Inputs) -> Tensor:
    model = {name: inputs[f"tensor/{name}"] for name in vit.tensors()}
    _, logits = read(vit, {**model, **head}, inputs)
    real = inputs["batch/weight"] > 0
    return cross_entropy(logits[real], inputs["batch/labels"][real])


def test_shares_descend_within_zero_and_one_and_mix_the_head(vit: PatchViT) -> None:
    """Three steps: shares begin at ones, some of them are clipped, and the head follows from the newest ones."""
    method = make_method("fedala", {"mix_lr": ETA})
    inputs = make_inputs(method, vit, 0.1 * ETA, MIX)  # late in a schedule
    last = {name: inputs[f"tensor/{LAST}{name}"] for name in HEAD_TENSORS}
    shared = {name: inputs[f"anchor/{name}"] for name in HEAD_TENSORS}
    shares = {name: torch.ones_like(value) for name, value in last.items()}
    inputs |= {f"tensor/{SHARE}{name}": value for name, value in shares.items()}
    for _ in range(3):
        heads = {n: (last[n] + (shared[n] - last[n]) * shares[n]).requires_grad_() for n in HEAD_TENSORS}
        loss = find_loss(vit, inputs, heads)
        loss.backward()
        for name, head in heads.items():
            assert head.grad is not None
            shares[name] = (shares[name] - ETA * head.grad * (shared[name] - last[name])).clamp(0, 1)
        after = run_step(method, vit, inputs, MIX)
        torch.testing.assert_close(after["metric/loss"], loss.detach())
        for name in HEAD_TENSORS:
            torch.testing.assert_close(after[f"new/tensor/{SHARE}{name}"], shares[name], rtol=1e-9, atol=1e-12)
            mixed = last[name] + (shared[name] - last[name]) * shares[name]
            torch.testing.assert_close(after[f"new/tensor/{name}"], mixed, rtol=1e-9, atol=1e-12)
        inputs = put_back(inputs, after)
    assert min(float(value.min()) for value in shares.values()) < 1


def test_a_device_mixes_before_it_trains_and_before_a_test(vit: PatchViT) -> None:
    method = make_method("fedala", {"mix_epochs": 2, "epochs": 3})
    mix, train = method.phases(vit)
    assert (mix.groups, mix.epochs, mix.anchors) == (("share", "head"), 2, ("head",))
    assert (train.groups, train.epochs) == (("head", "body"), 3)
    assert method.evaluate(vit).adapt == (mix,)
    assert method.names_with(vit, Role.SHARED) == list(vit.tensors())


def test_where_the_shared_head_is_bad_a_device_takes_its_own(vit: PatchViT) -> None:
    """The own head is trained on the batch, the shared one is its opposite."""
    method = make_method("fedala")
    inputs = make_inputs(method, vit, 1.0, MIX)
    good = {name: torch.zeros_like(inputs[f"tensor/{name}"]).requires_grad_() for name in HEAD_TENSORS}
    descent = torch.optim.SGD(good.values(), lr=0.3)
    for _ in range(100):
        descent.zero_grad()
        find_loss(vit, inputs, good).backward()
        descent.step()
    for name, value in good.items():
        inputs |= {f"tensor/{LAST}{name}": value.detach(), f"anchor/{name}": -value.detach()}
        inputs |= {f"tensor/{SHARE}{name}": torch.ones_like(value)}
    before = find_loss(vit, inputs, {name: inputs[f"anchor/{name}"] for name in HEAD_TENSORS})
    for _ in range(30):
        inputs = put_back(inputs, run_step(method, vit, inputs, MIX))
    after = find_loss(vit, inputs, {name: inputs[f"tensor/{name}"] for name in HEAD_TENSORS})
    assert after < 0.5 * before
    assert inputs[f"tensor/{SHARE}head.weight"].mean() < 0.8


def test_the_server_keeps_the_head_and_the_shares_of_each_device(vit: PatchViT) -> None:
    rule = make_method("fedala").server_rule(vit)
    state = ServerState({name: np.zeros(2, np.float32) for name in ("body", *HEAD_TENSORS)})
    fresh = rule.generate(state, "a", 0)
    for name in HEAD_TENSORS:
        np.testing.assert_array_equal(fresh[f"{LAST}{name}"], state.tensors[name])
        np.testing.assert_array_equal(fresh[f"{SHARE}{name}"], 1)
    for number in (1, 2):
        uploads = []
        for device, step in (("a", 1.0), ("b", 3.0)):
            deltas = {name: np.full(2, step) for name in ("body", *HEAD_TENSORS)}
            deltas |= {f"{SHARE}{name}": np.full(2, -0.3 * step) for name in HEAD_TENSORS}
            uploads.append(upload(device, 10, deltas))
        state, _ = rule.close(state, uploads, make_context(vit, number))
        np.testing.assert_allclose(state.tensors["body"], 2 * number)
        for device, step in (("a", 1.0), ("b", 3.0)):
            made = rule.generate(state, device, 0)
            for name in HEAD_TENSORS:
                np.testing.assert_allclose(made[f"{LAST}{name}"], 2 * (number - 1) + step)
                np.testing.assert_allclose(made[f"{SHARE}{name}"], max(0, 1 - 0.3 * step * number), atol=1e-6)
