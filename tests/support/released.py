"""Modules of released repositories, and a device's round in float64 to compare with theirs.

FEDVIT_REFERENCE is a folder with checkouts, each named as its repository. No code of them is kept here: their modules
are loaded when a test runs.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedvit.data.images import unfold
from fedvit.methods.base import Images, Method, list_trained
from fedvit.methods.calculus import Named
from fedvit.methods.step import whole_step
from fedvit.models.vit import PatchViT

REFERENCE = Path(os.environ.get("FEDVIT_REFERENCE", "not-named"))

Batches = Sequence[tuple[Tensor, Tensor]]
"""(B, 3, S, S) images and (B,) labels."""


class _Unused(ModuleType):
    """A package that released code imports, and that no test runs."""

    def __getattr__(self, name: str) -> Any:
        return object


def load_modules(folder: str, *names: str, unused: Sequence[str] = ()) -> list[Any]:
    """Import modules of a checkout. Packages in `unused` need not be installed.

    Their names, such as "utils", are free again afterwards, so that several checkouts can be loaded.
    """
    root = REFERENCE / folder
    taken = {path.stem for path in root.iterdir()} | set(unused)

    def pop_taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in taken}

    hidden = pop_taken()
    sys.modules.update({name: _Unused(name) for name in unused})
    sys.path.insert(0, str(root))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(root))
        pop_taken()
        sys.modules.update(hidden)


def make_client(kind: Any, **values: Any) -> Any:
    """Make an object of a released class without its constructor, which reads files."""
    client = object.__new__(kind)
    vars(client).update(train_slow=False, device="cpu", train_time_cost={"num_rounds": 0, "total_cost": 0.0}, **values)
    return client


def draw_batches(seed: int, counts: Sequence[int], side: int, classes: int) -> list[tuple[Tensor, Tensor]]:
    """Draw batches of these lengths: normal images in float64, and labels."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(count, 3, side, side, generator=draw, dtype=torch.float64),
            torch.randint(0, classes, (count,), generator=draw),
        )
        for count in counts
    ]


def as_images(vit: PatchViT, images: Tensor) -> Images:
    """Images as a model reads them."""
    patches = unfold(images.permute(0, 2, 3, 1).numpy(), vit.patch_size)
    return Images(torch.from_numpy(patches), None)


def train_device(method: Method, vit: PatchViT, tensors: Named, batches: Batches) -> dict[str, Tensor]:
    """Train all phases of a round, each epoch on the same batches; return all tensors afterwards."""
    start, now = dict(tensors), dict(tensors)
    labels = torch.cat([labels for _, labels in batches])
    kind = next(iter(tensors.values())).dtype
    counts = torch.bincount(labels, minlength=vit.classes).to(kind)
    for phase in method.phases(vit):
        step, trained = whole_step(method, vit, phase), list_trained(method, vit, phase)
        kept = {f"slot/{slot}/{name}": torch.zeros_like(now[name]) for slot in phase.slots for name in trained}
        passes = [batch for _ in range(phase.epochs) for batch in batches][: phase.steps]
        steps = [(batch, number) for batch in passes for number in range(phase.repeats)]
        for count, ((images, chosen), repeat) in enumerate(steps, start=1):
            inputs = {
                **{f"tensor/{name}": value for name, value in now.items()},
                **{f"anchor/{name}": start[name] for name in method.names_in(vit, *phase.anchors)},
                **kept,
                "batch/patches": as_images(vit, images).patches,
                "batch/labels": chosen,
                "batch/weight": torch.ones(len(chosen), dtype=kind),
                "fact/class_counts": counts,
                "hyper/lr": torch.tensor(phase.lr, dtype=kind),
                "hyper/step": torch.tensor(float(count), dtype=kind),
            }
            if phase.repeats > 1:
                inputs["hyper/last"] = torch.tensor(float(repeat == phase.repeats - 1), dtype=kind)
            after = step(inputs)
            now |= {name: after[f"new/tensor/{name}"].detach() for name in trained}
            kept = {name: after[f"new/{name}"].detach() for name in kept}
    return now


def in_double(tensors: Named) -> dict[str, Tensor]:
    return {name: value.double() for name, value in tensors.items()}


def assert_equal(got: Named, want: Named, atol: float) -> None:
    """Compare tensors by name; the largest difference of all may be `atol`."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
