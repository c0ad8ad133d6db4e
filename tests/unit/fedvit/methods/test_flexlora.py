"""FlexLoRA: factors of a device's own rank, the server's split beside a plain loop, and what small ranks gain."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from fedvit.errors import ConfigError, EmptyCohort
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, ServerState
from fedvit.methods.flexlora import FlexLora, SplitMean
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Array
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.quadratic import BATCH, Inputs, in_double, small
from tests.support.steps import whole
from tests.support.uploads import upload

MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2}
RANK = 4
ADDITION = "blocks.0.attn.qkv.lora_v"
IMAGES = {"a": 6, "b": 2, "c": 4, "none": 0}
RANKS = {"a": 1, "b": 4, "c": 2, "none": 4}


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return build_model(make_method("flexlora", {"rank": RANK}), SMALL, 3, seed=0, options=MODEL).double()


# --- the device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3])
def test_a_device_has_factors_of_its_own_rank_alone(vit: PatchViT, rank: int) -> None:
    largest, method = FlexLora(rank=RANK), FlexLora(rank=RANK, own_rank=rank)
    tensors, factors = method.tensors(vit), largest.names_in(vit, f"rank{RANK}")
    assert set(tensors) == set(vit.tensors()) - set(factors) | {f"rank{rank}.{name}" for name in factors}
    groups = method.groups(vit)
    assert {group: role for group, (role, _) in groups.items()} == {
        "head": Role.SHARED, f"rank{rank}": Role.SHARED, "backbone": Role.FROZEN,
    }  # fmt: skip
    assert groups[f"rank{rank}"][1] == [f"rank{rank}.{name}" for name in factors]
    for name in factors:
        value, whole = tensors[f"rank{rank}.{name}"], vit.tensors()[name]
        assert value.numel() * RANK == whole.numel() * rank
        if name.endswith(".b"):
            assert not value.any()
        else:  # as LoRA's first factor begins
            assert 0.5 * 8**-0.5 < float(value.abs().max()) <= 8**-0.5
    assert FlexLora(rank=RANK, own_rank=RANK).groups(vit) == largest.groups(vit)


def widen(inputs: Inputs, rank: int) -> Inputs:
    """Factors of the largest rank with the same product: the others' rows and columns are zero."""
    wide = {name: value for name, value in inputs.items() if f"rank{rank}." not in name}
    for name, value in inputs.items():
        if f"rank{rank}." in name:
            missing = (0, 0, 0, RANK - rank) if name.endswith(".a") else (0, RANK - rank)
            wide[name.replace(f"rank{rank}.", "")] = torch.nn.functional.pad(value, missing)
    return wide


def test_answers_and_steps_are_those_of_wider_factors_with_zeros(vit: PatchViT) -> None:
    """The factor alpha / rank is that of the largest rank, so that products can be compared."""
    method, largest = FlexLora(rank=RANK, own_rank=2, lr=0.1), FlexLora(rank=RANK, lr=0.1)
    [phase], [other] = method.phases(vit), largest.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    wide = widen(inputs, 2)
    named = {name.removeprefix("tensor/"): value for name, value in inputs.items()}
    images = Images(inputs["batch/patches"], None)
    torch.testing.assert_close(
        method.predict(vit, named, images, None),
        largest.predict(vit, {name.removeprefix("tensor/"): value for name, value in wide.items()}, images, None),
    )
    trained, reference = whole_step(method, vit, whole(phase))(inputs), whole_step(largest, vit, whole(other))(wide)
    for name, value in widen(trained, 2).items():
        want = reference[name]
        if name.endswith(".a"):
            want, value = want[:2], value[:2]
        elif name.endswith(".b"):
            want, value = want[:, :2], value[:, :2]
        torch.testing.assert_close(value, want)
        if name.startswith("new/tensor/"):
            assert not torch.equal(value, wide[name.removeprefix("new/")][tuple(map(slice, value.shape))])


def test_a_rank_above_the_largest_is_refused() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", "rank = 4")):
        make_method("flexlora", {"rank": 4, "own_rank": 5})


# --- the server ---------------------------------------------------------------------------------------


def name_factors(rank: int) -> tuple[str, str]:
    prefix = "" if rank == RANK else f"rank{rank}."
    return f"{prefix}{ADDITION}.a", f"{prefix}{ADDITION}.b"


def make_state(draw: np.random.Generator) -> ServerState:
    tensors: dict[str, Array] = {"head.bias": draw.normal(size=3)}
    for rank in sorted(set(RANKS.values())):
        a, b = name_factors(rank)
        tensors |= {a: draw.normal(size=(rank, 7)), b: draw.normal(size=(6, rank))}
    return ServerState(tensors)


