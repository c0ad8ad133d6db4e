"""pFedPG's roles, traffic, generators and ways to be tested."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.methods.base import UPDATE, Images, Method, ServerState, Upload
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.generators.prompts import PromptAttention, PromptStatistics
from fedvit.methods.optimizers import AdamW, Sgd
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.step import whole_step
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from tests.support.codes import has_code
from tests.support.method_steps import make_context

OPTIONS = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2}
PROMPTS = "prompts.tokens"


def pair(**options: Any) -> tuple[Method, PatchViT]:
    method = make_method("pfedpg", options)
    return method, build_model(method, SMALL, 4, seed=0, options=OPTIONS)


def roles(method: Method, vit: PatchViT) -> dict[str, set[str]]:
    return {role.value: set(members) for role, members in method.groups(vit).values() if members}


def update_of(method: Method, vit: PatchViT) -> GeneratorUpdate:
    rule = method.server_rule(vit)
    assert isinstance(rule, GeneratorUpdate)
    return rule


def test_only_prompts_and_head_are_trained() -> None:
    method, vit = pair()
    head = {"head.weight", "head.bias"}
    backbone = set(vit.tensors()) - head - {PROMPTS}
    assert roles(method, vit) == {"generated": {PROMPTS}, "local": head, "frozen": backbone}
    assert method.phases(vit) == (Train(graph="train", update=UPDATE, groups=("prompts", "head"), epochs=5, lr=0.25),)
    assert method.optimizer_rule() == Sgd(weight_decay=0.001)


def test_steps_in_place_of_epochs() -> None:
    """As many passes as steps, so that a device with one batch gets there, too."""
    method, vit = pair(steps=7, epochs=2)
    (phase,) = method.phases(vit)
    assert (phase.steps, phase.epochs) == (7, 7)


def test_traffic_of_the_papers_model() -> None:
    """ViT-B/16, 10 prompts of width 768: 7 680 numbers down and as many up; the rest is the backbone with its
    85 798 656, which is sent once, and the head, which is not sent at all. Without memory for them."""
    method = make_method("pfedpg")
    with torch.device("meta"):
        vit = build_model(method, "vit_base_patch16_224", 10, seed=0)
    sizes = {name: value.numel() for name, value in method.tensors(vit).items()}

    def count(keep: Any) -> int:
        return sum(sizes[name] for role, members in method.groups(vit).values() if keep(role) for name in members)

    assert count(lambda role: role.from_server_each_round) == 7_680
    assert count(lambda role: role.is_sent_back) == 7_680
    assert count(lambda role: role is Role.FROZEN) == 85_798_656


def test_a_step_moves_prompts_and_head_and_nothing_else() -> None:
    method, vit = pair(tokens=3)
    (phase,) = method.phases(vit)
    draw = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {f"tensor/{name}": value for name, value in vit.tensors().items()}
    inputs |= {"batch/patches": torch.randn(5, 4, 192, generator=draw), "batch/labels": torch.arange(5) % 4}
    inputs |= {"batch/weight": torch.ones(5), "hyper/lr": torch.tensor(0.25), "hyper/step": torch.tensor(1.0)}
    outputs = whole_step(method, vit, phase)(inputs)
    updated = {name.removeprefix("new/tensor/"): value for name, value in outputs.items() if name.startswith("new/")}
    assert updated.keys() == {PROMPTS, "head.weight", "head.bias"}
    for name, value in updated.items():
        assert not torch.equal(value, vit.tensors()[name])


def test_every_block_sees_the_prompts() -> None:
    """1 + 4 + K tokens enter each block, behind the class token the prompts; the answer keeps its shape."""
    method, vit = pair(tokens=3)
    seen: list[Tensor] = []

    def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])

    handles = [block.norm1.register_forward_pre_hook(hook) for block in vit.vit.blocks]
    logits = method.forward(vit, vit.tensors(), Images(torch.zeros(2, 4, 192), None)).logits
    for handle in handles:
        handle.remove()
    assert [tuple(x.shape) for x in seen] == [(2, 8, 8), (2, 8, 8)]
    torch.testing.assert_close(seen[0][1, 1:4], vit.tensors()[PROMPTS])
    assert logits.shape == (2, 4)


def test_all_devices_weigh_the_same() -> None:
    method, vit = pair(server_optimizer="sgd", server_lr=0.1, server_weights="sum")
    rule = update_of(method, vit)
    assert (rule.optimizer, rule.lr, rule.weights) == (Sgd(), 0.1, "sum")
    plain = update_of(*pair())
    assert (plain.optimizer, plain.lr, plain.weights) == (AdamW(), 0.01, "equal")


def share_that_differs(**options: Any) -> float:
    """How far devices' prompts are from their mean, as a share of their norm, after ten rounds in which each of four
    devices moves its prompts by a tenth of their size in a direction of its own."""
    method, vit = pair(tokens=10, **options)
    rule = update_of(method, vit)
    state = ServerState({}, rule.begin(0))
    size = float(vit.tensors()[PROMPTS].std())
    draw = np.random.default_rng(0)
    deltas = {name: draw.normal(0, 0.1 * size, (10, 8)).astype(np.float32) for name in "abcd"}
    context = make_context(vit)
    for _ in range(10):
        uploads = [Upload(name, 2, "", partial(dict, {PROMPTS: delta})) for name, delta in deltas.items()]
        state, _ = rule.close(state, uploads, context)
    prompts = np.stack([rule.generate(state, name, 0)[PROMPTS] for name in deltas])
    apart = np.linalg.norm(prompts - prompts.mean(axis=0), axis=(1, 2))
    return float(np.mean(apart / np.linalg.norm(prompts, axis=(1, 2))))


def test_prompts_of_devices_differ() -> None:
    """By a tenth of their norm at the least. The paper's equation without normalisation and with its rate makes nearly
    the same for all, a basis exactly."""
    assert share_that_differs() >= 0.1
    assert share_that_differs(normalise=False, server_optimizer="sgd", server_lr=0.001) < 0.05
    assert share_that_differs(generator="basis") < 1e-6


def test_first_values_are_vpts() -> None:
    """P_base is what the model's own prompts begin with; descriptors are uniform in +-sqrt(6 / (3 P^2 + l))."""
    method, vit = pair()
    rule = update_of(method, vit)
    np.testing.assert_array_equal(rule.begin(0)["generator/base"], vit.tensors()[PROMPTS].numpy())
    assert isinstance(rule.generator, PromptAttention)
    assert rule.generator.bound == math.sqrt(6 / (3 * 64 + 8))


