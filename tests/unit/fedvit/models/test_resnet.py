"""Residual networks: that they are those of He et al. with group norms, and which methods train them."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from coordinator.compute.planning.batch import method_batch
from fedvit.data.images import normalise, unfold
from fedvit.methods import build_model, make_method
from fedvit.model_options import RESNETS
from fedvit.models import RESNET
from fedvit.models.resnet import DEPTHS, GroupNorm, ResidualBlock, ResNet
from fedvit.program import Role
from tests.support.counterparts import of_timms_resnet

SMALL = {"image_size": 8, "width": 8, "stages": 2, "groups": 2}


def model(name: str = RESNET, method: str = "fedavg", classes: int = 10, **options: Any) -> ResNet:
    made = build_model(make_method(method), name, classes, seed=0, options=options)
    assert isinstance(made, ResNet)
    return made


def logits(vit: ResNet, images_BCHW: Tensor) -> Tensor:
    return vit.classify(vit.run_to_class(vit.embed(images_BCHW.flatten(1).unsqueeze(1)), 0))


def test_a_device_hands_over_colours_rows_and_columns() -> None:
    """The one patch of an image, unfolded on the device, is the image as a convolution reads it."""
    vit = model(**SMALL)
    batch = method_batch(make_method("fedavg"), vit)
    assert (batch.patches, batch.patch_values, batch.tokens) == (1, 3 * 64, 1)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    patches = torch.from_numpy(unfold(normalise(pixels, batch), batch.patch_size))
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    torch.testing.assert_close(patches.reshape(2, 3, 8, 8), images, rtol=1e-5, atol=1e-5)


def test_group_norm_is_torchs() -> None:
    norm, x = GroupNorm(8, 4), torch.randn(3, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    torch.testing.assert_close(norm(x), functional.group_norm(x, 4, norm.weight, norm.bias))


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_compute_what_timms_with_group_norms_compute(name: str) -> None:
    vit = model(name, image_size=64, classes=5)
    theirs = timm.create_model(name, num_classes=5, norm_layer="groupnorm").eval()
    tensors, draw = vit.tensors(), torch.Generator().manual_seed(0)
    named = {of_timms_resnet(name, timms): value for timms, value in theirs.named_parameters()}
    assert named.keys() == tensors.keys()
    with torch.no_grad():
        for own, value in named.items():
            value.copy_(tensors[own].add_(0.1 * tensors[own].std().nan_to_num(1) * numbers(draw, *value.shape)))
            if "norm" in own:
                value.copy_(tensors[own].add_(0.1 * numbers(draw, *value.shape)))
        images = numbers(draw, 2, 3, 64, 64)
        torch.testing.assert_close(logits(vit, images), theirs(images), rtol=1e-3, atol=1e-3)


def numbers(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw)


def test_resnets_have_the_sizes_of_the_paper() -> None:
    # resnet 50 has the parameters of the papers table: FedPerfix, table 3: 24.37 in units of 2^20, with timm's 1000
    # classes
    with torch.device("meta"):
        vit = model("resnet50", classes=1000)
    parameters = sum(value.numel() for value in vit.tensors().values())
    assert parameters == 25_557_032
    assert round(parameters / 2**20, 2) == 24.37
    assert (*DEPTHS,) == RESNETS


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_block_begins_as_its_shortcut(block: Any) -> None:
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0)).relu()
    width = 8 if block == "basic" else 2
    assert torch.equal(ResidualBlock(8, width, 1, block, 2)(x), x)


@pytest.mark.parametrize(
    ("options", "stem", "sides"), [({"stem": "7x7"}, (7, 7), [16, 8, 4, 2]), ({"stem": "3x3"}, (3, 3), [64, 32, 16, 8])]
)
def test_stem_keeps_a_sixteenth_of_the_pixels_or_all(options: Any, stem: tuple[int, int], sides: list[int]) -> None:
    vit = model("resnet18", image_size=64, **options)
    assert tuple(vit.tensors()["stem.weight"].shape[2:]) == stem
    x = vit.embed(torch.zeros(1, 1, 3 * 64 * 64))
    found = []
    for block in range(vit.depth):
        x = vit.run_blocks(x, block, block + 1)
        found.append(x.shape[2])
    assert found[::2] == sides
    assert vit.product_rows(1) == sides[0] ** 2


def test_blocks_that_are_computed_again_have_the_same_gradient() -> None:
    vit, images = model(**SMALL), numbers(torch.Generator().manual_seed(0), 2, 3, 8, 8)
    grads = []
    for recompute in (False, True):
        vit.zero_grad()
        with vit.recomputing(recompute):
            logits(vit, images).square().sum().backward()
        grads.append([parameter.grad for parameter in vit.vit.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


def test_fedbn_keeps_all_norms() -> None:
    groups = make_method("fedbn").groups(model(method="fedbn", **SMALL))
    role, names = groups["personal"]
    assert role is Role.LOCAL
    assert names == [name for name in model(**SMALL).tensors() if "norm" in name]
    assert "blocks.1.shortcut_norm.weight" in names
