"""The model that is traced must be timm's model: compared in float64, where rounding leaves no room for doubt."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.data.images import select, unfold
from fedvit.errors import ConfigError
from fedvit.models import SMALL, build_vit
from fedvit.models.vit import PatchViT, _TakeRows
from tests.support.codes import has_code

TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}

POOLED: dict[str, dict[str, Any]] = {
    "mean of the patches": {"global_pool": "avg", "class_token": False},
    "mean beside class token and registers": {"global_pool": "avg", "reg_tokens": 2},
    "mean behind the norm": {"global_pool": "avg", "fc_norm": False},
    "mean of all tokens": {"global_pool": "avg", "reg_tokens": 1, "pool_include_prefix": True},
    "registers without positions": {
        "global_pool": "avg", "class_token": False, "reg_tokens": 2, "no_embed_class": True,
    },
    # SigLIP
    "attention": {"global_pool": "map", "class_token": False},
    "attention beside registers": {"global_pool": "map", "class_token": False, "reg_tokens": 2},
}  # fmt: skip
"""Models whose head reads no class token."""


def _pool(options: dict[str, Any]) -> PatchViT:
    return PatchViT("made here", timm_vit(**options))


MODELS: dict[str, Callable[[], PatchViT]] = {
    "small images": lambda: build_vit(SMALL, 10, seed=1, options=TINY),
    "heads of their own width": lambda: build_vit(
        SMALL, 10, seed=1, options=TINY | {"head_width": 24, "qkv_bias": False, "registers": 2}
    ),
    "vit_tiny": lambda: build_vit("vit_tiny_patch16_224", 10, seed=1, options={"image_size": 64}),
    "vit_tiny, its own size": lambda: build_vit("vit_tiny_patch16_224", 1000, seed=1),
    "vit_tiny, other patches": lambda: build_vit(
        "vit_tiny_patch16_224", 10, seed=1, options={"image_size": 24, "patch_size": 4}
    ),
    "deit_tiny": lambda: build_vit("deit_tiny_patch16_224", 10, seed=1, options={"image_size": 64}),
    # four registers, positions for patches only, scaled branches
    "registers": lambda: build_vit("vit_small_patch14_reg4_dinov2", 10, seed=1, options={"image_size": 56}),
    "registers with positions": lambda: PatchViT("made here", timm_vit(reg_tokens=2)),
    "norm before the blocks, no bias": lambda: PatchViT("made here", timm_vit(pre_norm=True)),
    # DINOv2 without registers: its class token has a position
    "class token and scaled branches": lambda: build_vit(
        "vit_small_patch14_dinov2", 10, seed=1, options={"image_size": 28}
    ),
    **{name: partial(_pool, options) for name, options in POOLED.items()},
}


def timm_vit(**options: Any) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return VisionTransformer(
            img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=10, **options
        )


def exact(vit: PatchViT) -> PatchViT:
    """In float64, and with every tensor random: zeros (registers, biases) would hide what is forgotten."""
    vit = vit.double()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in vit.parameters():
            value += 0.02 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
    return vit


@pytest.fixture(scope="module")
def small() -> PatchViT:
    return exact(MODELS["small images"]())


def pictures(vit: PatchViT, count: int = 3) -> tuple[Tensor, Tensor]:
    """(B, 3, S, S) for timm, and the same cut into patches as a device cuts them."""
    images = np.random.default_rng(3).normal(size=(count, vit.image_size, vit.image_size, 3))
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(unfold(images, vit.patch_size))


def logits(vit: PatchViT, patches: Tensor, kept: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return vit.classify(vit.run_blocks(vit.embed(patches, kept), 0, vit.depth))


def rows(vit: PatchViT, keep: int, count: int = 3) -> Tensor:
    """Kept patches: distinct, in no order, others for each sample."""
    draw = torch.Generator().manual_seed(5)
    return torch.stack([torch.randperm(vit.patches, generator=draw)[:keep] for _ in range(count)])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


# --- the same as timm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_timms(name: str) -> None:
    vit = exact(MODELS[name]())
    images, patches = pictures(vit)
    with torch.no_grad():
        stock = vit.vit(images)
    close(logits(vit, patches), stock)
    everything = torch.arange(vit.patches).expand(3, -1)
    close(logits(vit, patches, everything), stock)


@pytest.mark.parametrize("name", ["small images", "registers with positions"])
def test_the_order_of_patches_does_not_matter(name: str) -> None:
    vit = exact(MODELS[name]())
    images, patches = pictures(vit)
    shuffled = rows(vit, vit.patches)
    mixed = torch.from_numpy(select(patches.numpy(), shuffled.numpy()))
    assert not torch.equal(mixed, patches)
    with torch.no_grad():
        close(logits(vit, mixed, shuffled), vit.vit(images))


def test_patches_at_the_wrong_place_are_noticed(small: PatchViT) -> None:
    """The counterpart of the test above: without positions it would pass."""
    _, patches = pictures(small)
    mixed = torch.from_numpy(select(patches.numpy(), rows(small, small.patches).numpy()))
    assert (logits(small, mixed) - logits(small, patches)).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["small images", "registers", "registers with positions"])
def test_kept_tokens_carry_their_own_position(name: str) -> None:
    """Row j of the embedding is conv(image)[kept j] + pos[of patch kept j]; prefix tokens come first, with their own
    positions where there are such."""
    vit = exact(MODELS[name]())
    images, patches = pictures(vit)
    kept = rows(vit, 5)
    with torch.no_grad():
        tokens = vit.embed(torch.from_numpy(select(patches.numpy(), kept.numpy())), kept)
        projected = vit.vit.patch_embed(images)
    assert vit.vit.pos_embed is not None
    position = vit.vit.pos_embed[0]
    before = position.shape[0] - vit.patches
    assert tokens.shape == (3, vit.prefix_tokens + 5, vit.width)
    for sample in range(3):
        for row, patch in enumerate(kept[sample]):
            close(tokens[sample, vit.prefix_tokens + row], projected[sample, patch] + position[before + patch])
    whole = vit.embed(patches)
    close(tokens[:, : vit.prefix_tokens], whole[:, : vit.prefix_tokens])


@pytest.mark.parametrize("keep", [1, 4, 15])
def test_embed_then_mask_equals_select_then_embed(small: PatchViT, keep: int) -> None:
    """The paper embeds the whole image and drops tokens; a device selects patches and embeds only those."""
    _, patches = pictures(small)
    kept = rows(small, keep)
    with torch.no_grad():
        masked = small.embed(patches)[:, 1:].take_along_dim(kept[..., None], dim=1)
        selected = small.embed(patches.take_along_dim(kept[..., None], dim=1), kept)
    close(selected[:, 1:], masked)


def test_reversing_the_kept_patches_leaves_the_logits(small: PatchViT) -> None:
    _, patches = pictures(small)
    kept = rows(small, 6)
    backwards = kept.flip(1)
    forward = logits(small, patches.take_along_dim(kept[..., None], dim=1), kept)
    close(logits(small, patches.take_along_dim(backwards[..., None], dim=1), backwards), forward)
    assert (forward - logits(small, patches)).abs().max() > 1e-6  # masking does change something


@pytest.mark.parametrize("first", range(4))
def test_split_then_join_equals_the_whole(small: PatchViT, first: int) -> None:
    images, patches = pictures(small)
    with torch.no_grad():
        features = small.run_blocks(small.embed(patches), 0, first)
        joined = small.classify(small.run_blocks(features, first, small.depth))
        close(joined, small.vit(images))


# --- tensors from outside -----------------------------------------------------------------------------


def test_call_runs_with_the_tensors_given(small: PatchViT) -> None:
    """The model's own values are neither used nor changed."""
    other = exact(build_vit(SMALL, 10, seed=2, options=TINY))
    _, patches = pictures(small)
    before = {name: value.clone() for name, value in small.tensors().items()}
    with torch.no_grad():
        got = small.call(other.tensors(), lambda vit: logits(vit, patches))
    close(got, logits(other, patches))
    for name, value in small.tensors().items():
        assert torch.equal(value, before[name])


