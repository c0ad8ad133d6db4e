"""What holds for every addition to a model."""

import collections
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

from export.trace import to_onnx, trace
from fedvit.errors import ConfigError
from fedvit.models import MODEL_PATCHES, SMALL, ExtraHead, FreePrefix, KVAdapter, Lora, MlpAdapter, Prompts, build_vit
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT
from tests.support.codes import has_code

ALL: dict[str, ModelPatch] = {
    "extra head": ExtraHead(),
    "adapter, add": KVAdapter(bottleneck=8),
    "adapter, concat": KVAdapter(bottleneck=8, mode="concat"),
    "prefix, literal zero": FreePrefix(tokens=1, init="zero"),
    "prefix, literal": FreePrefix(tokens=3),
    "prefix, linear zero": FreePrefix(form="linear", init="zero"),
    "prefix, linear": FreePrefix(form="linear"),
    "prompts, shallow": Prompts(tokens=3),
    "prompts, deep": Prompts(tokens=3, placement="deep"),
    "prompts, appended": Prompts(tokens=3, placement="appended"),
    "adapter behind the MLP": MlpAdapter(bottleneck=8),
    "adapter behind the MLP, dead": MlpAdapter(bottleneck=8, shared_dead=True),
    "LoRA": Lora(rank=4),
}
BEGINS_AS_ITS_BASE = {
    "extra head",
    "prefix, linear zero",
    "adapter behind the MLP",
    "adapter behind the MLP, dead",
    "LoRA",
}
EVERYWHERE = pytest.mark.parametrize("name", ALL)

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


def test_table_lists_every_model_patch() -> None:
    assert {type(patch) for patch in ALL.values()} == set(MODEL_PATCHES.values()) == set(ModelPatch.__subclasses__())
    for name, patch in MODEL_PATCHES.items():
        assert patch.__module__ == f"fedvit.models.{name}"


# --- names and values ---------------------------------------------------------------------------------


@EVERYWHERE
def test_model_patch_only_adds_tensors(make: Make, name: str) -> None:
    """Names, order, values: what was there is as it was."""
    before = make().tensors()
    after = make(ALL[name]).tensors()
    assert [tensor for tensor in after if tensor in before] == list(before)
    assert len(after) > len(before)
    for tensor, value in before.items():
        assert torch.equal(after[tensor], value), tensor


@EVERYWHERE
def test_values_follow_from_the_seed(name: str) -> None:
    def values(seed: int, model_seed: int = 1) -> dict[str, Tensor]:
        vit = build_vit(SMALL, 5, seed=model_seed, options={"width": 16, "heads": 2, "depth": 2})
        base = set(vit.tensors())
        ALL[name].apply(vit, seed)
        return {tensor: value for tensor, value in vit.tensors().items() if tensor not in base}

    first = values(3)
    torch.manual_seed(999)
    again = values(3, model_seed=2)
    assert all(torch.equal(first[tensor], again[tensor]) for tensor in first)
    other = values(4)
    for tensor in first:
        assert torch.equal(first[tensor], other[tensor]) == (not first[tensor].any()), tensor  # zeros have no seed


