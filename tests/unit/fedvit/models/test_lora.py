"""LoRA against a model whose weights hold the product."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedvit.models import SMALL, Lora, build_vit
from fedvit.models.vit import PatchViT

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


@pytest.mark.parametrize("alpha", [4, 16.0])
def test_merged_equals_unmerged(make: Make, logits: Logits, patches: Tensor, alpha: float) -> None:
    """W + (alpha / 4) B A in the rows of the queries (first 32) and of the values (last 32)."""
    vit = make(Lora(rank=4, alpha=alpha), stir=True)
    tensors = vit.tensors()
    merged = {}
    for block in range(3):
        qkv = f"blocks.{block}.attn.qkv"
        weight = tensors[f"{qkv}.weight"].clone()
        weight[:32] += alpha / 4 * tensors[f"{qkv}.lora_q.b"] @ tensors[f"{qkv}.lora_q.a"]
        weight[64:] += alpha / 4 * tensors[f"{qkv}.lora_v.b"] @ tensors[f"{qkv}.lora_v.a"]
        merged[f"{qkv}.weight"] = weight
    want = logits(make(), patches, merged)
    torch.testing.assert_close(logits(vit, patches), want, rtol=0, atol=1e-12)
    assert (want - logits(make(), patches)).abs().max() > 1e-3


def test_alpha_zero_is_the_base_model(make: Make, logits: Logits, patches: Tensor) -> None:
    vit = make(Lora(rank=4, alpha=0), stir=True)
    torch.testing.assert_close(logits(vit, patches), logits(make(), patches), rtol=0, atol=1e-12)


def test_shapes_with_heads_of_their_own_width() -> None:
    """A reads the width, 32; B writes all heads, 2 of 24."""
    vit = build_vit(SMALL, 5, seed=0, options={"width": 32, "heads": 2, "head_width": 24, "depth": 1})
    Lora(rank=4).apply(vit, 0)
    shapes = {name: tuple(value.shape) for name, value in vit.tensors().items() if "lora" in name}
    assert shapes == {
        "blocks.0.attn.qkv.lora_q.a": (4, 32),
        "blocks.0.attn.qkv.lora_q.b": (48, 4),
        "blocks.0.attn.qkv.lora_v.a": (4, 32),
        "blocks.0.attn.qkv.lora_v.b": (48, 4),
    }