def test_tensors_have_timms_names_and_shapes() -> None:
    """12 in each of the three blocks, 4 that embed, 2 of the norm and 2 of the head: 44."""
    vit = MODELS["small images"]()
    tensors = vit.tensors()
    assert {name: value.shape for name, value in tensors.items()} == {
        name: value.shape for name, value in vit.vit.named_parameters()
    }
    assert len(tensors) == 44
    assert not any(value.requires_grad for value in tensors.values())


def test_features_and_a_head_are_the_classifier(small: PatchViT) -> None:
    """The class token behind timm's final norm is what its head reads."""
    images, patches = pictures(small)
    with torch.no_grad():
        x = small.run_blocks(small.embed(patches), 0, small.depth)
        close(small.features(x), small.vit.forward_head(small.vit.forward_features(images), pre_logits=True))
        close(small.features(x, normed=False), x[:, 0])
        close(small.vit.norm(small.features(x, normed=False)), small.features(x))
        close(small.head(small.features(x)), small.classify(x))


def test_a_norm_behind_the_pool() -> None:
    """timm can move the final norm behind the pool; features are what it gives."""
    vit = exact(PatchViT("made here", timm_vit(fc_norm=True)))
    images, patches = pictures(vit)
    with torch.no_grad():
        close(logits(vit, patches), vit.vit(images))
        x = vit.run_blocks(vit.embed(patches), 0, vit.depth)
        close(vit.vit.fc_norm(vit.features(x, normed=False)), vit.features(x))


