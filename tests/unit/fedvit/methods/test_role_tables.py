"""Who holds what: the role tables of methods that differ from FedAvg in little else, and what they send.

Sizes are those of timm's models, built without memory for the numbers.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedvit.methods import make_method
from fedvit.methods.base import Method, ModelPatch
from fedvit.methods.local import Local
from fedvit.methods.packed import as_sent
from fedvit.methods.rules.nothing import Nothing
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from tests.support.quadratic import small

SMALL_VIT, BASE_VIT = "vit_small_patch16_224", "vit_base_patch16_224"
IN_2_20 = 2**20
"""The unit of FedPerfix's published figures."""

AVERAGED_WITH_A_LOCAL_PART: list[tuple[str, dict[str, Any]]] = [
    ("fedper", {}),
    ("fedrep", {}),
    ("fedbn", {}),
    ("vanilla_attention", {}),
    ("vanilla_attention", {"parts": "qkv"}),
    *(
        ("personal_part", {"part": part, "with_head": with_head})
        for part in ("patch_embed", "pos_embed", "norm", "attn", "mlp", "head")
        for with_head in (False, True)
    ),
    ("fedperfix", {}),
    ("fedperfix", {"mode": "concat"}),
    ("fedperfix", {"with_last_block": True}),
    ("prefix", {}),
    ("prefix", {"form": "linear", "init": "zero"}),
    ("prompts", {}),
    ("adapters", {}),
    ("adapters", {"shared_dead": True}),
]
ON_A_FROZEN_BACKBONE: list[tuple[str, dict[str, Any]]] = [
    ("fed_head", {}),
    ("fed_bias", {}),
    ("fed_prompt", {}),
    ("fed_prompt", {"head": "local"}),
    ("fedvpt_d", {}),
    ("fedvpt_d", {"head": "shared"}),
    ("fed_lora", {}),
    ("ffa_lora", {}),
]


@cache
def model_on_meta(model: str, classes: int, model_patches: tuple[ModelPatch, ...]) -> PatchViT:
    with torch.device("meta"):
        vit = build_vit(model, classes, seed=0)
        for change in model_patches:
            change.apply(vit, seed=0)
    return vit


def on_meta(name: str, options: dict[str, Any], model: str = SMALL_VIT, classes: int = 100) -> tuple[Method, PatchViT]:
    method = make_method(name, options)
    return method, model_on_meta(model, classes, method.model_patches())


def count_held(name: str, model: str, *roles: Role, classes: int = 100, **options: Any) -> dict[str, int]:
    """Name -> count of numbers of every tensor whose group has one of the roles."""
    method, vit = on_meta(name, options, model, classes)
    tensors = method.tensors(vit)
    return {tensor: tensors[tensor].numel() for tensor in method.names_with(vit, *roles)}


def count_sent_up(name: str, model: str, *, classes: int = 100, **options: Any) -> int:
    return sum(count_held(name, model, Role.SHARED, Role.GENERATED, classes=classes, **options).values())


# --- sizes of messages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "floats"),
    [
        # all of ViT-S/16 without head: 12 blocks of 1 774 464, embedding 371 328, final norm 768
        ("fedper", {}, 21_665_664),
        ("fedrep", {}, 21_665_664),
        ("fedperfix", {}, 21_665_664),  # adapters stay, too
        ("prompts", {}, 21_665_664),
        ("prompts", {"placement": "shallow"}, 21_665_664),
        ("adapters", {}, 21_665_664),
        ("prefix", {}, 21_665_664),
        ("prefix", {"form": "linear"}, 21_665_664),
        ("vanilla_attention", {}, 14_569_344),  # less 12 attentions of 591 360
        ("personal_part", {"part": "attn", "with_head": True}, 14_569_344),
        ("personal_part", {"part": "mlp", "with_head": True}, 7_486_848),  # less 12 MLPs of 1 181 568
        # with the head of 385 * 100 numbers
        ("fedavg", {}, 21_704_164),
        ("fedprox", {}, 21_704_164),
        ("fedbn", {}, 21_704_164 - 19_200),  # less 25 LayerNorms of 2 * 384
        ("vanilla_attention", {"parts": "qkv"}, 21_704_164 - 12 * 3 * 384 * 384),
        ("personal_part", {"part": "patch_embed"}, 21_704_164 - 384 * (3 * 16 * 16 + 1)),
        ("personal_part", {"part": "pos_embed"}, 21_704_164 - 197 * 384),
        ("fedbabu", {}, 21_665_664),
        ("local", {}, 0),
        ("single_vpt", {}, 0),
    ],
)
def test_what_a_vit_small_sends(name: str, options: dict[str, Any], floats: int) -> None:
    assert count_sent_up(name, SMALL_VIT, **options) == floats


