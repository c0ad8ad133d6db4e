"""Weights that nothing trains, as devices get them."""

import numpy as np
import pytest

from fedvit.methods import make_method
from fedvit.methods.packed import as_sent
from tests.support.quadratic import small


@pytest.mark.parametrize(("options", "largest"), [({"frozen_precision": "int8"}, 127), ({"compute": "int8"}, 64)])
def test_factors_of_integer_products_have_fewer_steps(options: dict[str, str], largest: int) -> None:
    """x86 processors without VNNI add two products of 255 with such a factor in 16 bits: 2 x 255 x 64 < 2^15."""
    vit = small(3)
    values = {name: value.numpy() for name, value in vit.tensors().items()}
    packed = as_sent(make_method("fed_head", options), vit, values)["blocks.0.mlp.fc1.weight"]
    assert packed.dtype == np.int8
    assert np.abs(packed.astype(int)).max() == largest
