"""The plain convolutional network: its layers by torch's functions, its norms, and images that fit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.models import CNN
from fedvit.models.cnn import Cnn
from fedvit.program import Role
from tests.support.codes import has_code


def model(method: str = "fedavg", **options: Any) -> Cnn:
    made = build_model(make_method(method), CNN, 10, seed=0, options=options)
    assert isinstance(made, Cnn)
    return made


def logits(vit: Cnn, images_BCHW: Tensor) -> Tensor:
    return vit.classify(vit.run_to_class(vit.embed(images_BCHW.flatten(1).unsqueeze(1)), 0))


@pytest.mark.parametrize("image_size", [16, 32])
def test_two_convolutions_with_pools_and_three_linear_layers(image_size: int) -> None:
    vit = model(image_size=image_size, width=4)
    images = torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    tensors, x = vit.tensors(), images
    for name in ("stem.conv", "blocks.0.conv"):
        x = functional.conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        x = functional.max_pool2d(x.relu(), 2)
    x = x.flatten(1)
    for name in ("blocks.1.linear", "blocks.2.linear"):
        x = functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]).relu()
    want = functional.linear(x, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(logits(vit, images), want)


def test_size_of_fedtps_network() -> None:
    """Kernels of 5, 16 and 32 channels, 120 and 84 units: 16 x 76 + 32 x 401 + 120 x 801 + 84 x 121 + 10 x 85."""
    assert sum(value.numel() for value in model().tensors().values()) == 1216 + 12832 + 96120 + 10164 + 850


def test_fedbn_needs_norms_and_keeps_them() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1111")):
        model("fedbn")
    vit = model("fedbn", groups=4)
    local = make_method("fedbn").names_with(vit, Role.LOCAL)
    assert local == [
        f"{layer}.norm1.{kind}" for layer in ("stem", "blocks.0", "blocks.1", "blocks.2") for kind in ("weight", "bias")
    ]


@pytest.mark.parametrize(("option", "value", "code"), [("image_size", 15, "FV1104"), ("groups", 3, "FV1109")])
def test_options_that_do_not_fit(option: str, value: int, code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code)):
        model(**{option: value})