@pytest.mark.parametrize("name", POOLED)
def test_features_of_models_without_a_class_token_to_read(name: str) -> None:
    """All tokens reach the head, also through `run_to_class`; their head reads what timm's reads."""
    vit = exact(MODELS[name]())
    images, patches = pictures(vit)
    with torch.no_grad():
        x = vit.run_to_class(vit.embed(patches), 0)
        assert x.shape == (3, vit.prefix_tokens + vit.patches, vit.width)
        close(vit.features(x), vit.vit.forward_head(vit.vit.forward_features(images), pre_logits=True))
        assert vit.features(x, normed=False).shape == (3, vit.width)


@pytest.mark.parametrize("name", ["registers with positions", "mean beside class token and registers", "attention"])
def test_every_tensor_takes_part(name: str) -> None:
    """Every tensor has a gradient, also a class token that the mean omits: the patches attend to it."""
    vit = exact(MODELS[name]())
    _, patches = pictures(vit)
    values = {name: value.clone().requires_grad_() for name, value in vit.tensors().items()}
    out = vit.call(values, lambda vit: vit.classify(vit.run_to_class(vit.embed(patches), 0)))
    out.square().sum().backward()
    for key, value in values.items():
        assert value.grad is not None, key
        assert value.grad.abs().max() > 0, key


def test_a_part_is_added_once() -> None:
    """Its tensors are named after it, behind those of the part that it was given to."""
    vit = MODELS["small images"]()
    vit.add("blocks.1.mlp.more", torch.nn.Linear(2, 3))
    assert vit.tensors()["blocks.1.mlp.more.weight"].shape == (3, 2)
    with pytest.raises(ConfigError, check=has_code("FV1112", "'blocks.1.mlp.more'")):
        vit.add("blocks.1.mlp.more", torch.nn.Linear(2, 3))
    with pytest.raises(ConfigError, check=has_code("FV1112", "'head'")):
        vit.add("head", torch.nn.Linear(2, 3))


