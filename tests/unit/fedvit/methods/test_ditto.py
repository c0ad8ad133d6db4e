"""Ditto's two phases, in float64, beside FedAvg's step."""

import torch

from fedvit.methods.base import Images
from fedvit.methods.ditto import Ditto
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.step import example_inputs, whole_step
from fedvit.methods.twins import TWIN, name_twins
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.quadratic import BATCH, in_double
from tests.support.steps import whole

LR, SPRING = 0.1, 0.7


def test_the_personal_model_is_pulled_to_the_shared_one_of_the_rounds_start(vit: PatchViT) -> None:
    method, fedavg = Ditto(lr=LR, lam=SPRING), FedAvg(lr=LR)
    _, own = method.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(own)))
    inputs |= {"hyper/lr": torch.tensor(LR, dtype=torch.float64)}
    after = whole_step(method, vit, whole(own))(inputs)
    at_twin = {**inputs, **{f"tensor/{name}": inputs[f"tensor/{TWIN}{name}"] for name in vit.tensors()}}
    plain = whole_step(fedavg, vit, whole(fedavg.phases(vit)[0]))(at_twin)
    for name in vit.tensors():
        pull = inputs[f"tensor/{TWIN}{name}"] - inputs[f"anchor/{name}"]
        want = plain[f"new/tensor/{name}"] - LR * SPRING * pull
        torch.testing.assert_close(after[f"new/tensor/{TWIN}{name}"], want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after["metric/loss"], plain["metric/loss"])


def test_the_shared_model_learns_as_in_fedavg_and_the_personal_one_answers(vit: PatchViT) -> None:
    method = Ditto(own_epochs=3)
    shared, own = method.phases(vit)
    assert (shared.groups, own.groups, own.anchors, own.epochs) == (("model",), ("twin",), ("model",), 3)
    groups = method.groups(vit)
    assert groups["twin"] == (Role.LOCAL, list(name_twins(vit.tensors())))
    assert groups["model"] == (Role.SHARED, list(vit.tensors()))
    images = torch.randn(2, 4, 192, dtype=torch.float64)
    moved = {f"{TWIN}{name}": value + 0.1 for name, value in vit.tensors().items()}
    answer = method.predict(vit, {**vit.tensors(), **moved}, Images(images, None), None)
    want = FedAvg().forward(vit, {name: value + 0.1 for name, value in vit.tensors().items()}, Images(images, None))
    torch.testing.assert_close(answer, want.logits)
