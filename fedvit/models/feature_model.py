"""A model that reads features in place of images: what remains where a backbone stays as it is."""

from typing import Any, cast

from torch import Tensor, nn

from fedvit.models.recompute import SampleSeeds
from fedvit.models.vit import PatchViT


class FeatureModel(PatchViT):
    """The head of another model. For methods that read the backbone by `embed`, `run_to_class` and `features` alone."""

    def __init__(self, vit: PatchViT) -> None:
        nn.Module.__init__(self)
        self.name = vit.name
        self.vit = cast(Any, nn.Module())
        self.vit.head = vit.vit.head
        self.seeds = SampleSeeds()
        self.recompute = False
        self.label_form = vit.label_form

    def embed(self, patches_BNP: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        return patches_BNP

    def run_to_class(self, x_BND: Tensor, first: int, last: int | None = None) -> Tensor:
        return x_BND

    def features(self, x_BND: Tensor, normed: bool = True) -> Tensor:
        return x_BND
