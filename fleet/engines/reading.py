"""A method's samples: images, or the features of images behind a backbone that it leaves as it is."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedvit.methods.base import Method, list_patches
from fedvit.models.feature_model import FeatureModel
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Role
from fleet.engines.pictures import whole_samples

AT_ONCE = 64
"""Images whose features are computed in one batch."""


class Reading(NamedTuple):
    """The samples of all devices, and the model that reads them."""

    vit: PatchViT
    pixels: Tensor  # (n, S, S, 3) images, (n, context) characters or (n, D) features
    batch: Batch | None  # None: features


def reads_features(method: Method, vit: PatchViT, batch: Batch) -> bool:
    """Return True if a method's results follow from features that never change: no masks, augmentation or dropout."""
    is_varied = batch.kept_patches < batch.patches or batch.is_augmented
    if not method.is_probe or batch.text or is_varied or batch.sample_seeds or list_patches(method):
        return False
    if method.evaluate(vit).gather:
        return False
    frozen = set(method.names_with(vit, Role.FROZEN))
    return all(name in frozen or name.startswith("head.") for name in vit.tensors())


@torch.no_grad()
def read_features(vit: PatchViT, tensors: Mapping[str, Tensor], pixels: Tensor, batch: Batch) -> Reading:
    """Compute the features of all images with these tensors of the model."""

    def read(some: Tensor) -> Tensor:
        patches = whole_samples(some, batch)["batch/patches"]
        features: Tensor = vit.call(tensors, lambda vit: vit.features(vit.run_to_class(vit.embed(patches), 0)))
        return features.float()

    return Reading(FeatureModel(vit), torch.cat([read(some) for some in torch.split(pixels, AT_ONCE)]), None)
