"""A model as small as they come: 16 patches and 3 blocks of width 32, and its exported graphs."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the device's tests run without torch
    from export.graphs import Exported
    from fedvit.methods.base import Method
    from fedvit.models.vit import PatchViT
    from fedvit.program import Batch

TINY_MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2, "mlp_ratio": 4.0}
TINY_OPTIONS = {"batch_size": 8}
TINY_CLASSES = 10


class Tiny(NamedTuple):
    """A method on the tiny model, and its verified graphs."""

    method: "Method"
    vit: "PatchViT"
    batch: "Batch"
    graphs: "dict[str, Exported]"


def make_tiny(method: "Method", cache: Path, **model: int) -> Tiny:
    """A method on the tiny model: 16 patches and 3 blocks of width 32, unless `model` says otherwise."""
    from export.graphs import export_graphs
    from fedvit.methods import build_model
    from fedvit.models import SMALL
    from fedvit.program import Batch

    vit = build_model(method, SMALL, TINY_CLASSES, seed=0, options={**TINY_MODEL, **model})
    mean, std = vit.mean_std
    batch = Batch(
        image_size=vit.image_size,
        patch_size=vit.patch_size,
        batch_size=method.samples_per_step,
        mean=mean,
        std=std,
        mask_ratio=method.mask_ratio,
        micro_batch=method.micro_batch,
    )
    return Tiny(method, vit, batch, export_graphs(method, vit, batch, cache=cache))