def test_facts_of_a_model() -> None:
    """224 / 16 = 14 patches a side; DINOv2 has a class token and 4 registers, and 56 / 14 = 4 patches a side."""
    vit = build_vit("vit_tiny_patch16_224", 10, seed=0)
    assert (vit.image_size, vit.patch_size, vit.patches, vit.width, vit.depth) == (224, 16, 196, 192, 12)
    assert (vit.prefix_tokens, vit.mean_std) == (1, ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    dino = MODELS["registers"]()
    assert (dino.patches, dino.prefix_tokens) == (16, 5)
    assert dino.mean_std == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert MODELS["small images"]().mean_std == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert (vit.classes, dino.classes) == (10, 10)


def test_options_of_the_small_model_that_change_its_tensors() -> None:
    """2 heads of 24 make an inner width of 48: qkv (3 * 48, 32), proj (32, 48); two registers have positions."""
    shapes = {name: tuple(value.shape) for name, value in MODELS["heads of their own width"]().tensors().items()}
    assert shapes["blocks.2.attn.qkv.weight"] == (144, 32)
    assert shapes["blocks.2.attn.proj.weight"] == (32, 48)
    assert "blocks.2.attn.qkv.bias" not in shapes
    assert shapes["reg_token"] == (1, 2, 32)
    assert shapes["pos_embed"] == (1, 19, 32)


def test_wide_heads_begin_as_timms_layers() -> None:
    """Normal with 0.02, biases 0; torch's own rule would be uniform, with a standard deviation of 0.07 at width 64."""
    tensors = build_vit(SMALL, 10, seed=1, options={"head_width": 32, "depth": 1}).tensors()
    for layer in ("qkv", "proj"):
        assert 0.018 < tensors[f"blocks.0.attn.{layer}.weight"].std() < 0.022
        assert not tensors[f"blocks.0.attn.{layer}.bias"].any()


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("vit_tiny_patch16_224", 1),
        ("vit_small_patch32_224", 1),
        ("vit_base_patch16_224", 1),
        ("vit_base_patch16_224.augreg_in21k", 1),
        ("deit_tiny_patch16_224", 1),
        ("deit_small_patch16_224", 1),
        ("deit_base_patch16_224", 1),
        ("deit3_small_patch16_224", 1),
        ("vit_base_patch14_dinov2", 1),
        ("vit_small_patch14_reg4_dinov2", 5),
        ("vit_base_patch14_reg4_dinov2", 5),
        ("vit_base_patch16_siglip_224", 0),
        ("vit_base_patch16_reg4_gap_256", 4),
        ("beit3_base_patch16_224", 1),
    ],
)
def test_models_of_timm_by_name(name: str, prefix: int) -> None:
    with torch.device("meta"):
        vit = build_vit(name, 10, seed=0)
    assert (vit.name, vit.classes, vit.prefix_tokens) == (name, 10, prefix)


# --- seeds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [(SMALL, TINY), ("vit_tiny_patch16_224", {"image_size": 32})])
def test_weights_follow_from_the_seed(name: str, options: dict[str, Any]) -> None:
    first = build_vit(name, 10, seed=3, options=options).tensors()
    torch.manual_seed(999)
    again = build_vit(name, 10, seed=3, options=options).tensors()
    other = build_vit(name, 10, seed=4, options=options).tensors()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert not torch.equal(first["blocks.0.attn.qkv.weight"], other["blocks.0.attn.qkv.weight"])