def test_the_generators() -> None:
    """An MLP has no base: K heads for one hidden vector of 100 are one layer of 100 to K l."""
    method, vit = pair(generator="mlp", tokens=3)
    mlp = update_of(method, vit).generator
    assert isinstance(mlp, Hypernetwork)
    assert mlp.layers == {
        "trunk.0": (8, 100),
        "trunk.1": (100, 100),
        "trunk.2": (100, 100),
        "trunk.3": (100, 100),
        "head.prompts.tokens": (100, 24),
    }
    assert isinstance(update_of(*pair(generator="adain")).generator, PromptStatistics)
    attention = update_of(*pair(tokens=3, descriptor_tokens=3)).generator
    assert attention.personal(torch.Generator())["descriptor"].shape == (3, 8)


@pytest.mark.parametrize("descriptor_tokens", [2, 9])
def test_descriptor_tokens_are_one_or_all(descriptor_tokens: int) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", str(descriptor_tokens))):
        pair(descriptor_tokens=descriptor_tokens)[0].groups(pair()[1])


def test_how_a_device_is_tested() -> None:
    for evaluate_with, kept in (("adapted", ("prompts",)), ("fresh", ()), ("base", ())):
        method, vit = pair(evaluate_with=evaluate_with)
        assert method.evaluate(vit).kept == kept


def test_a_test_with_the_base() -> None:
    """It goes to all devices beside the prompts, follows the generator after each round, and takes the prompts'
    place in prediction alone."""
    method, vit = pair(evaluate_with="base", server_lr=1.0, tokens=3)
    assert roles(method, vit)["global"] == {"base_prompts"}
    tensors = method.tensors(vit)
    rule = method.server_rule(vit)
    state = ServerState({"base_prompts": tensors["base_prompts"].numpy()}, rule.begin(0))
    np.testing.assert_array_equal(state.tensors["base_prompts"], state.memory["generator/base"])
    uploads = [Upload("a", 2, "", lambda: {PROMPTS: np.ones((3, 8), np.float32)})]
    context = make_context(vit)
    after, _ = rule.close(state, uploads, context)
    np.testing.assert_array_equal(after.tensors["base_prompts"], after.memory["generator/base"])
    assert (after.tensors["base_prompts"] > state.tensors["base_prompts"]).any()

    images = Images(torch.randn(2, 4, 192, generator=torch.Generator().manual_seed(0)), None)
    base = torch.from_numpy(after.tensors["base_prompts"])
    predicted = method.predict(vit, {**tensors, "base_prompts": base}, images, None)
    torch.testing.assert_close(predicted, method.forward(vit, {**tensors, PROMPTS: base}, images).logits)
    assert not torch.equal(predicted, method.forward(vit, tensors, images).logits)


def test_an_mlp_has_no_base_to_test_with() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", "'base'")):
        pair(evaluate_with="base", generator="mlp")[0].groups(pair()[1])
