"""Training steps of several devices side by side: one function of torch, mapped over the devices (`torch.func.vmap`).

It is the function that is traced into the graph of a device (`fedvit.methods.step`). Letters: D devices, T steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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


Precision = Literal["fp32", "tf32", "bf16"]
"""Of products. tf32 rounds their factors to 10 bits, bf16 computes in bfloat16; weights are float32 always."""


def in_precision(lanes: Lanes, precision: Precision, place: torch.device) -> Lanes:
    """The function with its products in a precision."""

    def call(*parts: Named) -> Named:
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        with torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16"):
            return lanes(*parts)

    return call


After = Callable[[int, Named], None]
"""Called behind a step, with its number and what came out of it."""


class Runner:
    """Makes the steps of some work, one operator after the other, on whatever place its tensors are."""

    def __init__(self, lanes: Lanes, pixels: Tensor, batch: Batch) -> None:
        self._lanes = lanes
        self._pixels = pixels
        self._batch = batch

    def run(self, work: Work, first: int, last: int, losses: Tensor, after: After | None = None) -> Named:
        """Steps `first` to `last - 1`; gives what `work.moving` is then.

        Each step's loss goes into `losses` (T, D).
        """
        moving = work.moving
        for step in range(first, last):
            outputs = one_step(
                self._lanes, replace(work, moving=moving), self._pixels, self._batch, _number(step, losses)
            )
            moving = {name: outputs[f"new/{name}"] for name in moving}
            losses[step, : outputs["metric/loss"].shape[0]] = outputs["metric/loss"]
            if after:
                after(step, outputs)
        return moving


def one_step(lanes: Lanes, work: Work, pixels: Tensor, batch: Batch, step: Tensor) -> Named:
    """Step number `step` (1,): its batch is made, and the function is called."""
    fed = {name: array.index_select(0, step).squeeze(0) for name, array in work.arrays.items()}
    given = {f"batch/{name}": fed[name] for name in ("labels", "weight", "kept") if name in fed}
    given["batch/patches"] = training_patches(pixels, fed, batch)
    scalars = {
        "hyper/lr": work.lr,
        "hyper/step": (step + 1).squeeze(0).float(),
        "hyper/last": work.last.index_select(0, step).squeeze(0),
    }
    return lanes(work.moving, work.own, work.common, given, scalars)


def _number(step: int, like: Tensor) -> Tensor:
    return torch.full((1,), step, dtype=torch.int64, device=like.device)


class CapturedRunner(Runner):
    """On a GPU: a step is recorded once as a graph of kernels and replayed, so that nothing is launched one by one.

    Work of the same shapes is copied to where the graph reads it.
    """

    WARM_UP = 3
    """Steps before a recording: libraries choose their kernels and take their memory in them."""

    def __init__(self, lanes: Lanes, pixels: Tensor, batch: Batch) -> None:
        super().__init__(lanes, pixels, batch)
        self._held: Work | None = None  # what the graph reads and writes
        self._graph = torch.cuda.CUDAGraph()
        self._outputs: Named = {}

    def run(self, work: Work, first: int, last: int, losses: Tensor, after: After | None = None) -> Named:
        if self._held is None or len(work.last) > len(self._held.last):
            self._capture(work, losses)
        assert self._held is not None
        self._take(work)
        self._at.fill_(first)
        for step in range(first, last):
            self._graph.replay()
            if after:
                after(step, self._outputs)
        count = self._losses.shape[1]
        losses[first:last, :count] = self._losses[first:last]
        return {name: value.clone() for name, value in self._held.moving.items()}

    def _take(self, work: Work) -> None:
        assert self._held is not None
        for mine, given in (
            (self._held.moving, work.moving),
            (self._held.own, work.own),
            (self._held.common, work.common),
        ):
            for name, value in given.items():
                mine[name].copy_(value)
        for name, array in work.arrays.items():
            self._held.arrays[name][: len(array)].copy_(array)
        self._held.last[: len(work.last)].copy_(work.last)
        self._held.lr.copy_(work.lr)

    def _capture(self, work: Work, losses: Tensor) -> None:
        room = 1 << (len(work.last) - 1).bit_length()  # devices with more images may come

        def longer(array: Tensor) -> Tensor:
            return array.new_zeros(room, *array.shape[1:])

        def copied(named: Named) -> Named:
            return {name: value.clone(memory_format=torch.contiguous_format) for name, value in named.items()}

        arrays = {name: longer(array) for name, array in work.arrays.items()}
        moving = copied(work.moving)
        held = Work(moving, copied(work.own), copied(work.common), arrays, longer(work.last), work.lr.clone())
        self._held, self._at = held, _number(0, losses)
        self._losses = losses.new_zeros(room, next(iter(moving.values())).shape[0])
        self._take(work)
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self.WARM_UP):
                self._at.zero_()
                self._one()
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._one()

    def _one(self) -> Named:
        assert self._held is not None
        outputs = one_step(self._lanes, self._held, self._pixels, self._batch, self._at)
        for name, value in self._held.moving.items():
            value.copy_(outputs[f"new/{name}"])
        self._losses.index_copy_(0, self._at, outputs["metric/loss"][None])
        self._at.add_(1)
        return {name: value for name, value in outputs.items() if name.startswith("collect/")}


def compiled(lanes: Lanes) -> Lanes:
    """The same function as fused kernels, made when it is first called with tensors of some shapes."""
    made: dict[tuple[object, ...], tuple[Callable[..., list[Tensor]], list[str]]] = {}

    def call(*parts: Named) -> Named:
        names = [list(part) for part in parts]
        flat = [value for part in parts for value in part.values()]
        key = tuple((tuple(value.shape), value.dtype) for value in flat)
        if key not in made:
            made[key] = _compiled(lanes, names, flat)
        function, outputs = made[key]
        return dict(zip(outputs, function(*flat), strict=True))

    return call


def _compiled(
    lanes: Lanes, names: Sequence[Sequence[str]], examples: Sequence[Tensor]
) -> tuple[Callable[..., list[Tensor]], list[str]]:
    outputs: list[str] = []

    def flat(*values: Tensor) -> list[Tensor]:
        left = iter(values)
        results = lanes(*({name: next(left) for name in part} for part in names))
        outputs[:] = results
        return list(results.values())

    # the compiler cannot see through a mapped gradient: it gets the operators that it comes to
    module = make_fx(flat, tracing_mode="fake")(*examples)
    return torch.compile(module, fullgraph=True, dynamic=False), outputs
