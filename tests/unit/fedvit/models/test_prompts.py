"""Where prompts stand, what they replace and what becomes of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.models import SMALL, Prompts, build_vit
from fedvit.models.vit import PatchViT

Make = Callable[..., PatchViT]
Logits = Callable[..., Tensor]


def entering(vit: PatchViT, patches: Tensor) -> list[Tensor]:
    """What goes into every block, and what comes out of the last."""
    seen: list[Tensor] = []

    def record(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    hooks = [block.register_forward_pre_hook(record) for block in vit.vit.blocks]
    with torch.no_grad():
        seen.append(vit.run_blocks(vit.embed(patches), 0, vit.depth))
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(("placement", "inside", "last"), [("shallow", 8, 8), ("deep", 8, 8), ("appended", 8, 5)])
def test_tokens_that_enter_every_block(make: Make, patches: Tensor, placement: str, inside: int, last: int) -> None:
    """1 class token, 4 patches and 3 prompts are 8; appended ones leave with the block."""
    *inputs, output = entering(make(Prompts(tokens=3, placement=placement)), patches)
    assert [x.shape for x in inputs] == [(3, inside, 32)] * 3
    assert output.shape == (3, last, 32)


@pytest.mark.parametrize("registers", [0, 2])
def test_shallow_prompts_stand_behind_the_class_token(make: Make, patches: Tensor, registers: int) -> None:
    """And behind registers; they have no position, and the others keep theirs."""
    vit = make(Prompts(tokens=3), base={"reg_tokens": registers})
    plain = make(base={"reg_tokens": registers})
    first = 1 + registers
    with torch.no_grad():
        x, base = vit.embed(patches), plain.embed(patches)
    assert torch.equal(x[:, first : first + 3], vit.tensors()["prompts.tokens"].expand(3, -1, -1))
    assert torch.equal(torch.cat([x[:, :first], x[:, first + 3 :]], dim=1), base)


def test_shallow_prompts_are_the_papers(make: Make, logits: Logits, patches: Tensor) -> None:
    """timm's own blocks, norm and head on [cls, prompts, patches]; prompts come out of each block changed."""
    vit = make(Prompts(tokens=3))
    with torch.no_grad():
        base = make().embed(patches)
        x = torch.cat([base[:, :1], vit.tensors()["prompts.tokens"].expand(3, -1, -1), base[:, 1:]], dim=1)
        for block in vit.vit.blocks:
            x = block(x)
        want = vit.vit.head(vit.vit.norm(x)[:, 0])
    torch.testing.assert_close(logits(vit, patches), want, rtol=0, atol=1e-12)


def test_deep_prompts_are_new_in_every_block(make: Make, patches: Tensor) -> None:
    """Rows 1 to 3 of each block's input are that block's own; the others are what the block before made."""
    vit = make(Prompts(tokens=3, placement="deep"))
    tokens = vit.tensors()["prompts.tokens"]
    assert tokens.shape == (3, 3, 32)
    *inputs, output = entering(vit, patches)
    for block, x in enumerate(inputs):
        assert torch.equal(x[:, 1:4], tokens[block].expand(3, -1, -1))
        with torch.no_grad():
            made = vit.vit.blocks[block](x)
        following = inputs[block + 1] if block < 2 else output
        assert torch.equal(following[:, 0], made[:, 0])
        assert torch.equal(following[:, 4:], made[:, 4:])


def test_appended_prompts_stand_at_the_end(make: Make, patches: Tensor) -> None:
    vit = make(Prompts(tokens=3, placement="appended"))
    tokens = vit.tensors()["prompts.tokens"]
    assert tokens.shape == (3, 3, 32)
    *inputs, output = entering(vit, patches)
    for block, x in enumerate(inputs):
        assert torch.equal(x[:, 5:], tokens[block].expand(3, -1, -1))
        with torch.no_grad():
            made = vit.vit.blocks[block](x)
        following = inputs[block + 1] if block < 2 else output
        assert torch.equal(following[:, :5], made[:, :5])


@pytest.mark.parametrize("placement", ["shallow", "deep", "appended"])
def test_prompts_come_from_outside(make: Make, logits: Logits, patches: Tensor, placement: str) -> None:
    """As pFedPG's server generates them: the gradient by what was given, and none of it kept."""
    vit = make(Prompts(tokens=3, placement=placement))
    own = vit.tensors()["prompts.tokens"].clone()
    draw = torch.Generator().manual_seed(0)
    given, direction = torch.randn(2, *own.shape, generator=draw, dtype=torch.float64)
    assert (logits(vit, patches, {"prompts.tokens": given}) - logits(vit, patches)).abs().max() > 1e-4

    def total(given: Tensor) -> Tensor:
        def body(vit: PatchViT) -> Tensor:
            return vit.classify(vit.run_blocks(vit.embed(patches), 0, 3)).square().sum()

        result: Tensor = vit.call(vit.tensors() | {"prompts.tokens": given}, body)
        return result

    difference = (total(given + 1e-5 * direction) - total(given - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((torch.func.grad(total)(given) * direction).sum(), difference, rtol=1e-6, atol=1e-6)
    assert torch.equal(vit.tensors()["prompts.tokens"], own)


def test_prompts_begin_by_vpts_rule() -> None:
    """sqrt(6 / (3 * 16^2 + 768)) = sqrt(6 / 1536) = 0.0625 for ViT-B/16."""
    with torch.device("meta"):
        vit = build_vit("vit_base_patch16_224", 10, seed=0)
    Prompts(tokens=10).apply(vit, 0)
    values = vit.tensors()["prompts.tokens"]
    assert values.shape == (10, 768)
    assert 0.062 < values.max() <= 0.0625
    assert -0.0625 <= values.min() < -0.062
    assert abs(values.mean()) < 0.002


def test_prompts_beside_masked_patches(make: Make, patches: Tensor) -> None:
    """A kept patch keeps its position, whatever stands before it."""
    kept = torch.tensor([[3, 1]]).expand(3, -1)
    chosen = patches.take_along_dim(kept[..., None], 1)
    with torch.no_grad():
        x, base = make(Prompts(tokens=3)).embed(chosen, kept), make().embed(chosen, kept)
    assert torch.equal(x[:, 4:], base[:, 1:])


def test_more_prompts_than_patches() -> None:
    vit = build_vit(SMALL, 5, seed=0, options={"image_size": 4, "depth": 2})
    Prompts(tokens=50, placement="deep").apply(vit, 0)
    with torch.no_grad():
        assert vit.run_blocks(vit.embed(torch.zeros(1, 1, 48)), 0, 2).shape == (1, 52, 64)


def test_model_that_pools_its_tokens_has_no_prompts(make: Make) -> None:
    """They would be among what is pooled."""
    with pytest.raises(ConfigError):
        make(Prompts(), base={"global_pool": "avg"})