def test_nobody_elses_random_numbers_are_touched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_vit(SMALL, 10, seed=3, options=TINY)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ConfigError):
        build_vit("resnet18d", 10, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# --- taking rows --------------------------------------------------------------------------------------


def test_taking_rows_has_the_gradient_of_indexing() -> None:
    """Rows 2 and 0 come twice, so their gradients add up; row 3 is never taken and gets none."""
    table = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    taken = torch.tensor([[2, 0, 2], [4, 0, 1]])
    assert torch.autograd.gradcheck(lambda table: _TakeRows.apply(table, taken), (table,))
    weights = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad((_TakeRows.apply(table, taken) * weights).sum(), table)
    (plain,) = torch.autograd.grad((table[taken] * weights).sum(), table)
    close(ours, plain)
    assert torch.equal(_TakeRows.apply(table, taken), table[taken])
    close(ours[2], weights[0, 0] + weights[0, 2])
    assert not ours[3].any()


def test_the_position_gradient_equals_timms(small: PatchViT) -> None:
    """Through the whole model, with all patches in another order: as if they had not been moved."""
    images, patches = pictures(small)
    shuffled = rows(small, small.patches)
    values = {name: value.clone().requires_grad_() for name, value in small.tensors().items()}
    mixed = patches.take_along_dim(shuffled[..., None], dim=1)
    out = small.call(values, lambda vit: vit.classify(vit.run_blocks(vit.embed(mixed, shuffled), 0, vit.depth)))
    out.square().sum().backward()
    small.zero_grad()
    small.vit(images).square().sum().backward()
    for name, value in small.vit.named_parameters():
        torch.testing.assert_close(values[name].grad, value.grad, rtol=1e-9, atol=1e-12, msg=name)
    small.zero_grad()


# --- pretrained weights -------------------------------------------------------------------------------


def test_a_checkpoint_replaces_all_but_the_head(tmp_path: Path) -> None:
    """Its 1000 classes are not ours; the rest is bit-equal, and the head follows from the seed."""
    source = build_vit("vit_tiny_patch16_224", 1000, seed=1, options={"image_size": 32})
    path = tmp_path / "weights.pth"
    torch.save(source.vit.state_dict(), path)
    options = {"image_size": 32}
    loaded = build_vit("vit_tiny_patch16_224", 5, seed=2, options=options, pretrained=str(path)).tensors()
    fresh = build_vit("vit_tiny_patch16_224", 5, seed=2, options=options).tensors()
    for name, value in source.tensors().items():
        if not name.startswith("head."):
            assert torch.equal(loaded[name], value), name
    assert torch.equal(loaded["head.weight"], fresh["head.weight"])


def test_a_checkpoint_of_safetensors(tmp_path: Path) -> None:
    """For pictures of another size: positions are resampled, everything else is bit-equal."""
    source = build_vit("vit_tiny_patch16_224", 7, seed=1, options={"image_size": 48})
    path = tmp_path / "weights.safetensors"
    save_file(source.vit.state_dict(), path)
    same = build_vit("vit_tiny_patch16_224", 5, seed=2, options={"image_size": 48}, pretrained=str(path)).tensors()
    small = build_vit("vit_tiny_patch16_224", 5, seed=2, options={"image_size": 32}, pretrained=str(path)).tensors()
    assert torch.equal(same["pos_embed"], source.tensors()["pos_embed"])
    assert small["pos_embed"].shape == (1, 5, 192)
    for name, value in source.tensors().items():
        if not name.startswith("head.") and name != "pos_embed":
            assert torch.equal(same[name], value), name
            assert torch.equal(small[name], value), name


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"norm.weight": torch.ones(7)},
        lambda state: {key: value for key, value in state.items() if key != "cls_token"},
    ],
)
def test_safetensors_that_do_not_fit(tmp_path: Path, change: Callable[..., dict[str, Tensor]]) -> None:
    source = build_vit("vit_tiny_patch16_224", 10, seed=1, options={"image_size": 32}).vit.state_dict()
    path = tmp_path / "weights.safetensors"
    save_file(change(source), path)
    with pytest.raises(ConfigError, check=has_code("FV1113")):
        build_vit("vit_tiny_patch16_224", 10, seed=0, options={"image_size": 32}, pretrained=str(path))


