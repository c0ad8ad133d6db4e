"""pFedHN's roles, defaults and size."""

from typing import Any

import pytest

from fedvit.methods import build_model, make_method
from fedvit.methods.base import Method
from fedvit.methods.generators.hypernetwork import Hypernetwork
from fedvit.methods.optimizers import MomentumSgd
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role

HEAD = {"head.weight", "head.bias"}


def pair(**options: Any) -> tuple[Method, PatchViT]:
    method = make_method("pfedhn", options)
    model = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2}
    return method, build_model(method, SMALL, 4, seed=0, options=model)


def rule_of(method: Method, vit: PatchViT) -> GeneratorUpdate:
    rule = method.server_rule(vit)
    assert isinstance(rule, GeneratorUpdate)
    return rule


@pytest.mark.parametrize("personal_head", [False, True])
def test_everything_is_generated_but_a_personal_head(personal_head: bool) -> None:
    method, vit = pair(personal_head=personal_head)
    local = HEAD if personal_head else set()
    assert set(method.names_with(vit, Role.GENERATED)) == set(vit.tensors()) - local
    assert set(method.names_with(vit, Role.LOCAL)) == local
    (phase,) = method.phases(vit)
    assert set(phase.groups) == ({"head", "model"} if personal_head else {"model"})
    generator = rule_of(method, vit).generator
    assert isinstance(generator, Hypernetwork)
    assert set(generator.targets) == set(method.names_with(vit, Role.GENERATED))


def test_the_papers_steps_and_trunk() -> None:
    # the papers device loop: 50 steps of SGD; 50 passes are enough for them, whatever a device has
    method, vit = pair()
    (phase,) = method.phases(vit)
    assert (phase.steps, phase.epochs, phase.lr, method.clip_norm) == (50, 50, 0.005, 50.0)
    assert method.optimizer_rule() == MomentumSgd(momentum=0.9, weight_decay=5e-5)
    (phase,) = (other := pair(steps=0, epochs=3))[0].phases(other[1])
    assert (phase.steps, phase.epochs) == (None, 3)
    rule = rule_of(*pair())
    assert (rule.lr, rule.clip_norm) == (0.01, 50.0)
    assert rule.optimizer == MomentumSgd(momentum=0.9, weight_decay=1e-3)
    assert rule_of(*pair(personal_head=True)).lr == 0.05
    assert rule_of(*pair(personal_head=True, server_lr=0.2)).lr == 0.2
    # the trunk: Embeddings of floor(1 + 50 / 4) = 13 numbers, then 100 all the way
    generator = rule_of(*pair()).generator
    assert isinstance(generator, Hypernetwork)
    trunk = {name: layer for name, layer in generator.layers.items() if name.startswith("trunk")}
    assert trunk == {"trunk.0": (13, 100), "trunk.1": (100, 100), "trunk.2": (100, 100), "trunk.3": (100, 100)}
    assert generator.layers["head.blocks.1.attn.qkv.weight"] == (100, 24 * 8)