@EVERYWHERE
def test_nobody_elses_random_numbers_are_touched(name: str) -> None:
    vit = build_vit(SMALL, 5, seed=1, options={"depth": 1})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ALL[name].apply(vit, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_model_patches_draw_different_numbers() -> None:
    """Of one seed: else the first tensor of an adapter would repeat numbers of the model's patch embedding."""
    with seed_random(1, "one"):
        one = torch.rand(4)
    with seed_random(1, "other"):
        other = torch.rand(4)
    torch.manual_seed(1)
    assert not torch.equal(one, other)
    assert not torch.equal(one, torch.rand(4))


@EVERYWHERE
def test_blocks_do_not_begin_equal(make: Make, name: str) -> None:
    tensors = make(ALL[name]).tensors()
    for tensor, value in tensors.items():
        twin = tensor.replace("blocks.0.", "blocks.1.")
        if tensor != twin and value.any():
            assert not torch.equal(value, tensors[twin]), tensor


# --- what is computed ---------------------------------------------------------------------------------


@EVERYWHERE
def test_the_shape_of_logits_stays_and_their_values_mostly_change(
    make: Make, logits: Logits, patches: Tensor, name: str
) -> None:
    base = logits(make(), patches)
    changed = logits(make(ALL[name]), patches)
    assert changed.shape == base.shape == (3, 5)
    difference = (changed - base).abs().max()
    assert difference < 1e-12 if name in BEGINS_AS_ITS_BASE else difference > 1e-4


@EVERYWHERE
@pytest.mark.parametrize("cut", [1, 2])
def test_split_then_join_equals_the_whole(make: Make, logits: Logits, patches: Tensor, name: str, cut: int) -> None:
    """EFTViT runs the first blocks on the device and the rest on the server."""
    vit = make(ALL[name], stir=True)
    with torch.no_grad():
        between = vit.run_blocks(vit.embed(patches), 0, cut)
        joined = vit.classify(vit.run_blocks(between, cut, vit.depth))
    torch.testing.assert_close(joined, logits(vit, patches), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [None, *ALL])
@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_class_token_alone_is_that_of_all_tokens(make: Make, patches: Tensor, name: str | None, last: int) -> None:
    """Asked for behind any block, from the embedding or from the block before it: the same numbers, and the same
    gradient of every tensor, although the block computes no other token."""
    vit = make(*([ALL[name]] if name else []), stir=True)

    def grads(first: int, run: Callable[[PatchViT, Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        def loss(at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            def body(vit: PatchViT) -> Tensor:
                return vit.features(run(vit, vit.run_blocks(vit.embed(patches), 0, first)))

            out: Tensor = vit.call(at, body)
            return out.sin().sum(), out

        gradients, (_, out) = grad_and_value(loss, has_aux=True)(vit.tensors())
        return gradients, out

    for first in (0, last - 1):
        by_all, wanted = grads(first, lambda vit, x, first=first: vit.run_blocks(x, first, last))
        by_one, out = grads(first, lambda vit, x, first=first: vit.run_to_class(x, first, last))
        torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
        for tensor, value in by_all.items():
            torch.testing.assert_close(by_one[tensor], value, rtol=1e-10, atol=1e-12, msg=tensor)


@EVERYWHERE
def test_what_is_computed_again_is_the_same(make: Make, patches: Tensor, name: str) -> None:
    """Blocks that keep only what enters them give the same logits, and the same gradient of every tensor; and after it
    the model is as it was."""
    vit = make(ALL[name], stir=True)

    def loss(at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out: Tensor = vit.call(at, lambda vit: vit.classify(vit.run_to_class(vit.embed(patches), 0)))
        return out.sin().sum(), out

    gradients, (_, wanted) = grad_and_value(loss, has_aux=True)(vit.tensors())
    with vit.recomputing(True):
        again, (_, out) = grad_and_value(loss, has_aux=True)(vit.tensors())
    assert not vit.recompute
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for tensor, value in gradients.items():
        torch.testing.assert_close(again[tensor], value, rtol=1e-10, atol=1e-12, msg=tensor)


@EVERYWHERE
def test_kept_patches_may_come_in_any_order(make: Make, logits: Logits, patches: Tensor, name: str) -> None:
    vit = make(ALL[name], stir=True)
    kept = torch.tensor([[2, 0, 3, 1]]).expand(3, -1)
    with torch.no_grad():
        mixed = vit.classify(vit.run_blocks(vit.embed(patches.take_along_dim(kept[..., None], 1), kept), 0, vit.depth))
    torch.testing.assert_close(mixed, logits(vit, patches), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "base",
    [
        {"qk_norm": True},
        {"scale_attn_norm": True},
        {"qkv_bias": False, "reg_tokens": 2},
        {"init_values": 0.1, "no_embed_class": True},
        {"attn_drop_rate": 0.5, "proj_drop_rate": 0.5},  # a model in evaluation drops nothing
    ],
)
@pytest.mark.parametrize(
    "patch",
    [KVAdapter(bottleneck=8, scale=0), FreePrefix(form="linear", init="zero"), Lora(rank=4), MlpAdapter(bottleneck=8)],
)
def test_every_part_of_timms_attention_still_works(
    make: Make, logits: Logits, patches: Tensor, base: dict[str, Any], patch: ModelPatch
) -> None:
    operated = logits(make(patch, base=base), patches)
    torch.testing.assert_close(operated, logits(make(base=base), patches), rtol=0, atol=1e-12)


def gradients(vit: PatchViT, patches: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a loss that reads every head."""

    def loss(values: dict[str, Tensor]) -> Tensor:
        def body(vit: PatchViT) -> Tensor:
            features = vit.features(vit.run_blocks(vit.embed(patches), 0, vit.depth))
            names = [name for name in ("head", "personal_head") if f"{name}.weight" in values]
            return torch.stack([vit.head(features, name) for name in names]).sum(0)

        chosen = torch.log_softmax(vit.call(values, body), dim=1)[:, :3]
        return -chosen.diagonal().sum()

    return torch.func.grad(loss)(values)


@pytest.mark.parametrize("name", [name for name in ALL if "dead" not in name])
def test_no_tensor_is_dead(make: Make, patches: Tensor, name: str) -> None:
    """At the second step each has a gradient: at the first, what is multiplied by a zero has none."""
    vit = make(ALL[name])
    values = vit.tensors()
    for _ in range(2):
        grads = gradients(vit, patches, values)
        values = {tensor: value - 0.1 * grads[tensor] for tensor, value in values.items()}
    for tensor, grad in grads.items():
        assert grad.abs().max() > 1e-9, tensor


@pytest.mark.parametrize(
    "first", [KVAdapter(bottleneck=8), FreePrefix(tokens=3), Lora(rank=4)], ids=lambda s: type(s).__name__
)
def test_order_of_model_patches_does_not_matter(make: Make, logits: Logits, patches: Tensor, first: ModelPatch) -> None:
    """Keys that are added need one per token, keys that are joined come with their own."""
    second = FreePrefix(tokens=3) if isinstance(first, KVAdapter) else KVAdapter(bottleneck=8)
    one, other = make(first, second), make(second, first)
    assert one.tensors().keys() == other.tensors().keys()
    torch.testing.assert_close(logits(one, patches), logits(other, patches), rtol=0, atol=1e-12)


# --- graphs -------------------------------------------------------------------------------------------


def step(vit: PatchViT) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = {name: value for name, value in inputs.items() if name != "patches"}

        def loss(tensors: dict[str, Tensor]) -> Tensor:
            def body(vit: PatchViT) -> Tensor:
                out = vit.run_blocks(vit.embed(inputs["patches"]), 0, vit.depth)
                total = vit.classify(out)
                if "personal_head.weight" in tensors:
                    total = total + vit.head(vit.features(out, normed=False), "personal_head")
                return total

            return torch.log_softmax(vit.call(tensors, body), dim=1).square().sum()

        grads, value = grad_and_value(loss)(tensors)
        return {"loss": value} | {f"grad/{name}": grad for name, grad in grads.items()}

    return run


def step_inputs(vit: PatchViT) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    inputs = {name: value.float() for name, value in vit.tensors().items()}
    return inputs | {"patches": torch.randn(2, vit.patches, 192, generator=draw)}


@EVERYWHERE
def test_a_step_traces_into_operators_that_export(make: Make, name: str) -> None:
    depth = 2 if name == "prompts, deep" else 1  # these are replaced from the second block on
    vit = make(ALL[name], stir=True, depth=depth).float()
    traced = trace(step(vit), step_inputs(vit))
    used = {str(node.target) for node in traced.module.graph.nodes if node.op == "call_function"}
    assert not {target for target in used if "scatter" in target or "conv" in target or "attention" in target}


@pytest.mark.parametrize(
    "patches",
    [
        [KVAdapter(bottleneck=8, mode="concat"), Lora(rank=4), Prompts(tokens=2), ExtraHead()],
        [KVAdapter(bottleneck=8), FreePrefix(tokens=2), Prompts(tokens=2, placement="appended"), MlpAdapter()],
    ],
    ids=["concatenated", "added"],
)
def test_an_exported_step_computes_what_torch_does(make: Make, patches: list[ModelPatch]) -> None:
    vit = make(*patches, stir=True, depth=1).float()
    inputs = step_inputs(vit)
    content = to_onnx(trace(step(vit), inputs))
    used = collections.Counter(node.op_type for node in onnx.load_from_string(content).graph.node)
    assert not {operator for operator in used if operator.startswith(("Scatter", "Conv"))}
    session = onnxruntime.InferenceSession(content)
    got = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    for (name, want), value in zip(step(vit)(inputs).items(), got, strict=True):
        scale = float(want.abs().max())
        np.testing.assert_allclose(value, want.detach().numpy(), rtol=0, atol=1e-5 * max(1.0, scale), err_msg=name)


# --- models without a place ---------------------------------------------------------------------------


@EVERYWHERE
def test_model_patch_is_applied_once(make: Make, logits: Logits, patches: Tensor, name: str) -> None:
    vit = make(ALL[name], stir=True)
    before = logits(vit, patches)
    with pytest.raises(ConfigError, check=has_code("FV1112", "'vit_small_images'")):
        ALL[name].apply(vit, 3)
    assert torch.equal(logits(vit, patches), before)


@EVERYWHERE
def test_a_model_can_be_planned_without_memory(name: str) -> None:
    """On torch's device "meta", where a coordinator checks its configuration."""
    with torch.device("meta"):
        vit = build_vit(SMALL, 5, seed=1, options={"depth": 2})
        ALL[name].apply(vit, 3)
    assert all(value.is_meta for value in vit.tensors().values())


@pytest.mark.parametrize("patch", [KVAdapter(), FreePrefix(), Lora(), MlpAdapter()], ids=lambda s: type(s).__name__)
def test_blocks_that_are_not_plain(patch: ModelPatch) -> None:
    with torch.device("meta"):
        vit = build_vit("vit_small_patch16_18x2_224", 5, seed=1)
        with pytest.raises(ConfigError, check=has_code("FV1112", "'vit_small_patch16_18x2_224'")):
            patch.apply(vit, 3)


@pytest.mark.parametrize("patch", [KVAdapter(), FreePrefix(), Lora()], ids=lambda s: type(s).__name__)
def test_attention_that_is_not_plain(make: Make, patch: ModelPatch) -> None:
    with pytest.raises(ConfigError):
        make(patch, base={"attn_layer": "diff"})


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "options"),
    [
        (KVAdapter, {"bottleneck": 0}),
        (KVAdapter, {"bottleneck": 8.0}),
        (KVAdapter, {"scale": float("nan")}),
        (KVAdapter, {"scale": "1"}),
        (KVAdapter, {"mode": "sum"}),
        (FreePrefix, {"tokens": True}),
        (FreePrefix, {"init": "ones"}),
        (FreePrefix, {"form": "code"}),
        (FreePrefix, {"scale": float("inf")}),
        (Prompts, {"tokens": 0}),
        (Prompts, {"placement": "end"}),
        (MlpAdapter, {"bottleneck": -1}),
        (MlpAdapter, {"shared_dead": 1}),
        (Lora, {"rank": 0}),
        (Lora, {"alpha": None}),
        (ExtraHead, {"name": "a.b"}),
        (ExtraHead, {"name": 3}),
        (ExtraHead, {"init": "copy"}),
    ],
)
def test_bad_options(patch: type[ModelPatch], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104")):
        patch(**options)


@EVERYWHERE
def test_options_do_not_change(name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        ALL[name].scale = 3  # type: ignore[attr-defined]
