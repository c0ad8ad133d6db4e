"""FedRA: which blocks a device trains in a round, its step beside plain autograd, the server, and weak devices' use."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError, EmptyCohort
from fedvit.methods import build_model, make_method
from fedvit.methods.base import Images, ServerState, check_fits
from fedvit.methods.calculus import Named
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.fedra import ORDERS, FedRA
from fedvit.methods.step import example_inputs, whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Draw, Role
from tests.support.codes import has_code
from tests.support.method_steps import make_context
from tests.support.quadratic import BATCH, in_double
from tests.support.steps import whole
from tests.support.uploads import upload

DEPTH = 5
MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": DEPTH, "heads": 2}


def make_vit(seed: int = 0, classes: int = 3) -> PatchViT:
    return build_model(FedRA(rank=2), SMALL, classes, seed=seed, options=MODEL)


@pytest.fixture(scope="module")
def vit() -> PatchViT:
    return make_vit().double()


def in_round(method: FedRA, vit: PatchViT, device: str, number: int) -> FedRA:
    drawn = method.for_device(vit, device, number)
    assert isinstance(drawn, FedRA)
    return drawn


# --- what is drawn ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_a_device_trains_every_block_within_few_rounds(vit: PatchViT, layers: int) -> None:
    method, parts = FedRA(layers=layers), -(-DEPTH // layers)
    for device in ("a", "b", "c"):
        for first in range(1, 4 * parts, parts):
            blocks = [in_round(method, vit, device, first + turn).list_blocks(vit) for turn in range(parts)]
            assert all(len(one) == layers and one == sorted(set(one)) for one in blocks)
            assert set().union(*blocks) == set(range(DEPTH))


def test_draws_follow_from_seed_device_and_round(vit: PatchViT) -> None:
    method, other = FedRA(layers=2), make_vit(seed=1)

    def draw(model: PatchViT, device: str) -> list[list[int]]:
        return [in_round(method, model, device, number).list_blocks(model) for number in range(1, 31)]

    first = draw(vit, "a")
    assert first == draw(vit, "a")
    assert first != draw(vit, "b")
    assert first != draw(other, "a")
    assert in_round(in_round(method, vit, "a", 7), vit, "a", 2) == in_round(method, vit, "a", 2)
    assert len({tuple(blocks) for blocks in first}) > 3


def test_all_blocks_are_drawn_equally_often_and_programs_are_few(vit: PatchViT) -> None:
    method = FedRA(layers=2)
    drawn = [in_round(method, vit, f"device-{number}", turn) for number in range(100) for turn in (1, 2, 3)]
    counts = np.bincount([block for one in drawn for block in one.list_blocks(vit)], minlength=DEPTH)
    assert counts.min() > 0.7 * counts.mean()
    assert len(set(drawn)) <= ORDERS * 3


@pytest.mark.parametrize("method", [FedRA(layers=DEPTH), FedRA(layers=DEPTH, draw=3)])
def test_a_device_with_all_blocks_is_one_of_fed_lora(vit: PatchViT, method: FedRA) -> None:
    assert in_round(method, vit, "a", 2).list_blocks(vit) == list(range(DEPTH))
    assert set(method.names_with(vit, Role.SHARED)) == set(FedLora(rank=2).names_with(vit, Role.SHARED))
    (phase,) = method.phases(vit)
    assert not phase.draws


def test_a_device_has_half_of_the_blocks_unless_told_otherwise(vit: PatchViT) -> None:
    assert len(FedRA().list_blocks(vit)) == 3
    with pytest.raises(ConfigError, check=has_code("FV1104", "at most 5")):
        check_fits(FedRA(layers=6), vit)


# --- roles and graphs ---------------------------------------------------------------------------------


def test_additions_of_drawn_blocks_and_the_head_are_sent_back(vit: PatchViT) -> None:
    for number in range(1, 7):
        method = in_round(FedRA(layers=2), vit, "a", number)
        groups, blocks = method.groups(vit), method.list_blocks(vit)
        shared = {group for group, (role, _) in groups.items() if role is Role.SHARED}
        assert shared == {"head", *(f"block.{block}" for block in blocks)}
        assert {group for group, (role, _) in groups.items() if role is Role.FROZEN} == {"backbone"}
        assert all(name.startswith("blocks.3.attn.qkv.lora_") for name in groups["block.3"][1])
        (phase,) = method.phases(vit)
        assert [(draw.low, draw.high, draw.count) for draw in phase.draws] == [(one, one + 1, 1) for one in blocks]


def test_devices_with_other_blocks_have_the_same_graphs_and_tensors(vit: PatchViT) -> None:
    drawn = [in_round(FedRA(layers=2), vit, "a", number) for number in range(1, 7)]
    assert len(set(drawn)) > 1
    assert {one.as_traced() for one in drawn} == {FedRA(layers=2).as_traced()}
    assert len({one.phases(vit)[0].groups for one in drawn}) == 1
    members = [{group: names for group, (_, names) in one.groups(vit).items()} for one in drawn]
    assert all(one == members[0] for one in members)


# --- the step -----------------------------------------------------------------------------------------


def by_autograd(vit: PatchViT, inputs: Named, blocks: list[int], names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model's own blocks, called one after another."""
    leaves = {name: inputs[f"tensor/{name}"].clone().requires_grad_() for name in names}
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


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_step_is_that_of_a_model_of_the_drawn_blocks(vit: PatchViT, layers: int, number: int) -> None:
    """Loss and update by plain autograd; additions of other blocks do not move."""
    method = in_round(FedRA(layers=layers, rank=2), vit, "a", number)
    (phase,) = method.phases(vit)
    inputs = in_double(example_inputs(method, vit, BATCH, whole(phase)))
    outputs = whole_step(method, vit, whole(phase))(inputs)
    names = method.names_with(vit, Role.SHARED)
    loss, grads = by_autograd(vit, inputs, method.list_blocks(vit), names)
    torch.testing.assert_close(outputs["metric/loss"], loss, rtol=1e-12, atol=1e-12)
    for name in method.names_with(vit, Role.SHARED, Role.SEEDED):
        before, now = inputs[f"tensor/{name}"], outputs[f"new/tensor/{name}"]
        if name in names:
            torch.testing.assert_close(now, before - inputs["hyper/lr"] * grads[name], rtol=1e-12, atol=1e-12)
        assert torch.equal(now, before) == (name not in names), name


