"""Free prefixes, as the paper says and as its code does."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedvit.models import FreePrefix
from fedvit.models.vit import PatchViT

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


def test_linear_form_is_a_change_of_the_weights(make: Make, logits: Logits, patches: Tensor) -> None:
    """x W_kv + b_kv + s (x W + b): timm's own layer with the sum of both."""
    vit = make(FreePrefix(form="linear", scale=0.7))
    tensors = vit.tensors()
    merged = {}
    for block in range(3):
        for kind in ("weight", "bias"):
            qkv = tensors[f"blocks.{block}.attn.qkv.{kind}"].clone()
            qkv[32:] += 0.7 * tensors[f"blocks.{block}.attn.prefix.linear.{kind}"]
            merged[f"blocks.{block}.attn.qkv.{kind}"] = qkv
    torch.testing.assert_close(logits(vit, patches), logits(make(), patches, merged), rtol=0, atol=1e-12)


def test_literal_form_is_further_keys(make: Make, logits: Logits, patches: Tensor) -> None:
    """Attention computed by hand over [P_k; K] and [P_v; V]."""
    vit = make(FreePrefix(tokens=3), stir=True)
    attention = vit.vit.blocks[0].attn
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        queries, keys, values = attention.qkv(x).split(32, dim=1)
        keys, values = torch.cat([attention.prefix.key, keys]), torch.cat([attention.prefix.value, values])
        assert len(keys) == 8
        heads = [
            torch.softmax(queries[:, part] @ keys[:, part].T / 4, dim=1) @ values[:, part]
            for part in (slice(0, 16), slice(16, 32))
        ]
        want = attention.proj(torch.cat(heads, dim=1))
        torch.testing.assert_close(attention(x[None])[0], want, rtol=0, atol=1e-12)


def test_literal_zeros_weaken_every_value(make: Make) -> None:
    """A key of logit 0 and value 0 takes part in the softmax: all zero keys and values leave p / (p + 5) nowhere."""
    vit = make(FreePrefix(tokens=3, init="zero"))
    attention = vit.vit.blocks[0].attn
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attention.qkv.weight[32:64] = 0  # keys are their bias, here 0: every logit is 0
        attention.qkv.bias[32:64] = 0
        mean = attention.qkv(x)[:, 64:].mean(0)
        want = attention.proj(5 / 8 * mean)
        torch.testing.assert_close(attention(x[None])[0], want.expand(5, -1), rtol=0, atol=1e-12)


def test_literal_zeros_move_together(make: Make, patches: Tensor) -> None:
    """They do learn, but stay equal: their effective number is 1."""
    vit = make(FreePrefix(tokens=3, init="zero"))
    values = vit.tensors()
    for _ in range(2):
        grads = torch.func.grad(
            lambda values: vit.call(
                values, lambda vit: vit.classify(vit.run_blocks(vit.embed(patches), 0, 3)).square().sum()
            )
        )(values)
        values = {name: value - 0.01 * grads[name] for name, value in values.items()}
    for name, value in values.items():
        if "prefix" in name:
            assert value.abs().max() > 0, name
            torch.testing.assert_close(value, value[:1].expand(3, -1), rtol=0, atol=1e-12)
