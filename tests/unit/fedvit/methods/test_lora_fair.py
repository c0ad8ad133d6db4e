"""LoRA-FAIR: the correction beside the least squares that it solves."""

from collections.abc import Mapping

import numpy as np
import pytest

from fedvit.methods import make_method
from fedvit.methods.base import ServerState
from fedvit.methods.lora_fair import CorrectedMean
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.tensors import Array
from tests.support.method_steps import make_context
from tests.support.quadratic import small
from tests.support.uploads import upload

A, B = "blocks.0.attn.qkv.lora_q.a", "blocks.0.attn.qkv.lora_q.b"
IMAGES = {"a": 6, "b": 2, "none": 0}
SHARES = {"a": 0.75, "b": 0.25}


def factors(seed: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {A: draw.normal(size=(3, 7)), B: draw.normal(size=(5, 3)), "head.bias": draw.normal(size=4)}


def close(rule: WeightedMean, state: ServerState, own: Mapping[str, Mapping[str, Array]]) -> Mapping[str, Array]:
    """Every device of `own` ends with its own factors."""
    context = make_context(small())
    uploads = [
        upload(device, IMAGES[device], {name: value - state.tensors[name] for name, value in tensors.items()})
        for device, tensors in own.items()
    ]
    return rule.close(state, uploads, context)[0].tensors


@pytest.mark.parametrize("residual", [1e-6, 0.01, 10.0])
def test_the_second_factor_is_corrected_by_the_papers_least_squares(residual: float) -> None:
    state, own = ServerState(factors(0)), {device: factors(1 + index) for index, device in enumerate(IMAGES)}
    after = close(CorrectedMean(residual=residual), state, own)
    mean = {name: sum(SHARES[device] * own[device][name] for device in SHARES) for name in state.tensors}
    np.testing.assert_allclose(after[A], mean[A])
    np.testing.assert_allclose(after["head.bias"], mean["head.bias"])
    product = sum(SHARES[device] * own[device][B] @ own[device][A] for device in SHARES)
    strength = residual * np.trace(mean[A] @ mean[A].T) / 3
    # rows of D: |D A - (product - B A)|^2 + strength |D|^2 as one least squares
    left = np.concatenate([mean[A].T, np.sqrt(strength) * np.eye(3)])
    right = np.concatenate([(product - mean[B] @ mean[A]).T, np.zeros((3, 5))])
    correction = np.linalg.lstsq(left, right, rcond=None)[0].T
    np.testing.assert_allclose(after[B], mean[B] + correction, rtol=1e-6)


def test_products_are_nearer_than_those_of_the_means() -> None:
    state, own = ServerState(factors(0)), {device: factors(1 + index) for index, device in enumerate(IMAGES)}
    product = sum(SHARES[device] * own[device][B] @ own[device][A] for device in SHARES)
    rule = make_method("lora_fair", {"residual": 1e-6}).server_rule(small())
    assert isinstance(rule, WeightedMean)
    plain, fair = (close(one, state, own) for one in (WeightedMean(), rule))
    assert np.linalg.norm(fair[B] @ fair[A] - product) < 0.8 * np.linalg.norm(plain[B] @ plain[A] - product)


def test_equal_first_factors_need_no_correction() -> None:
    """With equal A, as in FFA-LoRA, the mean of B A is the mean of B times A."""
    state = ServerState(factors(0))
    own = {device: {**factors(1 + index), A: state.tensors[A]} for index, device in enumerate(IMAGES)}
    fair, plain = (close(rule, state, own) for rule in (CorrectedMean(residual=0.01), WeightedMean()))
    np.testing.assert_allclose(fair[B], plain[B], rtol=1e-9)
