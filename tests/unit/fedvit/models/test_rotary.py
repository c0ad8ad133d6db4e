"""Rotary positions: timm's own models give the same answers."""

import copy

import pytest
import timm
import torch
from torch.nn.functional import unfold

from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.models import build_vit
from fedvit.models.rotary import RotaryViT
from tests.support.codes import has_code
from tests.support.rotary import ROTARY, make_rotary


def fold(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Images as patches (B, N, P), in timm's order."""
    return unfold(pixels, side, stride=side).transpose(1, 2)


@pytest.mark.parametrize("kind", ROTARY)
def test_answers_are_those_of_timm(kind: str) -> None:
    model = make_rotary(kind)
    vit = RotaryViT(kind, copy.deepcopy(model))
    assert vit.tensors().keys() == dict(model.named_parameters()).keys()
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        expected = model(pixels)
        answers = vit.classify(vit.run_to_class(vit.embed(fold(pixels, 8)), 0))
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ROTARY)
def test_patches_at_other_places_have_other_answers(kind: str) -> None:
    vit = RotaryViT(kind, make_rotary(kind))
    patches = fold(torch.linspace(-1, 1, 3 * 24 * 24).reshape(1, 3, 24, 24).sin() * 3, 8)
    with torch.no_grad():
        one, other = (vit.classify(vit.run_to_class(vit.embed(x), 0)) for x in (patches, patches.roll(1, 1)))
    assert (one - other).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_small_patch16_dinov3", {"image_size": 32}),
        ("eva02_tiny_patch14_224", {"image_size": 28, "patch_size": 14}),
        ("vit_medium_patch16_rope_reg1_gap_256", {"image_size": 32}),
    ],
)
def test_models_by_name(name: str, options: dict[str, int]) -> None:
    """Weights of timm's own model fit, and the answers are equal but for rounding."""
    vit = build_vit(name, 5, seed=0, options=options)
    model = timm.create_model(name, num_classes=5, img_size=vit.image_size).eval()
    model.load_state_dict(vit.tensors())
    pixels = torch.randn(1, 3, vit.image_size, vit.image_size)
    with torch.no_grad():
        expected = model(pixels)
        answers = vit.classify(vit.run_to_class(vit.embed(fold(pixels, vit.patch_size)), 0))
    torch.testing.assert_close(answers, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name", ["vit_small_patch16_rope_224", "vit_small_patch16_rope_mixed_224", "eva_giant_patch14_224"]
)
def test_other_kinds_are_refused(name: str) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, check=has_code("FV1112", name)):
        build_vit(name, 10, seed=0)


def test_masked_images_are_refused() -> None:
    method = make_method("eftvit", {"mask": 0.5})
    with torch.device("meta"), pytest.raises(ConfigError, check=has_code("FV1111", "rotary")):
        build_model(method, "vit_small_patch16_dinov3", 5, seed=0, options={"image_size": 32})
