"""FedPAC: the server's mixes beside the paper's problem, and what a device trains."""

from itertools import product

import numpy as np
import pytest

from fedvit.methods.base import ServerState
from fedvit.methods.class_sums import KNOWN, PROTOTYPES, SUMS, find_unit
from fedvit.methods.fedpac import FedPAC, MixedHeads, mix_heads
from fedvit.program import Role
from fedvit.tensors import Array
from tests.support.method_steps import make_context
from tests.support.quadratic import small
from tests.support.uploads import upload

CLASSES, WIDTH = 3, 8


def cost(shares: Array, own: int, means: Array, variances: Array) -> float:
    """The paper's estimate of the error of a mix, term by term."""
    off = sum(share * (means[own] - mean) for share, mean in zip(shares, means, strict=True))
    return float((shares**2 * variances).sum() + np.square(off).sum())


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_no_mix_on_a_grid_costs_less(spread: float) -> None:
    draw = np.random.default_rng(0)
    means, variances = spread * draw.normal(size=(3, 5)), draw.uniform(0.1, 1.0, size=3)
    grid = [np.array([a, b, 50 - a - b]) / 50 for a, b in product(range(51), repeat=2) if a + b <= 50]
    for own, shares in enumerate(mix_heads(means, variances)):
        assert shares.min() >= 0
        assert shares.sum() == pytest.approx(1)
        best = min(cost(other, own, means, variances) for other in grid)
        assert cost(shares, own, means, variances) <= best + 1e-4
    if not spread:  # the devices' features agree, so that the least variance is left
        np.testing.assert_allclose(mix_heads(means, variances)[0], 1 / variances / (1 / variances).sum(), atol=1e-3)


def test_devices_mix_the_heads_of_those_with_like_features() -> None:
    """Devices a and b have the same class means and c others; the statistics are found from single features."""
    draw = np.random.default_rng(1)
    centres = {"a": draw.normal(size=(CLASSES, WIDTH)), "c": draw.normal(size=(CLASSES, WIDTH))}
    centres["b"] = centres["a"]
    heads = {"a": 1.0, "b": 2.0, "c": 3.0}
    vit = small(CLASSES)
    rule = FedPAC().server_rule(vit)
    assert isinstance(rule, MixedHeads)
    uploads, means, variances = [], [], []
    for device in "abc":
        labels = np.arange(40) % CLASSES
        features = centres[device][labels] + 0.3 * draw.normal(size=(40, WIDTH))
        rows = np.concatenate([features, np.square(features).mean(axis=1, keepdims=True), np.ones((40, 1))], axis=1)
        sums = np.stack([rows[labels == label].sum(axis=0) for label in range(CLASSES)])
        deltas = {name: np.full(value.shape, heads[device]) for name, value in rule.first.items()}
        uploads.append(upload(device, 40, {SUMS: sums / (40 * find_unit(WIDTH)), "body": np.ones(2), **deltas}))
        shares = [(labels == label).mean() * features[labels == label].mean(axis=0) for label in range(CLASSES)]
        means.append(np.concatenate(shares))
        variances.append((np.square(features).sum(axis=1).mean() - np.square(means[-1]).sum()) / 40)
    tensors = {SUMS: np.zeros((CLASSES, WIDTH + 2)), PROTOTYPES: np.zeros((CLASSES, WIDTH)), KNOWN: np.zeros(CLASSES)}
    state = ServerState({**tensors, "body": np.zeros(2)}, rule.begin(0))
    after, _ = rule.close(state, uploads, make_context(vit))
    np.testing.assert_allclose(after.tensors["body"], 1)
    mixes = mix_heads(np.stack(means), np.array(variances))
    for own, device in enumerate("abc"):
        for name, start in rule.first.items():
            want = start.numpy() + mixes[own] @ np.array([1.0, 2.0, 3.0])
            np.testing.assert_allclose(rule.generate(after, device, 0)[name], want, rtol=1e-4)
    assert max(mixes[0][2], mixes[1][2]) < 0.02
    assert mixes[2][2] > 0.9
    assert 0.3 < mixes[0][0] < 0.7
    first = rule.generate(after, "never asked", 0)
    np.testing.assert_array_equal(first["head.weight"], rule.first["head.weight"])


def test_a_device_trains_the_head_first_and_then_the_body() -> None:
    vit, method = small(CLASSES), FedPAC(head_epochs=2, epochs=3)
    head, body, sums = method.phases(vit)
    assert (head.groups, head.epochs) == (("head",), 2)
    assert (body.groups, body.epochs) == (("body",), 3)
    assert (sums.groups, sums.epochs) == (("sums",), 1)
    assert method.names_with(vit, Role.GENERATED) == ["head.weight", "head.bias"]
    assert set(method.names_in(vit, "body")) == set(vit.tensors()) - {"head.weight", "head.bias"}
