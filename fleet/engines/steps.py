"""Training steps of several devices side by side: one function of torch, mapped over the devices (`torch.func.vmap`).

It is the function that is traced into the graph of a device (`fedvit.methods.step`). Letters: D devices, T steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.methods.step import Step
from fedvit.program import Batch
from fleet.engines.pictures import training_patches

Named = dict[str, Tensor]

Lanes = Callable[[Named, Named, Named, Named, Named], Named]
"""(what moves, each device's own, common, batch, scalars) -> the step's outputs; the first, second and fourth with an
axis of devices in front."""


def side_by_side(step: Step) -> Lanes:
    """The step of D devices at a time."""

    def lane(moving: Named, own: Named, common: Named, batch: Named, scalars: Named) -> Named:
        return step({**moving, **own, **common, **batch, **scalars})

    return torch.func.vmap(lane, in_dims=(0, 0, None, 0, None))


@dataclass
class Work:
    """The steps of D devices in one phase, and what they need."""

    moving: Named  # (D, ...): `tensor/NAME` of what is trained, and `slot/SLOT/NAME`
    own: Named  # (D, ...): other inputs that differ between devices
    common: Named  # inputs that do not
    arrays: Named  # (T, D, B, ...): batches, see `Drawn`
    last: Tensor  # (T,): 1 in the last repeat of a batch
    lr: Tensor  # ()

    def of_first(self, count: int) -> "Work":
        """The same work of the first devices alone."""

        def fewer(named: Named) -> Named:
            return {name: value[:count] for name, value in named.items()}

        arrays = {name: value[:, :count] for name, value in self.arrays.items()}
        return Work(fewer(self.moving), fewer(self.own), self.common, arrays, self.last, self.lr)


class Runner:
    """Makes the steps of some work one by one, on whatever place its tensors are."""

    def __init__(self, lanes: Lanes, pixels: Tensor, batch: Batch) -> None:
        self._lanes = lanes
        self._pixels = pixels
        self._batch = batch

    def run(
        self, work: Work, first: int, last: int, losses: Tensor, after: Callable[[int, Named], None] | None = None
    ) -> None:
        """Steps `first` to `last - 1`: moves `work.moving`, notes each step's loss in `losses` (T, D), and calls
        `after` with what it collected."""
        for step in range(first, last):
            at = torch.tensor([step], device=losses.device)
            outputs = self._step(work, at)
            work.moving = {name: outputs[f"new/{name}"] for name in work.moving}
            losses[step, : outputs["metric/loss"].shape[0]] = outputs["metric/loss"]
            if after:
                after(step, outputs)

    def _step(self, work: Work, at: Tensor) -> Named:
        fed = {name: array.index_select(0, at).squeeze(0) for name, array in work.arrays.items()}
        batch = {f"batch/{name}": fed[name] for name in ("labels", "weight", "kept") if name in fed}
        batch["batch/patches"] = training_patches(self._pixels, fed, self._batch)
        scalars = {
            "hyper/lr": work.lr,
            "hyper/step": (at + 1).squeeze(0).float(),
            "hyper/last": work.last.index_select(0, at).squeeze(0),
        }
        return self._lanes(work.moving, work.own, work.common, batch, scalars)
