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
    from coordinator.compute.planning.batch import method_batch
    from export.graphs import export_graphs
    from fedvit.methods import build_model
    from fedvit.models import SMALL

    vit = build_model(method, SMALL, TINY_CLASSES, seed=0, options={**TINY_MODEL, **model})
    batch = method_batch(method, vit)
    return Tiny(method, vit, batch, export_graphs(method, vit, batch, cache=cache))
