"""FedTP's roles, sizes, extensions and its study of devices that come later."""

from typing import Any

import numpy as np
import pytest
import torch

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Gathered, Images, Method, ServerState, Upload
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.knn_per import mixture
from fedvit.methods.novel import phases_of, server_rule_of
from fedvit.methods.optimizers import MomentumSgd
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.together import Together
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Gather, Role
from fedvit.tensors import Tensors
from tests.support.method_steps import make_context

OPTIONS = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0, "qkv_bias": False}


def pair(options: dict[str, Any] | None = None) -> tuple[Method, PatchViT]:
    method = make_method("fedtp", options)
    return method, build_model(method, SMALL, 4, seed=0, options=OPTIONS)


def update_of(method: Method, vit: PatchViT) -> GeneratorUpdate:
    rule = method.server_rule(vit)
    found = rule.rules[1] if isinstance(rule, Together) else rule
    assert isinstance(found, GeneratorUpdate)
    return found


def names(method: Method, vit: PatchViT, role: Role) -> set[str]:
    return set(method.names_with(vit, role))


def test_queries_keys_and_values_are_generated_and_the_rest_is_shared() -> None:
    method, vit = pair()
    generated = {f"blocks.{block}.attn.qkv.weight" for block in range(2)}
    assert names(method, vit, Role.GENERATED) == generated
    assert names(method, vit, Role.SHARED) == set(vit.tensors()) - generated
    (phase,) = method.phases(vit)
    assert phase.epochs == 5
    assert set(phase.groups) == {"attention", "shared"}
    assert set(update_of(method, vit).begin(0)) == {f"generator/{name}" for name in [
        "trunk.0.weight", "trunk.0.bias", "trunk.1.weight", "trunk.1.bias", "trunk.2.weight", "trunk.2.bias",
        "trunk.3.weight", "trunk.3.bias", *(f"head.{name}.{part}" for name in generated for part in ("weight", "bias")),
    ]}  # fmt: skip


@pytest.mark.parametrize(
    ("head_width", "model", "generated", "server"),
    [(64, 2_657_508, 1_572_864, 237_575_364), (16, 1_084_644, 393_216, 59_448_516)],
)
def test_sizes_of_the_papers_model(head_width: int, model: int, generated: int, server: int) -> None:
    """32 pixels, patches of 4, width 128, 8 blocks of 8 heads, MLP of 256, 100 classes. Heads of width 64 have
    8 * 3 * 512 * 128 = 1 572 864 generated numbers, of width 16 8 * 3 * 128 * 128 = 393 216. None is made."""
    options = {"image_size": 32, "patch_size": 4, "width": 128, "depth": 8, "heads": 8, "mlp_ratio": 2.0}
    method = make_method("fedtp")
    with torch.device("meta"):
        vit = build_model(method, SMALL, 100, seed=0, options={**options, "head_width": head_width, "qkv_bias": False})
    tensors = method.tensors(vit)
    assert sum(value.numel() for value in tensors.values()) == model
    assert sum(tensors[name].numel() for name in names(method, vit, Role.GENERATED)) == generated
    generator = update_of(method, vit).generator
    assert isinstance(generator, Hypernetwork)
    assert sum((inputs + 1) * outputs for inputs, outputs in generator.layers.values()) == server


@pytest.mark.parametrize(
    ("parts", "count", "example"),
    [
        ("mlp", 8, "blocks.1.mlp.fc2.bias"),
        ("norm", 8, "blocks.0.norm2.weight"),
        ("encoder", 18, "blocks.1.attn.qkv.weight"),
    ],
)
def test_other_parts_leave_the_shared_group(parts: str, count: int, example: str) -> None:
    """Two blocks: fc1 and fc2, norm1 and norm2 with weight and bias are 4 tensors each; with qkv 9. The last norm and
    the attention's output projection stay shared."""
    method, vit = pair({"parts": parts})
    generated = names(method, vit, Role.GENERATED)
    assert len(generated) == count
    assert example in generated
    assert names(method, vit, Role.SHARED) == set(vit.tensors()) - generated
    assert {"norm.weight", "blocks.0.attn.proj.weight", "head.weight"} <= names(method, vit, Role.SHARED)


def test_generated_norms_begin_around_one() -> None:
    method, vit = pair({"parts": "norm"})
    rule = update_of(method, vit)
    made = rule.generate(ServerState({}, rule.begin(0)), "a", 0)
    for name, value in made.items():
        assert abs(value.mean() - (1 if name.endswith("weight") else 0)) < 0.3