@pytest.mark.parametrize(
    ("name", "options", "floats"),
    [
        # C = 100: a head is 769 * 100 = 76 900
        ("fed_head", {}, 76_900),
        # biases: patches 768, a block 768 + 2 304 + 768 + 768 + 3 072 + 768 = 8 448, final norm 768
        ("fed_bias", {}, 102_912 + 76_900),
        ("fed_prompt", {}, 7_680 + 76_900),  # 10 * 768, as published in pFedPG where the head is local
        ("fed_prompt", {"head": "local"}, 7_680),
        ("fedvpt_d", {}, 12 * 7_680),
        ("fedvpt_d", {"tokens": 1}, 9_216),  # published: 9.22e3
        ("fedvpt_d", {"head": "shared"}, 12 * 7_680 + 76_900),
        ("fed_lora", {}, 589_824 + 76_900),  # 12 blocks, q and v, 2 * 16 * 768
        ("fedbfpt", {}, 7_087_872 + 76_900),  # one block
        ("fedbfpt", {"with_norm": True}, 7_087_872 + 76_900 + 1_536),
        ("fedper", {}, 85_798_656),  # published in pFedPG: 8.58e7
    ],
)
def test_what_a_vit_base_sends(name: str, options: dict[str, Any], floats: int) -> None:
    assert count_sent_up(name, BASE_VIT, **options) == floats


@pytest.mark.parametrize(("placement", "numbers"), [("appended", 12 * 10 * 384), ("shallow", 10 * 384)])
def test_fedperfix_prompts_are_in_each_block_or_behind_the_embedding(placement: str, numbers: int) -> None:
    local = count_held("prompts", SMALL_VIT, Role.LOCAL, placement=placement)
    assert local["prompts.tokens"] == numbers


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_frozen_precision_leaves_alone_what_a_test_tunes(precision: str) -> None:
    """FedBABU's head is never trained, but a copy of it is tuned before a test, which takes float32. Fed-Head's
    backbone is never moved."""
    vit = small(3)
    values = {name: value.numpy() for name, value in vit.tensors().items()}
    babu = make_method("fedbabu", {"frozen_precision": precision})
    assert {name: value.dtype for name, value in as_sent(babu, vit, values).items()} == dict.fromkeys(
        values, np.float32
    )
    packed = as_sent(make_method("fed_head", {"frozen_precision": precision}), vit, values)
    assert packed["blocks.0.mlp.fc1.weight"].dtype != np.float32
    assert packed["head.weight"].dtype == np.float32


def test_an_adapter_of_fedperfix() -> None:
    """D = 384, b = 256: D b + b + 2 D b + 2 D = 295 936 numbers per block, of which there are 12."""
    local = count_held("fedperfix", SMALL_VIT, Role.LOCAL)
    blocks = [
        sum(size for name, size in local.items() if name.startswith(f"blocks.{i}.attn.adapter.")) for i in range(12)
    ]
    assert blocks == [295_936] * 12
    assert sum(local.values()) == 12 * 295_936 + 38_500


@pytest.mark.parametrize(
    ("name", "options", "stored", "communicated"),
    [
        ("fedavg", {}, 21.03, 21.03),
        ("fedbn", {}, 21.03, 21.01),
        ("vanilla_attention", {}, 21.03, 13.89),
        ("fedper", {}, 21.03, 20.66),
        ("fedperfix", {}, 24.42, 20.66),
        ("prefix", {"form": "linear"}, 24.41, 20.66),
    ],
)
def test_published_figures_of_fedperfix(name: str, options: dict[str, Any], stored: float, communicated: float) -> None:
    """Its Table 2 counts in units of 2^20 and with timm's head of 1000 classes."""
    assert sum(count_held(name, SMALL_VIT, *Role, classes=1000, **options).values()) / IN_2_20 == pytest.approx(
        stored, abs=0.005
    )
    assert count_sent_up(name, SMALL_VIT, classes=1000, **options) / IN_2_20 == pytest.approx(communicated, abs=0.005)


def test_the_last_block_of_the_released_configuration() -> None:
    """21 665 664 less a block of 1 774 464: 18.97 of 2^20, which is not what was published."""
    floats = count_sent_up("fedperfix", SMALL_VIT, with_last_block=True)
    assert floats == 21_665_664 - 1_774_464
    assert floats / IN_2_20 == pytest.approx(18.97, abs=0.005)


# --- roles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), AVERAGED_WITH_A_LOCAL_PART)
def test_a_local_part_and_the_rest_averaged(name: str, options: dict[str, Any]) -> None:
    """All tensors are trained, none travels that is local, and the server takes the mean."""
    method, vit = on_meta(name, options)
    local = set(method.names_with(vit, Role.LOCAL))
    shared = set(method.names_with(vit, Role.SHARED))
    assert local
    assert local | shared == set(vit.tensors())
    assert not local & shared
    assert method.server_rule(vit) == WeightedMean()


