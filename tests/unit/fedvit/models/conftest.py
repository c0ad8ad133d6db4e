"""A tiny model in float64, with every tensor of its own random, so that nothing hides behind a zero."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fedvit.models import SMALL, build_vit
from fedvit.models.model_patch import ModelPatch
from fedvit.models.vit import PatchViT

TINY = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}


def _noise(values: Iterable[Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in values:
            value += 0.1 * torch.randn(value.shape, generator=draw, dtype=value.dtype)


@pytest.fixture
def make() -> Callable[..., PatchViT]:
    """`make(model patch, ...)`: 4 patches, 3 blocks of width 32, 5 classes, with these model patches as they begin.

    `base` are timm's own options instead; `stir` moves the model patches' values, many of which begin at zero.
    """

    def make_it(
        *patches: ModelPatch, base: dict[str, Any] | None = None, stir: bool = False, depth: int = 3
    ) -> PatchViT:
        if base is None:
            vit = build_vit(SMALL, 5, seed=1, options=TINY | {"depth": depth})
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
                vit = PatchViT("made here", VisionTransformer(**(sizes | base)))
        base_values = dict(vit.vit.named_parameters())
        _noise(base_values.values(), 7)
        for patch in patches:
            patch.apply(vit, seed=2)
        if stir:
            _noise((value for name, value in vit.vit.named_parameters() if name not in base_values), 8)
        return vit.double()

    return make_it


@pytest.fixture
def patches() -> Tensor:
    """(3, 4, 192): three images of the tiny model."""
    return torch.randn(3, 4, 192, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def logits() -> Callable[..., Tensor]:
    """`logits(vit, patches)`, or with other values for some tensors: `logits(vit, patches, {"head.bias": ...})`."""

    def run(vit: PatchViT, patches: Tensor, changed: dict[str, Tensor] | None = None) -> Tensor:
        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_blocks(vit.embed(patches), 0, vit.depth))

        with torch.no_grad():
            result: Tensor = vit.call(vit.tensors() | (changed or {}), body)
        return result

    return run
