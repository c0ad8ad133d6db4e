"""Heads beside the model's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.models import ExtraHead
from fedvit.models.vit import PatchViT
from tests.support.codes import has_code

Make = Callable[..., PatchViT]


def test_it_reads_features_and_leaves_the_logits(make: Make, patches: Tensor) -> None:
    vit = make(ExtraHead())
    tensors = vit.tensors()
    with torch.no_grad():
        out = vit.run_blocks(vit.embed(patches), 0, vit.depth)
        features = vit.features(out)
        got = vit.head(features, "personal_head")
    torch.testing.assert_close(got, features @ tensors["personal_head.weight"].T + tensors["personal_head.bias"])
    torch.testing.assert_close(vit.head(features), vit.classify(out))


@pytest.mark.parametrize("init", ["torch", "zero", "head"])
def test_how_it_begins(make: Make, init: str) -> None:
    """torch's rule is uniform within 1 / sqrt(32) = 0.177."""
    tensors = make(ExtraHead(init=init)).tensors()
    weight, bias = tensors["personal_head.weight"], tensors["personal_head.bias"]
    if init == "zero":
        assert not weight.any()
        assert not bias.any()
    elif init == "head":
        assert torch.equal(weight, tensors["head.weight"])
        assert torch.equal(bias, tensors["head.bias"])
    else:
        assert 0.15 < weight.abs().max() <= 0.1768
        assert 0 < bias.abs().max() <= 0.1768


def test_it_may_give_widths_instead_of_classes(make: Make) -> None:
    vit = make(ExtraHead(name="policy", widths=2, bias=False))
    assert vit.tensors()["policy.weight"].shape == (2 * vit.width, vit.width)
    assert "policy.bias" not in vit.tensors()


def test_several_heads_differ(make: Make) -> None:
    tensors = make(ExtraHead(name="first"), ExtraHead(name="second")).tensors()
    assert not torch.equal(tensors["first.weight"], tensors["second.weight"])


@pytest.mark.parametrize("name", ["head", "blocks", "forward"])
def test_a_name_that_is_taken(make: Make, name: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1112", f"'{name}'")):
        make(ExtraHead(name=name))
