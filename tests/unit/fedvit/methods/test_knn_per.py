"""The vote of the nearest stored images, and its mixture with the model's answer."""

import math

import pytest
import torch
from torch import Tensor

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Forward, Gathered, Images
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.knn_per import KnnPer, mixture
from fedvit.methods.step import whole_step
from fedvit.models import SMALL, build_vit
from fedvit.program import Gather

OPTIONS = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2}


def store(points: list[list[float]], labels: list[int], weight: list[float] | None = None) -> Gathered:
    values = {"features": torch.tensor(points, dtype=torch.float64)}
    return Gathered(values, torch.tensor(labels), torch.tensor(weight or [1.0] * len(labels), dtype=torch.float64))


def ask(points: list[list[float]], logits: list[list[float]]) -> Forward:
    return Forward(torch.tensor(logits, dtype=torch.float64), {"features": torch.tensor(points, dtype=torch.float64)})


def vote(points: list[list[float]], stored: Gathered, neighbours: int, scale: float = 1.0, classes: int = 3) -> Tensor:
    """Of the neighbours alone."""
    forward = ask(points, [[0.0] * classes] * len(points))
    return mixture(forward, stored, weight=1.0, neighbours=neighbours, scale=scale)


def test_votes_by_hand() -> None:
    # a mixture by hand: Width 2; stored (0, 0) of class 0, (2, 0) of class 1, (9, 9) of class 2; asked at (0, 0)
    # with k = 2: d2 = 0 and 4, weights 1 and exp(-4 / 2) = e^-2. The model says 1/2 for classes 1 and 2; lambda =
    # 0.6
    stored = store([[0, 0], [2, 0], [9, 9]], [0, 1, 2])
    found = mixture(ask([[0, 0]], [[-1e9, 0, 0]]), stored, weight=0.6, neighbours=2, scale=1.0)
    near, far = 1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2))
    torch.testing.assert_close(found, torch.tensor([[0.6 * near, 0.6 * far + 0.2, 0.2]], dtype=torch.float64))
    # the scale divides distances: scale 4: exp(-4 / (2 * 4)) = e^-0.5
    found = vote([[0, 0]], store([[0, 0], [2, 0]], [0, 1]), 2, scale=4.0)
    assert float(found[0, 1] / found[0, 0]) == pytest.approx(math.exp(-0.5))
    found = vote([[0, 0]], store([[0, 1], [1, 0], [0, -1]], [2, 2, 0]), 3)
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 0, 2 / 3]], dtype=torch.float64))


def test_a_stored_point_finds_itself() -> None:
    """k = 1: its own label, with certainty, for each of 50 random points."""
    draw = torch.Generator().manual_seed(0)
    points, labels = torch.randn(50, 8, generator=draw), torch.randint(0, 3, (50,), generator=draw)
    found = vote(points.tolist(), store(points.tolist(), labels.tolist()), 1)
    assert torch.equal(found.argmax(dim=1), labels)
    torch.testing.assert_close(found.amax(dim=1), torch.ones(50, dtype=torch.float64))


def test_votes_of_empty_and_far_places() -> None:
    # an empty place is no neighbour: It lies where is asked, and would win; with fewer images than k it is chosen,
    # and has no voice
    stored = store([[0, 0], [0, 0], [3, 4]], [1, 1, 2], [0.0, 0.0, 1.0])
    for neighbours in (1, 2, 3, 10):
        torch.testing.assert_close(vote([[0, 0]], stored, neighbours), torch.tensor([[0.0, 0, 1]], dtype=torch.float64))
    # far neighbours still vote: d2 / D = 5e9 would be exp(...) = 0 for all, and 0 / 0 their shares
    found = vote([[1e5, 0]], store([[0, 0], [1, 0]], [0, 1]), 2)
    assert torch.isfinite(found).all()
    assert int(found.argmax()) == 1
    stored = store([[0, 0]], [2], [0.0])
    found = mixture(ask([[0, 0]], [[0, 1, 2]]), stored, weight=0.9, neighbours=1, scale=1.0)
    torch.testing.assert_close(found, torch.softmax(torch.tensor([[0.0, 1, 2]], dtype=torch.float64), dim=1))


def test_answers_are_probabilities_whatever_the_order_of_the_store() -> None:
    draw = torch.Generator().manual_seed(0)
    points, labels = torch.randn(30, 4, generator=draw), torch.randint(0, 3, (30,), generator=draw)
    order = torch.randperm(30, generator=draw)
    forward = ask(torch.randn(5, 4, generator=draw).tolist(), torch.randn(5, 3, generator=draw).tolist())
    one, other = (
        mixture(forward, store(points[at].tolist(), labels[at].tolist()), weight=0.5, neighbours=7, scale=1.0)
        for at in (torch.arange(30), order)
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    torch.testing.assert_close(one.sum(dim=1), torch.ones(5, dtype=torch.float64))


def test_without_weight_it_is_fedavg() -> None:
    """lambda = 0: the same class for every image as FedAvg's logits say, and softmax of them."""
    method = make_method("knn_per", {"knn_weight": 0.0, "capacity": 6})
    vit = build_model(method, SMALL, 4, seed=0, options=OPTIONS)
    draw = torch.Generator().manual_seed(0)
    images = Images(torch.randn(9, 4, 192, generator=draw), None)
    stored = Gathered({"features": torch.randn(6, 8, generator=draw)}, torch.arange(6) % 4, torch.ones(6))
    logits = FedAvg().predict(vit, vit.tensors(), images, None)
    found = method.predict(vit, vit.tensors(), images, stored)
    torch.testing.assert_close(found, torch.softmax(logits, dim=1))
    assert torch.equal(found.argmax(dim=1), logits.argmax(dim=1))


def test_it_trains_as_fedavg_does() -> None:
    """The same groups, phases and step, and nothing is collected on the way."""
    method, plain = KnnPer(lr=0.5), FedAvg(lr=0.5)
    vit = build_vit(SMALL, 4, seed=0, options=OPTIONS)
    assert method.groups(vit) == plain.groups(vit)
    assert method.phases(vit) == plain.phases(vit)
    inputs = {f"tensor/{name}": value for name, value in vit.tensors().items()}
    inputs |= {"batch/patches": torch.randn(3, 4, 192, generator=torch.Generator().manual_seed(0))}
    inputs |= {"batch/labels": torch.tensor([0, 1, 3]), "batch/weight": torch.ones(3)}
    inputs |= {"hyper/lr": torch.tensor(0.5), "hyper/step": torch.tensor(1.0)}
    ours, theirs = (whole_step(each, vit, each.phases(vit)[0])(inputs) for each in (method, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_a_device_remembers() -> None:
    """The class token of up to `capacity` training images, before the last norm."""
    method = KnnPer(capacity=12)
    vit = build_vit(SMALL, 4, seed=0, options=OPTIONS)
    gather = Gather(graph="features", output="features", shape=(8,), capacity=12)
    assert method.evaluate(vit).gather == gather
    images = Images(torch.randn(3, 4, 192, generator=torch.Generator().manual_seed(0)), None)
    forward = method.forward(vit, vit.tensors(), images)
    tensors, features = vit.tensors(), forward.collected["features"]
    normed = torch.nn.functional.layer_norm(features, (8,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)
    torch.testing.assert_close(normed @ tensors["head.weight"].T + tensors["head.bias"], forward.logits)