def test_a_head_that_stays() -> None:
    """As FedPer: `head` is local. As FedRoD: one more head is, and the model's own is shared."""
    method, vit = pair({"head": "local"})
    assert names(method, vit, Role.LOCAL) == {"head.weight", "head.bias"}
    method, vit = pair({"head": "rod"})
    assert names(method, vit, Role.LOCAL) == {"personal_head.weight", "personal_head.bias"}
    assert {"head.weight", "norm.weight"} <= names(method, vit, Role.SHARED)


def images(vit: PatchViT) -> Images:
    return Images(torch.randn(3, vit.patches, 192, generator=torch.Generator().manual_seed(0)), None)


def test_two_heads_answer_together() -> None:
    """Logits are the sum of both: with the personal head at zero they are the model's own."""
    method, vit = pair({"head": "rod"})
    zero = {name: torch.zeros_like(value) for name, value in vit.tensors().items() if name.startswith("personal")}
    tensors = vit.tensors()
    both, generic = (method.predict(vit, {**tensors, **more}, images(vit), None) for more in ({}, zero))
    one, other = pair()
    torch.testing.assert_close(generic, one.predict(other, other.tensors(), images(vit), None))
    assert float((both - generic).abs().max()) > 1e-3


@pytest.mark.parametrize("head", ["shared", "rod"])
def test_neighbours_vote_at_evaluation(head: str) -> None:
    method, vit = pair({"head": head, "knn_weight": 0.6, "capacity": 20, "neighbours": 2})
    gather = Gather(graph="features", output="features", shape=(8,), capacity=20)
    assert method.evaluate(vit).gather == gather
    draw = torch.Generator().manual_seed(1)
    stored = Gathered(
        {"features": torch.randn(20, 8, generator=draw)}, torch.randint(0, 4, (20,), generator=draw), torch.ones(20)
    )
    forward = method.forward(vit, vit.tensors(), images(vit))
    assert set(forward.collected) == {"features"}
    expected = mixture(forward, stored, weight=0.6, neighbours=2, scale=1.0)
    torch.testing.assert_close(method.predict(vit, vit.tensors(), images(vit), stored), expected)


def test_without_neighbours_nothing_is_gathered() -> None:
    method, vit = pair()
    assert method.evaluate(vit).gather is None


def test_what_the_server_optimises_with() -> None:
    method, vit = pair({"server_lr": 0.1, "server_momentum": 0.9, "server_weight_decay": 1e-3, "all_embeddings": True})
    rule = update_of(method, vit)
    assert (rule.lr, rule.all_embeddings, rule.trains) == (0.1, True, "all")
    assert rule.optimizer == MomentumSgd(momentum=0.9, weight_decay=1e-3)


@pytest.mark.parametrize(("novel", "trains"), [("own", "embeddings"), ("generator", "all")])
def test_for_devices_that_come_later_the_shared_tensors_stand_still(novel: str, trains: str) -> None:
    method, vit = pair({"novel": novel})
    rule = server_rule_of(method, vit)
    assert isinstance(rule, Together)
    [learns] = rule.rules
    assert isinstance(learns, GeneratorUpdate)
    generated = {f"blocks.{block}.attn.qkv.weight" for block in range(2)}
    assert names(method, vit, Role.FROZEN) == set(vit.tensors()) - generated
    assert not names(method, vit, Role.SHARED)
    assert [phase.groups for phase in phases_of(method, vit)] == [("attention",)]
    assert learns.trains == trains


def test_a_round_moves_the_mean_and_the_generator() -> None:
    """Two rules, each with its own part of one upload: shared tensors go by the mean delta, the generator learns, and
    no generated tensor is among what the server sends to all."""
    method, vit = pair()
    shared, generated = (names(method, vit, role) for role in (Role.SHARED, Role.GENERATED))
    start: Tensors = {name: vit.tensors()[name].numpy() for name in method.names_with(vit, Role.SHARED)}
    rule = method.server_rule(vit)
    state = ServerState(start, rule.begin(0))
    delta = {name: np.full(tuple(value.shape), 0.5, np.float32) for name, value in vit.tensors().items()}
    context = make_context(vit)
    after, figures = rule.close(state, [Upload("a", 2, "", lambda: delta)], context)
    assert set(after.tensors) == shared
    assert shared.isdisjoint(generated)
    for name in shared:
        np.testing.assert_allclose(after.tensors[name], start[name] + 0.5, rtol=1e-6)
    assert set(after.memory) == {*state.memory, "device/a/embedding"}
    assert all((after.memory[name] != value).any() for name, value in state.memory.items())
    assert figures.keys() == {"update_norm", "generator_gradient_norm"}
