"""Dropout: what share it drops, that its masks are independent, and that nothing is dropped without numbers."""

import itertools
from typing import Literal

import pytest
import torch
from torch import Tensor

from fedvit.models import SMALL, build_vit
from fedvit.models.dropout import Dropout, drop_values
from fedvit.models.kv_adapter import KVAdapter
from fedvit.models.vit import PatchViT
from fedvit.program import SEEDS

MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2}
TOKENS, WIDTH = 65, 128


def seeds(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, SEEDS, (count,), generator=torch.Generator().manual_seed(seed))


def masks(numbers: Tensor, rate: float = 0.25, place: int = 0) -> Tensor:
    """(B, N, D): 1 where a value is kept."""
    return (drop_values(torch.ones(len(numbers), TOKENS, WIDTH), numbers, rate, place) > 0).double()


def make_model(rate: float = 0.5) -> tuple[PatchViT, Tensor]:
    vit = build_vit(SMALL, 10, seed=0, options=MODEL)
    Dropout(rate=rate).apply(vit, 0)
    return vit, torch.randn(3, 16, 192, generator=torch.Generator().manual_seed(0))


def logits(vit: PatchViT, patches: Tensor, numbers: Tensor | None) -> Tensor:
    answer: Tensor = vit.call(
        vit.tensors(), lambda vit: vit.classify(vit.run_to_class(vit.embed(patches, None, numbers), 0))
    )
    return answer


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_of_dropped_values(rate: float) -> None:
    """Within five deviations of as many draws; kept values are divided by what is left, so that their mean stays."""
    x = torch.full((16, TOKENS, WIDTH), 2.0)
    got = drop_values(x, seeds(16), rate, 3)
    kept = got != 0
    share, count = 1 - rate, kept.numel()
    assert abs(float(kept.double().mean()) - share) < 5 * (share * rate / count) ** 0.5
    torch.testing.assert_close(got[kept], torch.full_like(got[kept], 2 / share))


def test_masks_are_uncorrelated() -> None:
    """Between neighbours in a token, between tokens, between samples whose numbers are next to each other, and between
    places; 5 / sqrt(n) are five deviations of a correlation of n independent pairs."""
    many = masks(torch.cat([seeds(8), torch.arange(8)]))
    elsewhere = masks(torch.cat([seeds(8), torch.arange(8)]), place=1)
    pairs = {
        "columns": (many[:, :, 1:], many[:, :, :-1]),
        "tokens": (many[:, 1:], many[:, :-1]),
        "samples": (many[1:], many[:-1]),
        "places": (many, elsewhere),
    }
    for name, (one, other) in pairs.items():
        correlation = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(float(correlation)) < 5 / one.numel() ** 0.5, name
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(many, 2))


def test_mask_follows_from_the_number_of_the_sample_alone() -> None:
    """Not from the batch that it is in, and not from the other numbers."""
    numbers = seeds(6)
    assert torch.equal(masks(numbers)[4:], masks(numbers[4:]))


def test_gradient_is_that_of_kept_values() -> None:
    x = torch.ones(2, 5, 8, requires_grad=True)
    drop_values(x, seeds(2), 0.5, 0).sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}


def test_model_drops_only_where_it_gets_numbers() -> None:
    """Otherwise its answers are those of the model without dropout, also right after a step that dropped."""
    vit, patches = make_model()
    plain = build_vit(SMALL, 10, seed=0, options=MODEL)
    want = logits(plain, patches, None)
    assert vit.tensors().keys() == plain.tensors().keys()
    first = logits(vit, patches, seeds(3))
    assert not torch.allclose(first, want)
    assert not torch.equal(first, logits(vit, patches, seeds(3, seed=1)))
    assert torch.equal(first, logits(vit, patches, seeds(3)))
    assert torch.equal(logits(vit, patches, None), want)
    assert vit.seeds.now is None


def test_model_drops_at_the_places_of_the_released_fedtp() -> None:
    """One place behind the embedding and three in every block: attention's projection, and two in the MLP."""
    vit, patches = make_model()
    places = [module.place for module in vit.vit.modules() if type(module).__name__ == "_Dropped"]
    assert sorted(places) == [0, 1, 2, 3, 4, 5, 6]
    block = vit.vit.blocks[0]
    inner = torch.ones(3, 17, 64)
    with torch.no_grad():
        embedded = vit.embed(patches, None, seeds(3))
        projected = block.attn(torch.randn(3, 17, 32, generator=torch.Generator().manual_seed(1)))
        hidden, left = block.mlp.drop1(inner), block.mlp.drop2(inner)
    vit.seeds.now = None
    for values in (embedded, projected, hidden, left):
        assert 0.4 < float((values == 0).double().mean()) < 0.6


def test_class_token_alone_drops_the_same_values() -> None:
    """The last block computes only the class token's row; its masks are those of the whole block."""
    vit, patches = make_model()

    def whole(vit: PatchViT) -> Tensor:
        tokens_BND = vit.run_blocks(vit.embed(patches, None, seeds(3)), 0, vit.depth)
        return vit.classify(tokens_BND)

    torch.testing.assert_close(logits(vit, patches, seeds(3)), vit.call(vit.tensors(), whole))


@pytest.mark.parametrize("mode", ["add", "concat"])
def test_extended_attention_keeps_its_dropout(mode: Literal["add", "concat"]) -> None:
    vit, _ = make_model()
    KVAdapter(bottleneck=4, mode=mode).apply(vit, 0)
    places = [module.place for module in vit.vit.modules() if type(module).__name__ == "_Dropped"]
    assert sorted(places) == [0, 1, 2, 3, 4, 5, 6]


def test_recomputed_block_drops_the_same_values_again() -> None:
    """The gradients are those of blocks that keep their activations."""
    vit, patches = make_model()
    grads = []
    for recompute in (False, True):
        leaves = {name: value.clone().requires_grad_() for name, value in vit.tensors().items()}
        with vit.recomputing(recompute):
            vit.call(
                leaves, lambda vit: vit.classify(vit.run_to_class(vit.embed(patches, None, seeds(3)), 0))
            ).square().sum().backward()
        grads.append({name: value.grad for name, value in leaves.items()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)
