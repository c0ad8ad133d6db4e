"""FedBFPT: which block a round trains, and within which model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods import make_method
from fedvit.methods.base import Images, Method, check_fits
from fedvit.methods.calculus import Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.fedbfpt import FedBFPT, stage_of
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Draw, Role
from tests.support.codes import has_code
from tests.support.steps import whole

DEPTH = 5
HALF = (0.5, 0.5, 0.5)
BATCH = Batch(image_size=16, patch_size=8, batch_size=4, mean=HALF, std=HALF)


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    options = {"image_size": 16, "patch_size": 8, "width": 16, "depth": DEPTH, "heads": 2}
    return build_vit(SMALL, 3, seed=0, options=options).double()


def method(**options: Any) -> FedBFPT:
    return FedBFPT(optimizer="sgd", weight_decay=0.0, **options)


def inputs_of(method: Method, vit: PatchViT) -> dict[str, Tensor]:
    (phase,) = method.phases(vit)
    inputs = example_inputs(method, vit, BATCH, whole(phase))
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def run(method: Method, vit: PatchViT, inputs: Named) -> dict[str, Tensor]:
    (phase,) = method.phases(vit)
    return whole_step(method, vit, phase)(inputs)


# --- schedule -----------------------------------------------------------------------------------------


def stages(rounds: int) -> list[int]:
    return [stage_of(number, rounds) for number in range(1, rounds + 1)]


def test_the_schedule_of_200_rounds() -> None:
    """Counted from 0, stages 1 to 7 begin at 100, 150, 175, 188, 194, 197 and 199."""
    begins = [stages(200).index(stage) for stage in range(8)]
    assert begins == [0, 100, 150, 175, 188, 194, 197, 199]


@pytest.mark.parametrize("rounds", [1, 2, 3, 10, 37, 64, 200])
def test_the_schedule_is_that_of_the_released_code(rounds: int) -> None:
    """As it is written there: at round t = T - floor(left / 2) the stage moves on and T - t rounds are left."""
    stage, left, expected = 0, rounds, []
    for number in range(rounds):
        if number == rounds - left // 2:
            stage, left = stage + 1, rounds - number
        expected.append(stage)
    assert stages(rounds) == expected


def test_a_round_sets_the_stage() -> None:
    base = make_method("fedbfpt", {"local_blocks": 3})
    assert base.in_round(1, 10) == base
    assert base.in_round(10, 10) == FedBFPT(local_blocks=3, stage=3)
    assert base.in_round(6, 10).in_round(1, 10) == base


# --- roles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(DEPTH))
@pytest.mark.parametrize("with_norm", [False, True])
def test_one_block_and_the_output_layer_are_sent_back(vit: PatchViT, stage: int, with_norm: bool) -> None:
    groups = method(stage=stage, with_norm=with_norm).groups(vit)
    shared = {group for group, (role, _) in groups.items() if role is Role.SHARED}
    assert shared == {"head", f"block.{stage}"} | ({"norm"} if with_norm else set())
    assert {role for role, _ in groups.values()} == {Role.SHARED, Role.GLOBAL}
    assert all(name.startswith(f"blocks.{stage}.") for name in groups[f"block.{stage}"][1])


def test_groups_hold_the_same_tensors_in_every_round(vit: PatchViT) -> None:
    """Else a group that did not move would have another digest, and the server could not keep one state."""
    base = method()
    members = [
        {group: names for group, (_, names) in base.in_round(number, 20).groups(vit).items()} for number in range(1, 21)
    ]
    assert all(each == members[0] for each in members)


def test_with_more_stages_than_blocks_the_last_block_goes_on(vit: PatchViT) -> None:
    assert method(stage=9).groups(vit) == method(stage=DEPTH - 1).groups(vit)
    assert method(stage=9).phases(vit) == method(stage=DEPTH - 1).phases(vit)


def test_the_server_takes_the_mean(vit: PatchViT) -> None:
    assert method().server_rule(vit) == WeightedMean()


# --- what is drawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "local_blocks", "count"),
    [
        *((0, 3, 2), (1, 3, 1), (2, 3, 0), (3, 3, 0), (4, 3, 0), (0, 1, 0), (0, None, 2)),
        *((0, 4, 3), (0, 5, 0), (3, 5, 0), (4, 5, 0)),
    ],
)
def test_blocks_are_drawn_behind_the_one_that_is_trained(
    vit: PatchViT, stage: int, local_blocks: int | None, count: int
) -> None:
    """Up to `local_blocks` in all, of five; None is three. A model of all five has each block once."""
    (phase,) = method(stage=stage, local_blocks=local_blocks).phases(vit)
    draw = Draw(name="blocks", low=stage + 1, high=DEPTH, count=count, ascending=True)
    assert phase.draws == ((draw,) if count else ())
    assert phase.groups == ("head", f"block.{stage}")


def test_a_device_cannot_have_more_blocks_than_there_are(vit: PatchViT) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", f"'{SMALL}'")):
        check_fits(method(local_blocks=6), vit)


# --- the step -----------------------------------------------------------------------------------------


def by_autograd(
    vit: PatchViT, inputs: Named, blocks: list[int], trained: list[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of timm's own blocks, called in this order."""
    leaves = {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in trained}
    tensors = {name: leaves.get(name, inputs[f"tensor/{name}"]) for name in vit.tensors()}

    def body(vit: PatchViT) -> Tensor:
        x_BND = vit.embed(inputs["batch/patches"])
        for block in blocks:
            x_BND = vit.vit.blocks[block](x_BND)
        return vit.classify(x_BND)

    weight = inputs["batch/weight"]
    losses = torch.nn.functional.cross_entropy(vit.call(tensors, body), inputs["batch/labels"], reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(
    ("stage", "local_blocks", "drawn", "blocks"),
    [
        (0, 3, [1, 3], [0, 1, 3]),
        (0, 3, [2, 2], [0, 2, 2]),  # with repetition
        (1, 3, [4], [0, 1, 4]),
        (2, 3, [], [0, 1, 2]),
        (4, 3, [], [0, 1, 2, 3, 4]),
        (0, 5, [], [0, 1, 2, 3, 4]),
        (2, 5, [], [0, 1, 2, 3, 4]),
    ],
)
def test_a_step_equals_timms_blocks_in_that_order(
    vit: PatchViT, stage: int, local_blocks: int, drawn: list[int], blocks: list[int]
) -> None:
    """Loss and update of the trained block and the head, by plain autograd through a model of those blocks."""
    used = method(stage=stage, local_blocks=local_blocks)
    inputs = inputs_of(used, vit)
    if drawn:
        inputs["draw/blocks"] = torch.tensor(drawn)
    outputs = run(used, vit, inputs)
    trained = [name for name in vit.tensors() if name.startswith((f"blocks.{stage}.", "head."))]
    loss, grads = by_autograd(vit, inputs, blocks, trained)
    torch.testing.assert_close(outputs["metric/loss"], loss, rtol=1e-12, atol=1e-12)
    assert {name for name in outputs if name.startswith("new/")} == {f"new/tensor/{name}" for name in trained}
    for name in trained:
        updated = inputs[f"tensor/{name}"] - inputs["hyper/lr"] * grads[name]
        torch.testing.assert_close(outputs[f"new/tensor/{name}"], updated, rtol=1e-12, atol=1e-12)
        assert not torch.equal(outputs[f"new/tensor/{name}"], inputs[f"tensor/{name}"])


def test_other_blocks_give_another_step(vit: PatchViT) -> None:
    used = method(local_blocks=3)
    inputs = inputs_of(used, vit)
    losses = [
        float(run(used, vit, {**inputs, "draw/blocks": torch.tensor(drawn)})["metric/loss"])
        for drawn in ([1, 2], [1, 3], [2, 4], [4, 4])
    ]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("make", [lambda stage: method(stage=stage), lambda stage: FedBFPT(stage=stage)])
def test_drawn_blocks_do_not_move(vit: PatchViT, make: Callable[[int], FedBFPT]) -> None:
    """Also where weight decay would move whatever the optimizer holds."""
    for stage in (0, 1):
        used = make(stage)
        outputs = run(used, vit, inputs_of(used, vit))
        assert {name.split(".")[1] for name in outputs if name.startswith("new/tensor/blocks.")} == {str(stage)}


def test_it_is_tested_with_the_whole_model(vit: PatchViT) -> None:
    patches = torch.randn(2, 4, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = Images(patches, None)
    whole = FedAvg().predict(vit, vit.tensors(), images, None)
    assert torch.equal(method(stage=1, local_blocks=2).predict(vit, vit.tensors(), images, None), whole)


def test_the_papers_defaults() -> None:
    """AdamW at 5e-5 with decay 0.01; of twelve blocks a device has six."""
    with torch.device("meta"):
        twelve = build_vit("vit_tiny_patch16_224", 3, seed=0)
    (phase,) = FedBFPT().phases(twelve)
    assert phase.draws == (Draw(name="blocks", low=1, high=12, count=5, ascending=True),)
    assert (phase.lr, FedBFPT().optimizer, FedBFPT().weight_decay) == (5e-5, "adamw", 0.01)
