"""Training steps of several devices in one batch: one function of torch, mapped over devices (`torch.func.vmap`).

It is the function that is traced into the graph of a device (`fedvit.methods.step`). Letters: D devices, T steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedvit.methods.products import products_in
from fedvit.methods.step import Step
from fedvit.program import Batch
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array
from fleet.engines.pictures import training_samples

Named = dict[str, Tensor]


BatchedStep = Callable[[Named, Named, Named, Named, Named], Named]
"""(updated tensors, each device's own, common, batch, scalars) -> the step's outputs. The first, second and fourth, and
the outputs, have an axis of devices in front."""
StepForm = TypeVar("StepForm", Step, BatchedStep)


def batched_step(step: Step, log: Callable[[str], None]) -> BatchedStep:
    """The step of D devices at once; one after the other, with a line of log, where it cannot be mapped."""

    def one_device(*parts: Named) -> Named:
        return step({name: value for part in parts for name, value in part.items()})

    mapped = torch.func.vmap(one_device, in_dims=(0, 0, None, 0, None))
    is_mapped = True

    def call(*parts: Named) -> Named:
        nonlocal is_mapped
        if is_mapped:
            try:
                return mapped(*parts)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # vmap has no exception of its own
                is_mapped = False
                log(f"devices are computed one after the other: {str(error).splitlines()[0]}")
        return one_by_one(step)(*parts)

    return call


def one_by_one(step: Step) -> BatchedStep:
    """The step of one device after the other."""

    def call(updated: Named, own: Named, common: Named, batch: Named, scalars: Named) -> Named:
        results = []
        for device in range(len(next(iter(batch.values())))):
            part = {name: value[device] for name, value in {**updated, **own, **batch}.items()}
            results.append(step({**part, **common, **scalars}))
        return {name: torch.stack([result[name] for result in results]) for name in results[0]}

    return call


@dataclass
class BatchWork:
    """The steps of D devices in one phase, and what they need."""

    updated: Named  # (D, ...): `tensor/NAME` of trained tensors, and `slot/SLOT/NAME`
    own: Named  # (D, ...): other inputs that differ between devices
    common: Named  # inputs that all devices share
    arrays: Named  # (T, D, B, ...): batches, see `Drawn`
    ends: Tensor  # (D,): number of steps of each device
    last: Tensor  # (T,): 1 in the last repeat of a batch
    lr: Tensor  # ()

    def select_devices(self, devices: slice | list[int]) -> "BatchWork":
        """The work of some devices, in this order."""

        def select(named: Named) -> Named:
            return {name: value[devices] for name, value in named.items()}

        arrays = {name: value[:, devices] for name, value in self.arrays.items()}
        return BatchWork(
            select(self.updated), select(self.own), self.common, arrays, self.ends[devices], self.last, self.lr
        )


ACTIVE = "batch/active"
"""(D,): whether a device still has batches at a step."""


def skip_finished(batched: BatchedStep) -> BatchedStep:
    """The step, without an update for devices that have no further batch."""

    def call(updated: Named, own: Named, common: Named, batch: Named, scalars: Named) -> Named:
        given = {name: value for name, value in batch.items() if name != ACTIVE}
        outputs = batched(updated, own, common, given, scalars)
        for name, before in updated.items():
            active = batch[ACTIVE].reshape(-1, *(1 for _ in before.shape[1:]))
            outputs[f"new/{name}"] = torch.where(active, outputs[f"new/{name}"], before)
        return outputs

    return call


def with_precision(step: StepForm, precision: ProductPrecision, accelerator: torch.device) -> StepForm:
    """The step with its products in a precision."""

    def call(*parts: Named) -> Named:
        with products_in(precision, accelerator):
            return step(*parts)

    return cast(StepForm, call)


After = Callable[[int, Named], None]
"""Called after a step, with its number and its outputs."""


class Runner:
    """Runs the steps of some work, operator by operator, on the accelerator of its tensors."""

    def __init__(self, batched: BatchedStep, pixels: Tensor, batch: Batch | None) -> None:
        self._steps = batched
        self._pixels = pixels
        self._batch = batch

    def run(self, work: BatchWork, first: int, last: int, losses: Tensor, after: After | None = None) -> Named:
        """Run steps `first` to `last - 1`; the new `work.updated`. Losses are stored in `losses` (T, D)."""
        updated = work.updated
        for step in range(first, last):
            at = torch.full((1,), step, dtype=torch.int64, device=losses.device)
            outputs = one_step(self._steps, replace(work, updated=updated), self._pixels, self._batch, at)
            updated = {name: outputs[f"new/{name}"] for name in updated}
            losses[step, : outputs["metric/loss"].shape[0]] = outputs["metric/loss"]
            if after:
                after(step, outputs)
        return updated


def one_step(batched: BatchedStep, work: BatchWork, pixels: Tensor, batch: Batch | None, step: Tensor) -> Named:
    """Make the batch of step number `step` (1,), and call the step on it."""
    fed = {name: array.index_select(0, step).squeeze(0) for name, array in work.arrays.items()}
    given = {f"batch/{name}": fed[name] for name in ("labels", "weight", "kept", "seeds") if name in fed}
    given |= training_samples(pixels, fed, batch)
    scalars = {
        "hyper/lr": work.lr,
        "hyper/step": (step + 1).squeeze(0).float(),
        "hyper/last": work.last.index_select(0, step).squeeze(0),
    }
    return batched(work.updated, work.own, work.common, {**given, ACTIVE: step < work.ends}, scalars)


class CapturedRunner(Runner):
    """On a GPU: records a step once as a CUDA graph and replays it, which saves the launch of each kernel.

    A step reads and writes fixed tensors, into which work of the same shapes is copied. With `recorded` false it does
    the same without a graph, on any accelerator.
    """

    WARM_UP = 3
    """Steps before a recording, in which libraries choose kernels and allocate memory."""

    def __init__(self, batched: BatchedStep, pixels: Tensor, batch: Batch | None, *, recorded: bool = True) -> None:
        super().__init__(batched, pixels, batch)
        self._recorded = recorded
        self._held: BatchWork | None = None  # the tensors that the graph reads and writes
        self._replay: Callable[[], object] = self._one
        self._outputs: Named = {}

    def run(self, work: BatchWork, first: int, last: int, losses: Tensor, after: After | None = None) -> Named:
        if self._held is None or len(work.last) > len(self._held.last):
            self._held = self._allocate(work, losses)
            self._copy(work, self._held)
            if self._recorded:
                self._record()
        held = self._held
        self._copy(work, held)
        self._at.fill_(first)
        for step in range(first, last):
            self._replay()
            if after:
                after(step, self._outputs)
        losses[first:last, : self._losses.shape[1]] = self._losses[first:last]
        return {name: value.clone() for name, value in held.updated.items()}

    def _allocate(self, work: BatchWork, losses: Tensor) -> BatchWork:
        steps = 1 << (len(work.last) - 1).bit_length()  # later cohorts may have devices with more images

        def longer(array: Tensor) -> Tensor:
            return array.new_zeros(steps, *array.shape[1:])

        def copied(named: Named) -> Named:
            return {name: value.clone(memory_format=torch.contiguous_format) for name, value in named.items()}

        self._at = torch.zeros(1, dtype=torch.int64, device=losses.device)
        self._losses = losses.new_zeros(steps, len(work.ends))
        arrays = {name: longer(array) for name, array in work.arrays.items()}
        common = copied(work.common)
        return BatchWork(
            copied(work.updated),
            copied(work.own),
            common,
            arrays,
            work.ends.clone(),
            longer(work.last),
            work.lr.clone(),
        )

    def _copy(self, work: BatchWork, held: BatchWork) -> None:
        pairs = [(held.ends, work.ends), (held.last[: len(work.last)], work.last), (held.lr, work.lr)]
        for mine, given in ((held.updated, work.updated), (held.own, work.own), (held.common, work.common)):
            pairs += [(mine[name], value) for name, value in given.items()]
        pairs += [(held.arrays[name][: len(array)], array) for name, array in work.arrays.items()]
        for dtype in {target.dtype for target, _ in pairs}:
            targets, sources = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(list(targets), list(sources))

    def _record(self) -> None:
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(self.WARM_UP):
                self._at.zero_()
                self._one()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one()
        self._replay = graph.replay

    def _one(self) -> None:
        held = self._held
        assert held is not None
        outputs = one_step(self._steps, held, self._pixels, self._batch, self._at)
        torch._foreach_copy_(list(held.updated.values()), [outputs[f"new/{name}"] for name in held.updated])
        self._losses.index_copy_(0, self._at, outputs["metric/loss"][None])
        self._at.add_(1)
        self._outputs = {name: value for name, value in outputs.items() if name.startswith("collect/")}


def compile_step(step: StepForm, backend: str = "inductor") -> StepForm:
    """Compile a step into fused kernels, at the first call with tensors of given shapes."""
    made: dict[tuple[object, ...], tuple[Callable[..., list[Tensor]], list[str]]] = {}

    def call(*parts: Named) -> Named:
        names = [list(part) for part in parts]
        flat = [value for part in parts for value in part.values()]
        key = tuple((tuple(value.shape), value.dtype) for value in flat)
        if key not in made:
            made[key] = _compile_for(step, names, flat, backend)
        function, outputs = made[key]
        return dict(zip(outputs, function(*flat), strict=True))

    return cast(StepForm, call)


def _compile_for(
    step: Callable[..., Named], names: Sequence[Sequence[str]], examples: Sequence[Tensor], backend: str
) -> tuple[Callable[..., list[Tensor]], list[str]]:
    outputs: list[str] = []

    def flat(*values: Tensor) -> list[Tensor]:
        left = iter(values)
        results = step(*({name: next(left) for name in part} for part in names))
        outputs[:] = results
        return list(results.values())

    # the compiler does not support mapped gradients, so it gets the traced operators
    module = make_fx(flat, tracing_mode="fake")(*examples)
    # products of 65 tokens, for instance, are several times slower on a GPU than those of 72
    options: dict[str, Any] | None = {"force_shape_pad": True} if backend == "inductor" else None
    return torch.compile(module, fullgraph=True, dynamic=False, backend=backend, options=options), outputs


def to_numpy(tensors: Named) -> dict[str, Array]:
    """(D, ...) float32 tensors as numpy arrays, copied from the accelerator in one piece."""
    if not tensors:
        return {}
    flat = torch.cat([value.flatten(1) for value in tensors.values()], dim=1)
    if flat.device.type == "cuda":
        flat = torch.empty(flat.shape, pin_memory=True).copy_(flat)
    arrays = flat.numpy()
    parts = np.split(arrays, np.cumsum([value[0].numel() for value in tensors.values()])[:-1], axis=1)
    return {name: part.reshape(value.shape) for (name, value), part in zip(tensors.items(), parts, strict=True)}
