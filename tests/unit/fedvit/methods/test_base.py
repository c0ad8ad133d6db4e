import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods import METHODS, build_model, make_method
from fedvit.methods.base import UPDATE, Forward, GroupRule, Images, Method, ServerRule, list_trained
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.optimizers import AdamW, MomentumSgd, Sgd
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from tests.support.codes import has_code

# --- options ------------------------------------------------------------------------------------------


def test_methods_and_options_by_name() -> None:
    assert make_method("eftvit", {"mask": 0.5, "lr": 1}) == EFTViT(mask=0.5, lr=1.0)
    assert make_method("fedavg") == FedAvg()
    # an unknown method: All that there are are named, sorted
    with pytest.raises(ConfigError) as refused:
        make_method("fedprox2")
    said = str(refused.value)
    assert said.startswith("unknown method 'fedprox2'; did you mean 'fedprox'")
    assert said.endswith(f" Known are {', '.join(sorted(METHODS))}")
    assert {"eftvit", "fedavg"} <= METHODS.keys()
    with pytest.raises(ConfigError, check=has_code("FV1101", "'mu'")):
        make_method("fedavg", {"mu": 0.5})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"epochs": 0}, "option epochs = 0 of method 'eftvit': Expected `int` >= 1"),
        ({"epochs": 2.5}, "option epochs = 2.5 of method 'eftvit': Expected `int`, got `float`"),
        ({"epochs": True}, "option epochs = True of method 'eftvit': Expected `int`, got `bool`"),
        ({"lr": 0}, "option lr = 0 of method 'eftvit': Expected `float` > 0.0"),
        ({"lr": "1e-3"}, "option lr = '1e-3' of method 'eftvit': Expected `float`, got `str`"),
        ({"lr": math.nan}, "option lr = nan of method 'eftvit' must be a finite number"),
        ({"lr": math.inf}, "option lr = inf of method 'eftvit' must be a finite number"),
        ({"weight_decay": math.inf}, "option weight_decay = inf of method 'eftvit' must be a finite number"),
        ({"momentum": 1.0}, "option momentum = 1.0 of method 'eftvit': Expected `float` < 1.0"),
        (
            {"optimizer": "adam"},
            "option optimizer = 'adam' of method 'eftvit': invalid value 'adam'; allowed are adamw | sgd; did you mean",
        ),
        ({"schedule": None}, "option schedule = None of method 'eftvit'"),
        ({"mask": 1.0}, "option mask = 1.0 of method 'eftvit': Expected `float` < 1.0"),
        ({"mask": -0.1}, "option mask = -0.1 of method 'eftvit': Expected `float` >= 0.0"),
        ({"local_blocks": 0}, "option local_blocks = 0 of method 'eftvit': Expected `int` >= 1"),
        ({"threshold": 0.0}, "option threshold = 0.0 of method 'eftvit': Expected `float` > 0.0"),
        ({"server_lr": -1.0}, "option server_lr = -1.0 of method 'eftvit': Expected `float` > 0.0"),
        ({"server_data": "all"}, "option server_data = 'all' of method 'eftvit': invalid value 'all'; allowed are"),
    ],
)
def test_a_bad_option_is_named_with_its_value(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_method("eftvit", options)
    assert str(refused.value).startswith(complaint)


def test_the_optimizer_follows_from_the_options() -> None:
    assert FedAvg(weight_decay=0.1).optimizer_rule() == Sgd(weight_decay=0.1)
    assert FedAvg(momentum=0.9).optimizer_rule() == MomentumSgd(momentum=0.9)
    assert EFTViT().optimizer_rule() == AdamW(weight_decay=0.05)


# --- schedule -----------------------------------------------------------------------------------------


def scales(rounds: int, **options: Any) -> list[float]:
    method = make_method("fedavg", options)
    return [method.lr_scale(number, rounds) for number in range(1, rounds + 1)]


def test_schedules_of_the_learning_rate() -> None:
    assert scales(4) == [1.0, 1.0, 1.0, 1.0]
    # warm up is linear: k rounds of warm-up: round n has n / (k + 1), and the first one after them the whole
    assert scales(5, warmup_rounds=3) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1])
    # cosine: (1 + cos(pi t)) / 2 at t = 0, 1/4, 2/4, 3/4: 1, (1 + sqrt(1/2)) / 2, 1/2, (1 - sqrt(1/2)) / 2. The
    # last of the rounds still learns
    half = math.sqrt(0.5)
    assert scales(4, schedule="cosine") == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])
    # warm up then cosine: One round at 1/2, then the cosine over the four that are left
    half = math.sqrt(0.5)
    expected = [0.5, 1, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert scales(5, schedule="cosine", warmup_rounds=1) == pytest.approx(expected)


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
def test_every_round_learns(rounds: int, warmup: int) -> None:
    """Whatever the warm-up, even one longer than the run: the factor is in (0, 1]."""
    assert all(0 < scale <= 1 for scale in scales(rounds, schedule="cosine", warmup_rounds=warmup))


# --- groups -------------------------------------------------------------------------------------------


DEEP = {"image_size": 8, "patch_size": 4, "width": 4, "depth": 14, "heads": 1}


def deep_vit() -> PatchViT:
    """14 blocks, so that 1 and 11, 2 and 12 can be confused."""
    return build_vit(SMALL, 5, seed=0, options=DEEP)


@dataclass(frozen=True, kw_only=True)
class Sorted(FedAvg):
    """FedAvg with other groups."""

    patterns: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]]

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return tuple(GroupRule(group, Role.SHARED, patterns) for group, patterns in self.patterns)


