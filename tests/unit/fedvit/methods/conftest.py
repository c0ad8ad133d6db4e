"""A model that tests of several methods share."""

import pytest

from fedvit.models.vit import PatchViT
from tests.support.quadratic import small


@pytest.fixture(scope="session")
def vit() -> PatchViT:
    """One block, in float64; some files have another of their own."""
    return small().double()
