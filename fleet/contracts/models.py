"""Laws of models: a plain method trains them as it trains fedvit's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedvit.known_names import find_packaged_model
from fedvit.methods import build_model, make_method
from fedvit.models import build_vit, load_model
from fedvit.models.vit import PatchViT
from fleet.contracts.laws import Law, require
from fleet.contracts.training import CLASSES, OPTIONS, SMALL_MODEL, check_engines, check_graphs

METHOD = "fedavg"


def follow_its_seed(name: str) -> None:
    """The same seed gives the same finite float32 tensors, another seed others."""
    first, again, other = (_build(name, seed).tensors() for seed in (0, 0, 1))
    require(bool(first), "it has no tensors")
    for tensor, value in first.items():
        require(
            value.dtype == torch.float32 and bool(value.isfinite().all()), f"{tensor} is {value.dtype}, or infinite"
        )
        require(torch.equal(value, again[tensor]), f"{tensor}: seed 0 gives two values")
    require(any(not torch.equal(value, other[tensor]) for tensor, value in first.items()), "seed 1 gives the same")


def classify_images(name: str) -> None:
    """It answers images with a finite number for each class, whatever the other images are."""
    for classes in (2, CLASSES):
        vit = _build(name, classes=classes)
        values = 3 * vit.patch_size**2
        patches = torch.rand((5, vit.patches, values), generator=torch.Generator().manual_seed(0)) * 2 - 1
        whole = _classify(vit, patches)
        require(whole.shape == (5, classes), f"logits of 5 images and {classes} classes have shape {[*whole.shape]}")
        require(bool(whole.isfinite().all()), "a logit is not finite")
        alone = torch.cat([_classify(vit, patches[place : place + 1]) for place in range(5)])
        require(np.allclose(whole, alone, atol=1e-4), "logits depend on the other images of a batch")


def have_dimensions(name: str) -> None:
    """It has a width, blocks, a head, and costs above zero."""
    vit = _build(name)
    numbers = {
        "image_size": vit.image_size, "patches": vit.patches, "width": vit.width, "depth": vit.depth,
        "activation_bytes": vit.activation_bytes(vit.patches), "product_rows": vit.product_rows(vit.patches),
    }  # fmt: skip
    for what, number in numbers.items():
        require(number >= 1, f"{what} is {number}")
    require(any(tensor.startswith("head.") for tensor in vit.tensors()), "no tensor begins with 'head.'")


def agree_with_torch(name: str) -> None:
    """Its graphs, which devices run, compute what torch computes."""
    method = make_method(METHOD, OPTIONS)
    check_graphs(method, build_model(method, name, CLASSES, seed=0, options={**_find_options(name)}))


def train_the_same_on_both_engines(name: str) -> None:
    """Two rounds give the same tensors on onnxruntime, as on devices, and on torch."""
    settings = {"method": METHOD, "model": name, "model_options": {**_find_options(name)}}
    check_engines(settings, _build(name).image_size)


LAWS: tuple[Law, ...] = (
    follow_its_seed,
    classify_images,
    have_dimensions,
    agree_with_torch,
    train_the_same_on_both_engines,
)


def _find_options(name: str) -> Mapping[str, Any]:
    entry = find_packaged_model(name)
    return SMALL_MODEL if entry is None else load_model(entry).contract_options


def _build(name: str, seed: int = 0, classes: int = CLASSES) -> PatchViT:
    return build_vit(name, classes, seed=seed, options={**_find_options(name)})


@torch.no_grad()
def _classify(vit: PatchViT, patches: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = vit.classify(vit.run_to_class(vit.embed(patches), 0))
    return logits
