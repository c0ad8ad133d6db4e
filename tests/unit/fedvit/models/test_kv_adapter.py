"""FedPerfix's adapter, against timm's own layers with changed weights and against the paper's equation 6."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedvit.models import SMALL, KVAdapter, build_vit
from fedvit.models.attention import OpenAttention
from fedvit.models.vit import PatchViT

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


def test_scale_zero_is_the_base_model(make: Make, logits: Logits, patches: Tensor) -> None:
    operated = logits(make(KVAdapter(bottleneck=8, scale=0), stir=True), patches)
    torch.testing.assert_close(operated, logits(make(), patches), rtol=0, atol=1e-12)


def test_addition_reaches_keys_and_values_only(make: Make, logits: Logits, patches: Tensor) -> None:
    """With down.weight = 0, P is one vector: s P on keys and values is s P on their 2 x 32 biases, behind the 32 of
    the queries, which timm has a place for."""
    vit = make(KVAdapter(bottleneck=8, scale=0.7), stir=True)
    tensors = vit.tensors()
    constant, biases = {}, {}
    for block in range(3):
        adapter = f"blocks.{block}.attn.adapter"
        constant[f"{adapter}.down.weight"] = torch.zeros(8, 32, dtype=torch.float64)
        hidden = torch.tanh(tensors[f"{adapter}.down.bias"])
        added = 0.7 * (tensors[f"{adapter}.up.weight"] @ hidden + tensors[f"{adapter}.up.bias"])
        bias = tensors[f"blocks.{block}.attn.qkv.bias"]
        biases[f"blocks.{block}.attn.qkv.bias"] = bias + torch.cat([torch.zeros(32, dtype=torch.float64), added])
    want = logits(make(), patches, biases)
    torch.testing.assert_close(logits(vit, patches, constant), want, rtol=0, atol=1e-12)


def test_addition_depends_on_the_token(make: Make) -> None:
    """P(x) of every row is up(tanh(down(x))) of that row, the tensor that enters qkv."""
    attention = make(KVAdapter(bottleneck=8, scale=0.7), stir=True).vit.blocks[1].attn
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        keys, values = attention.adapter(x)
        for row in range(5):
            both = attention.adapter.up(torch.tanh(attention.adapter.down(x[1, row])))
            torch.testing.assert_close(keys[1, row], 0.7 * both[:32], rtol=0, atol=1e-12)
            torch.testing.assert_close(values[1, row], 0.7 * both[32:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("head_width", [None, 24])
def test_concatenation_obeys_equation_6(head_width: int | None) -> None:
    """head = (1 - lam) Attn(q, K, V) + lam Attn(q, s P_k, s P_v), where lam is the prefix's share of the exponentials;
    checked per head, also for heads wider than width / heads."""
    options = {"image_size": 16, "patch_size": 8, "width": 32, "depth": 1, "heads": 2, "head_width": head_width}
    vit = build_vit(SMALL, 5, seed=0, options=options)
    KVAdapter(bottleneck=8, scale=1.5, mode="concat").apply(vit, 0)
    attention = vit.double().vit.blocks[0].attn
    assert isinstance(attention, OpenAttention)
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    width = head_width or 16
    with torch.no_grad():
        attention.qkv.weight *= 8  # logits that matter
        queries, keys, values = attention.qkv(x).split(2 * width, dim=1)
        prefix_keys, prefix_values = (1.5 * attention.adapter.up(torch.tanh(attention.adapter.down(x)))).split(
            2 * width, dim=1
        )
        heads = []
        for head in range(2):
            part = slice(head * width, (head + 1) * width)
            own = torch.exp(queries[:, part] @ keys[:, part].T / width**0.5)
            prefix = torch.exp(queries[:, part] @ prefix_keys[:, part].T / width**0.5)
            lam = prefix.sum(1, keepdim=True) / (prefix.sum(1, keepdim=True) + own.sum(1, keepdim=True))
            assert 0.05 < lam.mean() < 0.95
            plain = own / own.sum(1, keepdim=True) @ values[:, part]
            other = prefix / prefix.sum(1, keepdim=True) @ prefix_values[:, part]
            heads.append((1 - lam) * plain + lam * other)
        want = attention.proj(torch.cat(heads, dim=1))
        torch.testing.assert_close(attention(x[None])[0], want, rtol=0, atol=1e-12)


def test_concatenation_is_no_addition(make: Make, logits: Logits, patches: Tensor) -> None:
    """Of the same values: the mode is part of the method."""
    added = logits(make(KVAdapter(bottleneck=8)), patches)
    joined = logits(make(KVAdapter(bottleneck=8, mode="concat")), patches)
    assert (added - joined).abs().max() > 1e-3


def test_adapters_begin_as_linear_layers_of_torch() -> None:
    """Uniform within 1 / sqrt(inputs): 1 / 8 for down (width 64), 1 / 16 for up (bottleneck 256)."""
    vit = build_vit(SMALL, 5, seed=0, options={"depth": 1})
    KVAdapter().apply(vit, 0)
    tensors = vit.tensors()
    for name, bound in {"down": 1 / 8, "up": 1 / 16}.items():
        for kind in ("weight", "bias"):
            largest = tensors[f"blocks.0.attn.adapter.{name}.{kind}"].abs().max()
            assert 0.9 * bound < largest <= bound, (name, kind)