def test_a_checkpoint_that_is_missing_or_none_or_of_another_model(tmp_path: Path) -> None:
    missing, damaged, other = (tmp_path / f"{name}.pth" for name in ("missing", "damaged", "other"))
    damaged.write_bytes(b"not a checkpoint")
    torch.save(MODELS["small images"]().vit.state_dict(), other)
    for path, named in ((missing, repr(str(missing))), (damaged, "'vit_tiny_patch16_224'"), (other, repr(str(other)))):
        with pytest.raises(ConfigError, check=has_code("FV1113", named)) as refused:
            build_vit("vit_tiny_patch16_224", 10, seed=0, pretrained=str(path))
        assert "blocks" not in str(refused.value)  # the first thing that does not fit is told, not all 150


@pytest.mark.parametrize(
    ("rename", "missing"),
    [
        (lambda name: f"encoder.{name}", "cls_token"),
        (lambda name: name.replace("blocks.11.", "blocks.12."), "blocks.11.attn.qkv.weight"),
    ],
)
def test_a_checkpoint_without_some_of_the_tensors(tmp_path: Path, rename: Callable[[str], str], missing: str) -> None:
    """timm would go on with random ones: a run that its operator believes to be pretrained."""
    source = build_vit("vit_tiny_patch16_224", 10, seed=1, options={"image_size": 32}).vit.state_dict()
    path = tmp_path / "weights.pth"
    torch.save({rename(name): value for name, value in source.items()}, path)
    with pytest.raises(ConfigError, check=has_code("FV1113", f"'{missing}'")):
        build_vit("vit_tiny_patch16_224", 10, seed=0, options={"image_size": 32}, pretrained=str(path))


def test_pretrained_weights_without_a_network() -> None:
    """The whole test session is offline, and its cache of downloads is empty (tests/conftest.py)."""
    with pytest.raises(ConfigError, check=has_code("FV1113", "'vit_tiny_patch16_224'")):
        build_vit("vit_tiny_patch16_224", 10, seed=0, pretrained=True)


# --- models of a folder and of the hub ----------------------------------------------------------------