def test_each_rank_gets_the_best_split_of_the_mean_of_products() -> None:
    """Beside a loop that multiplies, averages, and splits with torch; a device without images counts for nothing."""
    draw = np.random.default_rng(0)
    state, ends, uploads = make_state(draw), dict[str, dict[str, Array]](), []
    for device, rank in RANKS.items():
        names = ("head.bias", *name_factors(rank))
        ends[device] = {name: draw.normal(size=state.tensors[name].shape) for name in names}
        uploads.append(
            upload(device, IMAGES[device], {name: end - state.tensors[name] for name, end in ends[device].items()})
        )
    after, figures = SplitMean().close(state, uploads, make_context(small()))
    mean, bias = torch.zeros(6, 7, dtype=torch.float64), np.zeros(3)
    for device in "abc":
        a, b = (torch.from_numpy(ends[device][name]) for name in name_factors(RANKS[device]))
        mean += IMAGES[device] / 12 * (b @ a)
        bias += IMAGES[device] / 12 * ends[device]["head.bias"]
    np.testing.assert_allclose(after.tensors["head.bias"], bias)
    left, values, right = torch.linalg.svd(mean)
    for rank in set(RANKS.values()):
        a, b = (after.tensors[name] for name in name_factors(rank))
        np.testing.assert_allclose(b @ a, (left[:, :rank] * values[:rank]) @ right[:rank], atol=1e-9)
        np.testing.assert_allclose(a @ a.T, np.eye(rank), atol=1e-9)
        np.testing.assert_allclose(b.T @ b, np.diag(values[:rank] ** 2), atol=1e-9)
    kept = float((values[:RANK] ** 2).sum() / (values**2).sum())
    assert figures["products_kept"] == pytest.approx(kept)
    assert figures["products_kept"] < 1
    with pytest.raises(EmptyCohort):
        SplitMean().close(state, uploads[3:], make_context(small()))


def test_a_rank_above_the_models_width_is_filled_up_with_zeros() -> None:
    draw, (a, b) = np.random.default_rng(0), name_factors(RANK)
    state = ServerState({a: np.zeros((RANK, 3), np.float32), b: np.zeros((6, RANK), np.float32)})
    own = {a: draw.normal(size=(RANK, 3)), b: draw.normal(size=(6, RANK))}
    after, figures = SplitMean().close(state, [upload("a", 4, own)], make_context(small()))
    np.testing.assert_allclose(after.tensors[b] @ after.tensors[a], own[b] @ own[a], atol=1e-5)
    assert {name: (value.shape, value.dtype) for name, value in after.tensors.items()} == {
        name: (value.shape, value.dtype) for name, value in state.tensors.items()
    }
    assert figures["products_kept"] == pytest.approx(1)


def test_the_mean_of_products_is_not_the_product_of_means() -> None:
    """Two devices with the same product, one with both factors' signs turned: their means cancel, products do not."""
    a, b = name_factors(RANK)
    draw = np.random.default_rng(1)
    state = ServerState({a: np.zeros((RANK, 7)), b: np.zeros((6, RANK))})
    own = {a: draw.normal(size=(RANK, 7)), b: draw.normal(size=(6, RANK))}
    uploads = [upload("a", 4, own), upload("b", 4, {name: -value for name, value in own.items()})]
    split, plain = (
        rule.close(state, uploads, make_context(small()))[0].tensors for rule in (SplitMean(), WeightedMean())
    )
    np.testing.assert_allclose(split[b] @ split[a], own[b] @ own[a], atol=1e-9)
    np.testing.assert_allclose(plain[b] @ plain[a], 0, atol=1e-9)


def train(ranks: Mapping[str, int], noise: Mapping[str, float], rounds: int = 30) -> tuple[Array, Mapping[str, Array]]:
    """The target matrix, and the server's tensors after rounds of devices that minimise |B A - own target|^2 / 2.

    A device's own target is the common one, and noise in place of the images that it lacks.
    """
    draw = np.random.default_rng(2)
    target = np.diag([3.0, 2.0, 1.0, 0, 0, 0]) @ np.linalg.qr(draw.normal(size=(6, 6)))[0]
    targets = {device: target + scale * draw.normal(size=(6, 6)) for device, scale in noise.items()}
    tensors: dict[str, Array] = {}
    for rank in sorted({*ranks.values(), RANK}):
        a, b = name_factors(rank)
        tensors |= {a: 0.5 * np.random.default_rng(3).normal(size=(rank, 6)), b: np.zeros((6, rank))}
    state = ServerState(tensors)
    for _ in range(rounds):
        uploads = []
        for device, rank in ranks.items():
            a, b = name_factors(rank)
            factor_a, factor_b = state.tensors[a], state.tensors[b]
            for _ in range(20):
                error = factor_b @ factor_a - targets[device]
                factor_a, factor_b = factor_a - 0.05 * factor_b.T @ error, factor_b - 0.05 * error @ factor_a.T
            uploads.append(upload(device, 4, {a: factor_a - state.tensors[a], b: factor_b - state.tensors[b]}))
        state, _ = SplitMean().close(state, uploads, make_context(small()))
    return target, state.tensors


def measure_error(target: Array, tensors: Mapping[str, Array], rank: int) -> float:
    a, b = name_factors(rank)
    return float(np.linalg.norm(tensors[b] @ tensors[a] - target))


def test_a_device_of_small_rank_gains_from_devices_of_large_rank() -> None:
    """The best model of rank 1 errs by the two smaller singular values, sqrt(5). A noisy device alone errs by more;
    beside devices of rank 4 it comes near, and the model of all ends near the target, which rank 1 everywhere cannot.
    """
    noise = {"weak": 0.5, "b": 0.05, "c": 0.05, "d": 0.05}
    alone = measure_error(*train({"weak": 1}, noise), 1)
    together = train({"weak": 1, "b": 4, "c": 4, "d": 4}, noise)
    least = 5**0.5
    assert alone > 1.1 * least
    assert measure_error(*together, 1) < 1.02 * least
    narrow = train(dict.fromkeys(noise, 1), noise)
    assert measure_error(*together, RANK) < 0.5 * measure_error(*narrow, 1)
