"""The adapter behind the MLP, and the dead one of the published table."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedvit.models import MlpAdapter
from fedvit.models.vit import PatchViT

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


def gradients(vit: PatchViT, patches: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    def loss(values: dict[str, Tensor]) -> Tensor:
        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_blocks(vit.embed(patches), 0, vit.depth))

        return -torch.log_softmax(vit.call(values, body), dim=1)[:, 0].sum()

    return torch.func.grad(loss)(values)


def test_a_block_adds_mlp_and_adapter_of_the_mlp(make: Make) -> None:
    """x + y + up(tanh(down(y))), y = mlp(norm2(x)), here from the layers of timm's MLP one by one."""
    vit = make(MlpAdapter(bottleneck=8), stir=True)
    block = vit.vit.blocks[1]
    adapter = block.mlp.adapter
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        middle = x + block.attn(block.norm1(x))
        y = block.mlp.fc2(block.mlp.act(block.mlp.fc1(block.norm2(middle))))
        want = middle + y + adapter.up(torch.tanh(adapter.down(y)))
        torch.testing.assert_close(block(x), want, rtol=0, atol=1e-12)


def test_down_learns_from_the_second_step(make: Make, patches: Tensor) -> None:
    """d loss / d down = up^T ..., and up begins at zero."""
    vit = make(MlpAdapter(bottleneck=8))
    values = vit.tensors()
    first = gradients(vit, patches, values)
    second = gradients(vit, patches, {name: value - 0.1 * first[name] for name, value in values.items()})
    for block in range(3):
        down = f"blocks.{block}.mlp.adapter.down.weight"
        assert not first[down].any()
        assert second[down].abs().max() > 1e-6


def test_the_dead_one_is_a_bias(make: Make, logits: Logits, patches: Tensor) -> None:
    """One vector, added in every block: timm's own model with the same on every fc2.bias."""
    vit = make(MlpAdapter(bottleneck=8, shared_dead=True))
    added = [name for name in vit.tensors() if "adapter" in name]
    assert added == [f"mlp_adapter.{layer}.{kind}" for layer in ("down", "up") for kind in ("weight", "bias")]
    values = vit.tensors()
    for _ in range(3):
        grads = gradients(vit, patches, values)
        values |= {name: values[name] - 0.1 * grads[name] for name in added}
    bias = values["mlp_adapter.up.bias"]
    assert bias.abs().min() > 0
    for name in added[:3]:
        assert not values[name].any(), name
    base = make()
    biases = {
        f"blocks.{block}.mlp.fc2.bias": base.tensors()[f"blocks.{block}.mlp.fc2.bias"] + bias for block in range(3)
    }
    torch.testing.assert_close(logits(vit, patches, values), logits(base, patches, biases), rtol=0, atol=1e-12)