@pytest.mark.parametrize("name", METHODS)
def test_every_tensor_is_in_one_group(name: str) -> None:
    """The model's own, also of one with register tokens, those of surgeries, and those that the method adds beside the
    model."""
    method = make_method(name)
    for model, options in ((SMALL, DEEP), ("vit_small_patch14_reg4_dinov2", {"image_size": 56})):
        with torch.device("meta"):
            vit = build_model(method, model, 5, seed=0, options=options)
            members = [tensor for _, names in method.groups(vit).values() for tensor in names]
            assert sorted(members) == sorted(method.tensors(vit))
            assert vit.tensors().keys() <= method.tensors(vit).keys()


def test_patterns_are_anchored() -> None:
    """`blocks.1.*` is block 1: not 11, and not 10 to 13."""

    class One(Sorted):
        patterns = (("one", ("blocks.1.*",)), ("rest", ("*",)))

    groups = One().groups(deep_vit())
    assert {name.split(".")[1] for name in groups["one"][1]} == {"1"}
    assert len(groups["one"][1]) == 12
    assert len(groups["rest"][1]) == 13 * 12 + 8


def test_the_first_pattern_that_matches_a_whole_name_wins() -> None:
    # a pattern is the whole name: `norm.*` is the last norm's two tensors, not `blocks.0.norm1.weight`
    class Norm(Sorted):
        patterns = (("norm", ("norm.*",)), ("rest", ("*",)))

    assert Norm().groups(deep_vit())["norm"][1] == ["norm.weight", "norm.bias"]

    class Twice(Sorted):
        patterns = (("head", ("head.*",)), ("everything", ("*",)), ("never", ("norm.*",)))

    groups = Twice().groups(deep_vit())
    assert groups["head"][1] == ["head.weight", "head.bias"]
    assert groups["never"][1] == []
    assert "head.weight" not in groups["everything"][1]

    class Forgetful(Sorted):
        patterns = (("blocks", ("blocks.*",)),)

    with pytest.raises(ConfigError, check=has_code("FV1114", "'cls_token'")):
        Forgetful().groups(deep_vit())


@dataclass(frozen=True, kw_only=True)
class HeadThenBody(Method):
    """Two phases, as FedRep has them."""

    source: ClassVar[str] = "made for this test"

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("head", Role.LOCAL, ("head.*",)), GroupRule("body", Role.SHARED, ("*",)))

    def forward(self, vit: PatchViT, tensors: Mapping[str, Tensor], images: Images) -> Forward:
        return FedAvg().forward(vit, tensors, images)

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (Train(graph="head", groups=("head",), lr=0.1), Train(graph="both", groups=("head", "body"), lr=0.1))

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return WeightedMean()


def test_a_phase_moves_the_tensors_of_its_groups() -> None:
    """In the model's order, whatever the order of the groups."""
    vit, method = deep_vit(), HeadThenBody()
    head, both = method.phases(vit)
    assert list_trained(method, vit, head) == ["head.weight", "head.bias"]
    assert list_trained(method, vit, both) == list(vit.tensors())


# --- FedAvg's device half -----------------------------------------------------------------------------


def test_fedavg_shares_everything() -> None:
    vit = deep_vit()
    assert FedAvg().groups(vit) == {"model": (Role.SHARED, list(vit.tensors()))}
    (phase,) = FedAvg(epochs=3, lr=0.5, momentum=0.9).phases(vit)
    slots = ("momentum_buffer",)
    assert phase == Train(graph="train", update=UPDATE, groups=("model",), slots=slots, epochs=3, lr=0.5)
    assert FedAvg().mask == 0.0


def test_fedavgs_forward_is_the_model() -> None:
    vit = build_vit(SMALL, 5, seed=0, options={"image_size": 8, "patch_size": 4, "width": 8, "depth": 2, "heads": 2})
    patches = torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0))
    forward = FedAvg().forward(vit, vit.tensors(), Images(patches, None))
    whole = patches.reshape(3, 2, 2, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 8, 8)
    torch.testing.assert_close(forward.logits, vit.vit(whole).detach(), rtol=1e-5, atol=1e-6)
    assert forward.collected == {}


# --- the one model that the server has ----------------------------------------------------------------


GENERIC = {
    "analytic", "apfl", "caff", "ditto", "fed_bias", "fed_head", "fed_lora", "fed_prompt", "fedala", "fedavg",
    "fedbabu", "fedbfpt", "feddbe", "feddf", "feddyn", "fednova", "fedntd", "fedopt", "fedprox", "fedra", "fedrod",
    "ffa_lora", "flexlora", "knn_per", "lora_fair", "moon", "per_fedavg", "personal_analytic", "pfedme", "scaffold",
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_generic_model_needs_nothing_of_a_device(name: str) -> None:
    """Whatever a device has of its own does not change its answers; methods that keep a part on devices have none."""
    method = make_method(name)
    options = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 3, "heads": 2}
    vit = build_model(method, SMALL, 5, seed=0, options=options)
    images = Images(torch.randn(3, 4, 48, generator=torch.Generator().manual_seed(0)), None)
    tensors = method.tensors(vit)
    logits = method.generic_logits(vit, tensors, images)
    if name not in GENERIC:
        assert logits is None
        return
    assert logits is not None
    assert logits.shape == (3, 5)
    own = method.names_with(vit, Role.LOCAL, Role.GENERATED)
    other = method.generic_logits(vit, {**tensors, **{at: tensors[at] + 1 for at in own}}, images)
    torch.testing.assert_close(other, logits, rtol=0, atol=0)
