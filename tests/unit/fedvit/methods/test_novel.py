"""What a novel device trains of each method, and that all else stands still."""

from typing import Any

import pytest
import torch

from fedvit.methods import METHODS, build_model, make_method
from fedvit.methods.base import Method
from fedvit.methods.novel import phases_of, server_rule_of
from fedvit.methods.rules.generator_update import GeneratorUpdate
from fedvit.methods.rules.nothing import Nothing
from fedvit.methods.rules.together import Together
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role

MODEL = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 2, "heads": 2, "mlp_ratio": 2.0}
SMALLEST: dict[str, dict[str, Any]] = {"eftvit": {"local_blocks": 1}, "fedbfpt": {"local_blocks": 2}}

OWN = {
    "adapters": {"personal"},
    "apfl": {"twin", "alpha"},
    "ditto": {"twin"},
    "eftvit": {"local"},
    "fedas": {"prototypes", "head"},
    "fedbn": {"personal"},
    "fedcp": {"own_head"},
    "feddbe": {"own_bias"},
    "fedpac": {"head"},
    "fedper": {"personal"},
    "fedperfix": {"personal"},
    "fedproto": {"model"},
    "fedrep": {"personal"},
    "fedrod": {"personal_head"},
    "fedsa_lora": {"own"},
    "fedtp": {"attention"},
    "fedvpt_d": {"head"},
    "gpfl": {"class_shares", "head"},
    "ifca": {"choice"},
    "local": {"model"},
    "personal_analytic": {"sums", "own"},
    "personal_part": {"personal"},
    "pfedhn": {"model"},
    "pfedme": {"twin"},
    "pfedpg": {"prompts", "head"},
    "prefix": {"personal"},
    "prompts": {"personal"},
    "single_vpt": {"head", "tuned"},
    "vanilla_attention": {"personal"},
}
"""Groups that a novel device trains; of all other methods nothing."""


def pair(name: str, **options: Any) -> tuple[Method, PatchViT]:
    method = make_method(name, {**SMALLEST.get(name, {}), **options}).in_round(1, 1)
    with torch.device("meta"):
        return method, build_model(method, SMALL, 4, seed=0, options=MODEL)


@pytest.mark.parametrize("name", METHODS)
def test_novel_device_trains_its_own_part_alone(name: str) -> None:
    method, vit = pair(name, novel="own")
    with torch.device("meta"):
        roles = {group: role for group, (role, names) in method.groups(vit).items() if names}
        phases = phases_of(method, vit)
    own = OWN.get(name, set())
    assert {group for group, role in roles.items() if role is not Role.FROZEN} == own
    assert set(roles.values()) <= {Role.FROZEN, Role.LOCAL, Role.GENERATED}
    assert {group for phase in phases for group in phase.groups} == own
    assert not any(phase.collect for phase in phases)


def test_fedrep_on_a_novel_device_has_no_phase_of_the_body() -> None:
    method, vit = pair("fedrep", novel="own")
    assert [phase.graph for phase in phases_of(method, vit)] == ["train_head"]
    plain, _ = pair("fedrep")
    assert phases_of(plain, vit) == plain.phases(vit)


@pytest.mark.parametrize("learns", ["own", "generator"])
def test_server_learns_embeddings_or_nothing(learns: str) -> None:
    """Of FedTP's two rules and pFedPG's, which also gives away the base, the one that learns is left."""
    trains = {"own": "embeddings", "generator": "all"}[learns]
    for name, options in (("fedtp", {}), ("pfedpg", {"evaluate_with": "base"}), ("pfedhn", {})):
        rule = server_rule_of(*pair(name, novel=learns, **options))
        left = rule.rules if isinstance(rule, Together) else (rule,)
        assert [isinstance(one, GeneratorUpdate) and one.trains for one in left] == [trains], name
    for name in ("fedavg", "eftvit", "apfl", "local"):
        assert isinstance(server_rule_of(*pair(name, novel=learns)), Nothing)
    method, vit = pair("fedavg")
    assert server_rule_of(method, vit) == method.server_rule(vit)


def test_novel_devices_learn_with_the_rate_itself() -> None:
    """The warm-up and the schedule are those of the training."""
    assert make_method("eftvit", {}).lr_scale(1, 1) == pytest.approx(1 / 6)
    assert make_method("eftvit", {"novel": "own"}).lr_scale(1, 1) == 1.0