def in_folder(folder: Path, vit: PatchViT, **config: Any) -> str:
    """The name of a model in a folder as timm writes it: a description and safetensors."""
    folder.mkdir()
    size = [3, vit.image_size, vit.image_size]
    described: dict[str, Any] = {"architecture": "vit_tiny_patch16_224", "num_classes": vit.classes}
    described |= {"num_features": vit.width, "model_args": {"img_size": vit.image_size, "depth": vit.depth}}
    weights = {"num_classes": vit.classes, "input_size": size, "first_conv": "patch_embed.proj", "classifier": "head"}
    described |= {"pretrained_cfg": weights | {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    (folder / "config.json").write_text(json.dumps(described | config))
    save_file(vit.vit.state_dict(), folder / "model.safetensors")
    return f"local-dir:{folder}"


def test_a_model_of_a_folder(tmp_path: Path) -> None:
    """Its shape, normalisation and weights come from there; the head is new for another number of classes."""
    source = PatchViT("made here", VisionTransformer(img_size=32, embed_dim=192, depth=2, num_heads=3, num_classes=7))
    name = in_folder(tmp_path / "model", source)
    vit = build_vit(name, 5, seed=2, pretrained=True)
    assert (vit.name, vit.image_size, vit.depth, vit.classes) == (name, 32, 2, 5)
    assert vit.mean_std == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    tensors = vit.tensors()
    for key, value in source.tensors().items():
        if not key.startswith("head."):
            assert torch.equal(tensors[key], value), key
    untrained = build_vit(name, 5, seed=2).tensors()
    assert torch.equal(untrained["head.weight"], tensors["head.weight"])
    assert not torch.equal(untrained["blocks.0.attn.qkv.weight"], tensors["blocks.0.attn.qkv.weight"])


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    source = PatchViT("made here", VisionTransformer(img_size=32, embed_dim=192, depth=2, num_heads=3, num_classes=7))
    name = in_folder(tmp_path / "model", source, architecture="resnet18", model_args={})
    with pytest.raises(ConfigError, check=has_code("FV1112", f"'{name}'")):
        build_vit(name, 5, seed=0)
    with pytest.raises(ConfigError, check=has_code("FV1113")):
        build_vit(name, 5, seed=0, pretrained=True)


def test_a_folder_without_a_description(tmp_path: Path) -> None:
    name = f"local-dir:{tmp_path}"
    with pytest.raises(ConfigError, check=has_code("FV1106", f"'{name}'")):
        build_vit(name, 5, seed=0)


def test_a_model_of_the_hub_without_a_network() -> None:
    """Even its shape is described there."""
    with pytest.raises(ConfigError, check=has_code("FV1109", "'hf-hub:owner/name'")):
        build_vit("hf-hub:owner/name", 5, seed=0)


@pytest.mark.parametrize("name", ["hf-hub:", "hf-hub:name", "hf-hub:a/b/c", "hf-hub:../b c"])
def test_what_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigError):
        build_vit(name, 5, seed=0)


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "named"),
    [("vit_tiny_patch16_22", "vit_tiny_patch16_224"), ("vit_small_image", SMALL), ("§§§", "§§§")],
)
def test_an_unknown_name_gets_a_suggestion_if_one_is_like_it(name: str, named: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1105", named)):
        build_vit(name, 10, seed=0)


@pytest.mark.parametrize(
    "name",
    [
        "resnet18d",
        "deit_tiny_distilled_patch16_224",
        "beit_base_patch16_224",
    ],
)
def test_models_that_are_no_plain_vit(name: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, check=has_code("FV1112", name)):
        build_vit(name, 10, seed=0)


@pytest.mark.parametrize("made", [lambda: timm_vit(global_pool="max"), lambda: timm_vit(pos_embed="none")])
def test_model_changes_that_the_stages_do_not_support(made: Callable[[], VisionTransformer]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1112")):
        PatchViT("mine", made())


def test_positions_of_a_stated_size() -> None:
    """FedTP's released code begins with standard normal positions; all other tensors are as without the option."""
    plain, wide = (build_vit(SMALL, 10, seed=1, options=TINY | more).tensors() for more in ({}, {"position_std": 1.0}))
    changed = {name for name, value in plain.items() if not torch.equal(value, wide[name])}
    assert changed == {"pos_embed", "cls_token"}
    assert float(wide["pos_embed"].std()) == pytest.approx(1, rel=0.1)
    assert float(wide["cls_token"].std()) == pytest.approx(1, rel=0.4)


@pytest.mark.parametrize("pretrained", [True, "weights.pth"])
def test_the_small_model_has_no_pretrained_weights(pretrained: bool | str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1113", f"'{SMALL}'")):
        build_vit(SMALL, 10, seed=0, pretrained=pretrained)


def test_first_values_of_torch_and_the_epsilon_of_norms() -> None:
    """FedTP's released model: all linear layers begin as torch's do, within 1 / sqrt(inputs); norms have 1e-5."""
    released = {"first_values": "torch", "norm_eps": 1e-5}
    plain, other = (build_vit(SMALL, 10, seed=1, options=TINY | more) for more in ({}, released))
    changed = {name for name, value in plain.tensors().items() if not torch.equal(value, other.tensors()[name])}
    linear = [(name, layer) for name, layer in other.vit.named_modules() if isinstance(layer, nn.Linear)]
    assert {f"{name}.weight" for name, _ in linear} <= changed
    for name, layer in linear:
        bound = layer.in_features**-0.5
        assert float(layer.weight.detach().abs().max()) <= bound, name
        assert float(layer.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.15), name
    assert {layer.eps for layer in other.vit.modules() if isinstance(layer, nn.LayerNorm)} == {1e-5}
    assert {layer.eps for layer in plain.vit.modules() if isinstance(layer, nn.LayerNorm)} == {1e-6}
