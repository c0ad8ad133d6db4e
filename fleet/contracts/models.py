"""Laws of models: a plain method trains them as it trains fedvit's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedvit.known_names import find_packaged_model
from fedvit.methods import build_model, make_method
from fedvit.models import build_vit, load_model
from fedvit.models.text import TextModel
from fedvit.models.vit import PatchViT
from fleet.contracts.laws import Law, require
from fleet.contracts.training import CLASSES, OPTIONS, SMALL_MODEL, Samples, check_engines, check_graphs

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


def classify_samples(name: str) -> None:
    """It answers images, or each character of texts, with a finite number for each class, one sample as many."""
    for classes in (2, CLASSES):
        vit = _build(name, classes=classes)
        samples = _draw_samples(vit, classes)
        whole = _classify(vit, samples)
        want = (*samples.shape, classes) if isinstance(vit, TextModel) else (len(samples), classes)
        require(whole.shape == want, f"logits have shape {[*whole.shape]}, expected {[*want]}")
        require(bool(whole.isfinite().all()), "a logit is not finite")
        alone = torch.cat([_classify(vit, samples[place : place + 1]) for place in range(len(samples))])
        require(np.allclose(whole, alone, atol=1e-4), "logits depend on the other samples of a batch")


def have_dimensions(name: str) -> None:
    """It has a size, a width, blocks, a head, and costs above zero."""
    vit = _build(name)
    size = _find_samples(vit).size
    numbers = {
        "size": size, "width": vit.width, "depth": vit.depth,
        "activation_bytes": vit.activation_bytes(size), "product_rows": vit.product_rows(size),
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
    check_engines(settings, _find_samples(_build(name)))


LAWS: tuple[Law, ...] = (
    follow_its_seed,
    classify_samples,
    have_dimensions,
    agree_with_torch,
    train_the_same_on_both_engines,
)


def _find_options(name: str) -> Mapping[str, Any]:
    entry = find_packaged_model(name)
    return SMALL_MODEL if entry is None else load_model(entry).contract_options


def _build(name: str, seed: int = 0, classes: int = CLASSES) -> PatchViT:
    return build_vit(name, classes, seed=seed, options={**_find_options(name)})


def _find_samples(vit: PatchViT) -> Samples:
    return Samples(vit.context, is_text=True) if isinstance(vit, TextModel) else Samples(vit.image_size)


def _draw_samples(vit: PatchViT, classes: int, count: int = 5) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    if isinstance(vit, TextModel):
        return torch.randint(classes, (count, vit.context), generator=draw)
    return torch.rand((count, vit.patches, 3 * vit.patch_size**2), generator=draw) * 2 - 1


@torch.no_grad()
def _classify(vit: PatchViT, samples: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = vit.classify(vit.run_to_class(vit.embed(samples), 0))
    return logits