def test_it_is_tested_with_the_whole_model(vit: PatchViT) -> None:
    patches = torch.randn(2, 4, 192, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    images = Images(patches, None)
    wanted = FedLora(rank=2).predict(vit, vit.tensors(), images, None)
    assert torch.equal(FedRA(rank=2, layers=2).predict(vit, vit.tensors(), images, None), wanted)


# --- the server ---------------------------------------------------------------------------------------


def test_a_block_is_averaged_over_those_who_trained_it(vit: PatchViT) -> None:
    draw, images = np.random.default_rng(0), {"a": 6, "b": 2, "c": 4, "none": 0}
    methods = {device: in_round(FedRA(layers=2, rank=2), vit, device, 1) for device in images}
    state = ServerState(
        {name: draw.normal(size=vit.tensors()[name].shape) for name in FedLora(rank=2).names_with(vit, Role.SHARED)}
    )
    deltas = {
        device: {name: draw.normal(size=state.tensors[name].shape) for name in method.names_with(vit, Role.SHARED)}
        for device, method in methods.items()
    }
    uploads = [upload(device, images[device], tensors) for device, tensors in deltas.items()]
    rule = FedRA().server_rule(vit)
    after, _ = rule.close(state, uploads, make_context(vit))
    for name, before in state.tensors.items():
        senders = [device for device in "abc" if name in deltas[device]]
        total = sum(images[device] for device in senders)
        step = sum(images[device] * deltas[device][name] for device in senders) / total if senders else 0
        np.testing.assert_allclose(after.tensors[name], before + step)
    trained = {len([device for device in "abc" if block in methods[device].list_blocks(vit)]) for block in range(DEPTH)}
    assert len(trained) > 1
    with pytest.raises(EmptyCohort):
        rule.close(state, uploads[3:], make_context(vit))


def test_weak_devices_with_drawn_blocks_are_worth_more_than_none() -> None:
    """One device can train all blocks and has two of four classes; two others train two blocks and have the rest."""
    classes, model = 4, make_vit(classes=4)
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(classes, 4, 192))
    seen = {"strong": (0, 1), "weak-1": (2, 3), "weak-2": (2, 3)}

    def sample(labels: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = centres[labels] + draw.normal(size=(len(labels), 4, 192))
        return torch.from_numpy(pixels).float(), torch.from_numpy(labels)

    data = {device: sample(np.repeat(own, 16)) for device, own in seen.items()}
    test = sample(np.repeat(range(classes), 25))

    def run(devices: list[str]) -> float:
        state = ServerState({name: value.numpy() for name, value in model.tensors().items()})
        rule = FedRA().server_rule(model)
        for number in range(1, 11):
            uploads = []
            for device in devices:
                layers = DEPTH if device == "strong" else 2
                method = in_round(make_method("fedra", {"layers": layers, "rank": 2, "lr": 0.1}), model, device, number)
                (phase,) = method.phases(model)
                step, (patches, labels) = whole_step(method, model, whole(phase)), data[device]
                inputs = {f"tensor/{name}": torch.from_numpy(value) for name, value in state.tensors.items()}
                inputs |= {"batch/patches": patches, "batch/labels": labels, "batch/weight": torch.ones(len(labels))}
                inputs |= {f"draw/{one.name}": torch.tensor([one.low]) for one in phase.draws}
                inputs |= {"hyper/lr": torch.tensor(phase.lr), "hyper/step": torch.tensor(1.0)}
                for _ in range(5):
                    inputs |= {name.removeprefix("new/"): value for name, value in step(inputs).items()}
                sent = method.names_with(model, Role.SHARED)
                deltas = {name: inputs[f"tensor/{name}"].numpy() - state.tensors[name] for name in sent}
                uploads.append(upload(device, len(labels), deltas))
            state, _ = rule.close(state, uploads, make_context(model, number))
        images = Images(test[0], None)
        tensors = {name: torch.from_numpy(value) for name, value in state.tensors.items()}
        answers = FedRA(rank=2).predict(model, tensors, images, None).argmax(dim=1)
        return float((answers == test[1]).float().mean())

    assert run(["strong"]) <= 0.5
    assert run(["strong", "weak-1", "weak-2"]) > 0.7


def test_a_drawn_block_is_named_by_a_range_of_one_number(vit: PatchViT) -> None:
    method = FedRA(layers=2)
    (phase,) = method.phases(vit)
    one, other = method.list_blocks(vit)
    assert phase.draws == (
        Draw(name="block0", low=one, high=one + 1, count=1),
        Draw(name="block1", low=other, high=other + 1, count=1),
    )