@pytest.mark.parametrize(("name", "options"), ON_A_FROZEN_BACKBONE)
def test_a_frozen_backbone(name: str, options: dict[str, Any]) -> None:
    """Only the head of timm's own tensors moves, or biases; what a patch of the model adds is averaged, or its B."""
    method, vit = on_meta(name, options)
    own = {tensor for tensor, _ in on_meta("fedavg", {})[1].vit.named_parameters()}
    frozen = set(method.names_with(vit, Role.FROZEN))
    updated = {
        tensor for tensor in own if tensor.startswith("head.") or (name == "fed_bias" and tensor.endswith(".bias"))
    }
    added = set(vit.tensors()) - own
    still = {tensor for tensor in added if name == "ffa_lora" and tensor.endswith(".a")}
    assert frozen == (own - updated) | still
    head = Role(options.get("head", "local" if name == "fedvpt_d" else "shared"))
    assert {role for role, names in method.groups(vit).values() if "head.weight" in names} == {head}
    assert added - still <= set(method.names_with(vit, Role.SHARED))
    (phase,) = method.phases(vit)
    assert set(method.names_in(vit, *phase.groups)) == set(vit.tensors()) - frozen
    assert method.server_rule(vit) == WeightedMean()


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("vanilla_attention", {}, "attn"),
        ("vanilla_attention", {}, "head"),
        ("vanilla_attention", {"parts": "qkv"}, "qkv.weight"),
        ("fedbn", {}, "norm"),
        ("fedper", {}, "head"),
        ("fedbabu", {}, "head"),
        ("fedperfix", {}, "adapter"),
        ("fedperfix", {}, "head"),
        ("prefix", {}, "prefix"),
        ("prompts", {}, "prompts"),
        ("adapters", {}, "adapter"),
    ],
)
def test_a_part_that_is_never_in_a_message(name: str, options: dict[str, Any], pattern: str) -> None:
    sent = count_held(name, SMALL_VIT, Role.GLOBAL, Role.SEEDED, Role.SHARED, Role.GENERATED, **options)
    assert sent
    assert not [tensor for tensor in sent if pattern in tensor]
    assert [tensor for tensor in count_held(name, SMALL_VIT, Role.LOCAL, Role.FROZEN, **options) if pattern in tensor]


def test_fedtps_personal_attention_shares_the_rest_of_it() -> None:
    """Only the weights of queries, keys and values stay: their biases, the output projection and the head travel."""
    assert set(count_held("vanilla_attention", SMALL_VIT, Role.LOCAL, parts="qkv")) == {
        f"blocks.{block}.attn.qkv.weight" for block in range(12)
    }


@pytest.mark.parametrize(
    ("part", "tensors"), [("patch_embed", 2), ("pos_embed", 1), ("norm", 50), ("attn", 48), ("mlp", 48), ("head", 2)]
)
def test_one_personal_part(part: str, tensors: int) -> None:
    """Of ViT-S: 25 norms and 12 blocks' attentions and MLPs of two linear layers; the head comes on top if asked."""
    alone = count_held("personal_part", SMALL_VIT, Role.LOCAL, part=part)
    both = count_held("personal_part", SMALL_VIT, Role.LOCAL, part=part, with_head=True)
    assert len(alone) == tensors
    assert set(both) == set(alone) | {"head.weight", "head.bias"}


def layer_norms(vit: PatchViT) -> set[str]:
    return {
        f"{path}.{tensor}"
        for path, module in vit.vit.named_modules()
        if isinstance(module, nn.LayerNorm)
        for tensor, _ in module.named_parameters()
    }


def odd_vit() -> PatchViT:
    """Norms of queries and keys, of the attention's output, in the MLP, and before the first block."""
    with torch.device("meta"):
        vit = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5, qk_norm=True,
            scale_attn_norm=True, scale_mlp_norm=True, pre_norm=True,
        )  # fmt: skip
    return PatchViT("odd", vit)


@pytest.mark.parametrize("model", [SMALL_VIT, "vit_small_patch14_reg4_dinov2", "vit_base_patch32_clip_224", "odd"])
def test_fedbn_knows_every_layer_norm(model: str) -> None:
    """By class, whatever it is called; also where there are registers, layer scales and a norm before the blocks."""
    method = make_method("fedbn")
    vit = odd_vit() if model == "odd" else on_meta("fedbn", {}, model)[1]
    assert set(method.names_with(vit, Role.LOCAL)) == layer_norms(vit)
    assert len(layer_norms(vit)) >= 2 * (2 * vit.depth + 1)


# --- no server ----------------------------------------------------------------------------------------


def test_local_methods_send_nothing() -> None:
    method, vit = on_meta("local", {})
    assert method.names_with(vit, Role.LOCAL) == list(vit.tensors())
    assert isinstance(method.server_rule(vit), Nothing)
    method, vit = on_meta("single_vpt", {})
    assert isinstance(method, Local)
    assert method.names_with(vit, Role.LOCAL) == ["head.weight", "head.bias", "prompts.tokens"]
    assert set(method.names_with(vit, Role.FROZEN)) == set(vit.tensors()) - set(method.names_with(vit, Role.LOCAL))
    assert isinstance(method.server_rule(vit), Nothing)


# --- defaults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedperfix", "prefix", "prompts", "adapters"])
def test_fedperfixs_training(name: str) -> None:
    """E = 10, batches of 64, plain SGD at 0.01."""
    method = make_method(name)
    assert (method.epochs, method.batch_size, method.optimizer, method.lr) == (10, 64, "sgd", 0.01)
    assert (method.momentum, method.weight_decay) == (0, 0)
