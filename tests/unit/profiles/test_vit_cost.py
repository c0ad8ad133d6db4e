"""Closed forms against published figures, and against what torch counts on the model itself."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedvit.models import SMALL, build_vit
from fedvit.models.lora import Lora
from fedvit.models.prompts import Prompts
from fedvit.models.vit import PatchViT
from fedvit.program import count_kept_patches
from profiles.vit_cost import EFTVIT_CONVENTION, VitShape, forward_macs, parameters

VIT_B = VitShape(classes=100)
TRUE = EFTVIT_CONVENTION._replace(projections=True)

# --- EFTViT's tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask_ratio", "computed", "published"),
    [(0.0, 12.0046, 12.005), (0.25, 8.9138, 8.914), (0.5, 5.9115, 5.911), (0.75, 2.9977, 2.997), (0.95, 0.6847, 0.684)],
)
def test_eftvits_count(mask_ratio: float, computed: float, published: float) -> None:
    """n = 1 + floor(196 (1 - r)); 196 * 768^2 + 12 (8 n D^2 + 2 n^2 D + 10 n D) + 5 n D + D C, whose last digit
    depends on the classes: 10 to 100."""
    few, count = (forward_macs(VitShape(classes=c), EFTVIT_CONVENTION, mask_ratio=mask_ratio) / 1e9 for c in (10, 100))
    assert few - 5e-5 < computed < count + 5e-5
    assert count == pytest.approx(published, abs=8e-4)


@pytest.mark.parametrize(
    ("mask_ratio", "computed"), [(0.0, 17.582), (0.25, 13.104), (0.5, 8.714), (0.75, 4.413), (0.95, 0.968)]
)
def test_what_it_is_with_the_projections(mask_ratio: float, computed: float) -> None:
    """4 n D^2 more in every block."""
    count = forward_macs(VIT_B, TRUE, mask_ratio=mask_ratio)
    assert round(count / 1e9, 3) == computed
    tokens = 1 + count_kept_patches(196, mask_ratio)
    assert count - forward_macs(VIT_B, EFTVIT_CONVENTION, mask_ratio=mask_ratio) == 12 * 4 * tokens * 768**2


def test_eftvits_counts_of_fed_prompt_and_fed_lora() -> None:
    # eftvits count of fed prompt: Ten more tokens; the honest figure is 5% above the full model's, as with its
    # count
    assert round(forward_macs(VIT_B, EFTVIT_CONVENTION, extra_tokens=10) / 1e9, 3) == 12.646
    assert round(forward_macs(VIT_B, TRUE, extra_tokens=10) / 1e9, 3) == 18.507
    # eftvits count of fed lora: Another rule: with the projections, without attention's products. So +41% is the
    # counter's; LoRA adds 0.7%
    published = forward_macs(VIT_B, TRUE._replace(attention_products=False), lora_rank=16) / 1e9
    assert published == pytest.approx(16.982, abs=1e-3)
    honest, full = forward_macs(VIT_B, TRUE, lora_rank=16), forward_macs(VIT_B, TRUE)
    assert round(honest / 1e9, 3) == 17.698
    assert honest - full == 12 * 2 * 197 * 16 * (768 + 768)
    assert round(honest / full - 1, 3) == 0.007


@pytest.mark.parametrize(
    ("blocks", "classes", "count", "published"),
    [(2, 10, 14_926_090, 14.23), (4, 100, 29_171_044, 27.82), (6, 100, 43_346_788, 41.34)],
)
def test_eftvits_parameters(blocks: int, classes: int, count: int, published: float) -> None:
    """What devices train, in units of 2^20: the table mixes heads of 10 and of 100 classes."""
    got = parameters(VitShape(classes=classes), blocks=blocks, final_norm=False)
    assert got == count
    assert got / 2**20 == pytest.approx(published, abs=0.006)


# --- the model itself ---------------------------------------------------------------------------------


def on_meta(name: str, classes: int, **options: Any) -> PatchViT:
    with torch.device("meta"):
        return build_vit(name, classes, seed=0, options=options)


def count_macs(vit: PatchViT, kept: int | None = None) -> int:
    """Multiply-adds of one image, as torch counts them: products only."""
    patches = torch.zeros(1, kept or vit.patches, 3 * vit.patch_size**2, device="meta")
    rows = None if kept is None else torch.zeros(1, kept, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        vit.classify(vit.run_blocks(vit.embed(patches, rows), 0, vit.depth))
    flops: int = counter.get_total_flops()
    return flops // 2


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vit_base_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", {"image_size": 56}),
    (SMALL, {}),
    (SMALL, {"mlp_ratio": 4.0, "head_width": 32, "registers": 2}),
]


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_the_closed_form_is_what_torch_counts(name: str, options: dict[str, Any]) -> None:
    vit = on_meta(name, 7, **options)
    assert forward_macs(VitShape.of(vit)) == count_macs(vit)


def test_dropped_patches_cost_nothing() -> None:
    vit = on_meta("vit_base_patch16_224", 100)
    assert VitShape.of(vit) == VIT_B
    assert forward_macs(VIT_B, mask_ratio=0.75) == count_macs(vit, kept=49)


def test_lora_and_prompts_cost_what_torch_counts() -> None:
    with torch.device("meta"):
        lora, prompts = (build_vit(SMALL, 7, seed=0, options={"head_width": 32}) for _ in range(2))
        Lora(rank=3).apply(lora, 0)
        Prompts(tokens=5).apply(prompts, 0)
    assert forward_macs(VitShape.of(prompts), extra_tokens=5) == count_macs(prompts)
    shape = VitShape.of(lora)
    assert shape.attention_width == 128
    assert forward_macs(shape, lora_rank=3) == count_macs(lora)


@pytest.mark.parametrize(("name", "options"), [MODELS[0], MODELS[2]])
def test_parameters_are_the_models(name: str, options: dict[str, Any]) -> None:
    vit = on_meta(name, 7, **options)
    assert parameters(VitShape.of(vit)) == sum(value.numel() for value in vit.tensors().values())
