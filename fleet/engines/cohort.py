"""The local work of several devices of one Program, side by side: training phases and evaluations.

It gives what `edge_client.runtime` gives on each device alone, with the same draws. Letters: D devices, T steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_client.batches import chosen_rows, facts_of
from edge_client.sampler import MedianSampler
from fedvit.data.folder import Flags
from fedvit.data.images import Indices
from fedvit.methods.base import Method
from fedvit.methods.step import Step, gather_step, predict_step, whole_step
from fedvit.models.vit import PatchViT
from fedvit.program import LABELS, Batch, Gather, Program, Train
from fedvit.roles import ProductPrecision
from fedvit.tensors import Array, Tensors
from fleet.engines.pictures import Drawn, Images, Pictures, draw_training, normalised, unfolded
from fleet.engines.steps import (
    CapturedRunner,
    Lanes,
    Named,
    Runner,
    Work,
    compiled,
    in_precision,
    side_by_side,
    until_through,
)

ANSWERED_AT_ONCE = 64
"""Images of each device that are answered together."""


class Values(NamedTuple):
    """Tensors of a Program for D devices: those that are the same for all, and those that are not, (D, ...)."""

    common: Named
    own: Named

    def of(self, name: str, devices: int) -> Tensor:
        """(D, ...)"""
        return self.own[name] if name in self.own else self.common[name].expand(devices, *self.common[name].shape)

    def with_own(self, tensors: Named) -> "Values":
        common = {name: value for name, value in self.common.items() if name not in tensors}
        return Values(common, {**self.own, **tensors})

    def devices(self, part: slice) -> "Values":
        return Values(self.common, {name: value[part] for name, value in self.own.items()})


@dataclass
class Trained:
    """What a round's local work gave on D devices."""

    tensors: Named  # (D, ...): new values of all that a phase moved
    collected: list[Tensors]
    samples: list[int]  # each device's images, but for those that could not be decoded
    losses: list[float]  # mean over the last epoch
    flops: list[int]


class Cohort:
    """One run's: the functions of its methods, and the images of its devices."""

    def __init__(
        self,
        vit: PatchViT,
        pictures: Pictures,
        place: torch.device,
        *,
        precision: ProductPrecision,
        fused: bool,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._precision = precision
        self._fused = fused
        self._captures = place.type == "cuda"
        self._vit = vit
        self._pictures = pictures
        self._place = place
        self._lanes: dict[tuple[object, ...], Lanes] = {}
        self._runners: dict[tuple[Method, Train, int, bool], Runner] = {}

    def forget(self) -> None:
        """Give back the memory of recordings and compiled functions; they are made again when they are needed."""
        self._runners.clear()
        self._lanes.clear()
        if self._captures:
            torch.cuda.empty_cache()

    # --- training -------------------------------------------------------------------------------------

    def train(
        self,
        program: Program,
        method: Method,
        phases: Sequence[Train],
        values: Values,
        images: Sequence[Images],  # of each device; the most first
        generators: Sequence[list[np.random.Generator]],  # of each device
        lr_scale: float,
    ) -> Trained:
        """Run the phases from the round's start values. Raises DataError when a device has no image to train with."""
        count, start = len(images), values
        trained = Trained({}, [{} for _ in images], [], [0.0] * count, [0] * count)
        lost: list[set[int]] = [set() for _ in images]
        for phase in phases:
            facts = [
                facts_of(program, phase, one.split, drawing[4]) for one, drawing in zip(images, generators, strict=True)
            ]
            samplers = [
                MedianSampler(one.labels, phase.epochs, phase.collect.threshold, drawing[3]) if phase.collect else None
                for one, drawing in zip(images, generators, strict=True)
            ]
            drawn = [
                draw_training(one, program.batch, phase, drawing[:3])
                for one, drawing in zip(images, generators, strict=True)
            ]
            for device, (one, drawing) in enumerate(zip(images, drawn, strict=True)):
                for rows in drawing.rows:
                    lost[device].update(rows[~one.readable[rows]].tolist())
                trained.flops[device] += drawing.runs * phase.repeats * program.graphs[phase.graph].flops
            moved = [name for group in phase.groups for name in program.names(group)]
            work = self._work(program, phase, moved, values, start, facts, drawn, lr_scale)
            tensors, trained.losses = self._run(program, method, phase, work, drawn, samplers, trained)
            values = values.with_own(tensors)
            trained.tensors |= tensors
        trained.samples = [len(one) - len(gone) for one, gone in zip(images, lost, strict=True)]
        return trained

    def _work(
        self,
        program: Program,
        phase: Train,
        moved: list[str],
        values: Values,
        start: Values,
        facts: Sequence[dict[str, Array]],
        drawn: Sequence[Drawn],
        lr_scale: float,
    ) -> Work:
        count = len(drawn)
        moving = {f"tensor/{name}": values.of(name, count) for name in moved}
        for slot in phase.slots:
            moving |= {f"slot/{slot}/{name}": torch.zeros_like(moving[f"tensor/{name}"]) for name in moved}
        own = {f"tensor/{name}": value for name, value in values.own.items() if name not in moved}
        common = {f"tensor/{name}": value for name, value in values.common.items() if name not in moved}
        for name in (name for group in phase.anchors for name in program.names(group)):
            side = own if name in start.own else common
            side[f"anchor/{name}"] = start.own[name] if name in start.own else start.common[name]
        for name in facts[0]:
            own[name] = self._sent(np.stack([of[name] for of in facts]))
        steps = max(len(of.epochs) for of in drawn) * phase.repeats
        arrays: Named = {}
        for name, first in drawn[0].arrays.items():
            whole = np.zeros((steps, count, *first.shape[1:]), first.dtype)
            for device, of in enumerate(drawn):
                array = np.repeat(of.arrays[name], phase.repeats, axis=0)
                whole[: len(array), device] = array
            arrays[name] = self._sent(whole)
        last = self._sent((np.arange(steps) % phase.repeats == phase.repeats - 1).astype(np.float32))
        ends = self._sent(np.array([len(of.epochs) * phase.repeats for of in drawn]))
        return Work(moving, own, common, arrays, ends, last, self._sent(np.array(phase.lr * lr_scale, np.float32)))

    def _run(
        self,
        program: Program,
        method: Method,
        phase: Train,
        work: Work,
        drawn: Sequence[Drawn],
        samplers: Sequence[MedianSampler | None],
        trained: Trained,
    ) -> tuple[Named, list[float]]:
        """The moved tensors (D, ...), and each device's loss. Devices leave when they are through with their images."""
        ends = [len(of.epochs) * phase.repeats for of in drawn]  # descending
        losses = torch.zeros(ends[0], len(ends), device=self._place)
        kept: list[list[tuple[Tensor, Array]]] = [[] for _ in drawn]

        def keep(step: int, outputs: Named) -> None:
            batch, repeat = divmod(step, phase.repeats)
            if phase.collect is None or repeat < phase.repeats - 1:
                return
            values = outputs[f"collect/{phase.collect.output}"]
            for device in range(sum(end > step for end in ends)):
                of, sampler = drawn[device], samplers[device]
                assert sampler is not None
                chosen = sampler.positions(of.epochs[batch], of.rows[batch], of.readable[batch])
                if chosen:
                    kept[device].append((values[device, chosen], of.arrays["labels"][batch, chosen]))

        pieces: list[Named] = []
        first = 0
        for places, last in self._stretches(ends):
            work = work.of_first(places)
            runner = self._runner(method, phase, program.batch, places, fused=self._fused and places == len(ends))
            work.moving = runner.run(work, first, last, losses, keep if phase.collect else None)
            first, going_on = last, self._places(ends, last)
            pieces.append({name: value[going_on:] for name, value in work.moving.items() if name.startswith("tensor/")})
        moved = {
            name.removeprefix("tensor/"): torch.cat([piece[name] for piece in reversed(pieces)]) for name in pieces[0]
        }
        if phase.collect:
            for device, parts in enumerate(kept):
                shape = (0, *phase.collect.shape)
                values = torch.cat([part for part, _ in parts]).float().cpu().numpy() if parts else np.zeros(shape)
                labels = np.concatenate([part for _, part in parts]) if parts else np.zeros(0)
                trained.collected[device] |= {
                    phase.collect.output: values.astype(np.float32, copy=False), LABELS: labels.astype(np.int64),
                }  # fmt: skip
        by_step = losses.cpu().numpy()
        return moved, [_loss(of, by_step[:, device], phase.repeats) for device, of in enumerate(drawn)]

    def _stretches(self, ends: list[int]) -> Iterator[tuple[int, int]]:
        """(devices side by side, step at which fewer go on), until all are through."""
        steps = sorted(set(ends))
        for last, following in pairwise([*steps, None]):
            assert last is not None
            places = self._places(ends, last - 1)
            if following is None or self._places(ends, following - 1) != places:
                yield places, last

    def _places(self, ends: list[int], step: int) -> int:
        """Devices that are computed in a step: those that are not through, `ends` are descending.

        On a GPU each number of devices has a recording of its own, so there are few such numbers.
        """
        there = sum(end > step for end in ends)
        return there if not (self._captures and there) else _half_as_often(len(ends), there)

    def _runner(self, method: Method, phase: Train, batch: Batch, devices: int, *, fused: bool) -> Runner:
        # computing blocks again is for devices of little memory, and changes no number
        plain = replace(method, recompute=False)
        key = (plain, phase, devices if self._captures else 0, fused)
        if key not in self._runners:
            lanes = self._made((plain, phase), lambda: whole_step(plain, self._vit, phase), trains=True, fused=fused)
            given = lanes, self._pictures.pixels, batch
            recorded = self._place.type == "cuda"
            self._runners[key] = CapturedRunner(*given, recorded=recorded) if self._captures else Runner(*given)
        return self._runners[key]

    def _made(
        self, key: tuple[object, ...], step: Callable[[], Step], *, trains: bool = False, fused: bool = False
    ) -> Lanes:
        key = (*key, fused)
        if key not in self._lanes:
            lanes = in_precision(side_by_side(step(), self._say), self._precision, self._place)
            lanes = until_through(lanes) if trains else lanes
            self._lanes[key] = compiled(lanes) if fused else lanes
        return self._lanes[key]

    # --- evaluation -----------------------------------------------------------------------------------

    def answer(
        self,
        program: Program,
        method: Method,
        values: Values,
        train: Sequence[Images],
        test: Sequence[Images],
        choices: Sequence[np.random.Generator],
    ) -> list[tuple[int, int]]:
        """(right answers, images) of each device on its test images, whole and not varied."""
        evaluate = program.evaluate
        own = {f"tensor/{name}": value for name, value in values.own.items()}
        common = {f"tensor/{name}": value for name, value in values.common.items()}
        if evaluate.gather:
            own |= self._gathered(program, method, evaluate.gather, common, own, train, choices)
        lanes = self._made((method, "predict"), lambda: predict_step(method, self._vit))
        correct = np.zeros(len(test), np.int64)
        for labels, readable, outputs in self._full(program, lanes, common, own, test):
            answers = outputs["logits"].argmax(dim=-1).cpu().numpy()
            correct += ((answers == labels) & readable).sum(axis=1)
        return [(int(right), int(one.readable.sum())) for right, one in zip(correct, test, strict=True)]

    def _gathered(
        self,
        program: Program,
        method: Method,
        gather: Gather,
        common: Named,
        own: Named,
        train: Sequence[Images],
        choices: Sequence[np.random.Generator],
    ) -> Named:
        """What a graph gives of each device's chosen training images, as inputs of the prediction."""
        chosen = [
            _only(one, chosen_rows(len(one), gather.capacity, choice))
            for one, choice in zip(train, choices, strict=True)
        ]
        lanes = self._made((method, gather), lambda: gather_step(method, self._vit, gather))
        count = len(chosen)
        values = torch.zeros(count, gather.capacity, *gather.shape, device=self._place)
        labels, weight = np.zeros((count, gather.capacity), np.int64), np.zeros((count, gather.capacity), np.float32)
        first = 0
        for some, readable, outputs in self._full(program, lanes, common, own, chosen):
            last = min(first + some.shape[1], gather.capacity)
            values[:, first:last] = outputs[f"collect/{gather.output}"][:, : last - first]
            labels[:, first:last], weight[:, first:last] = some[:, : last - first], readable[:, : last - first]
            first = last
        return {
            f"gathered/{gather.output}": values,
            "gathered/labels": self._sent(labels),
            "gathered/weight": self._sent(weight),
        }

    def _full(
        self, program: Program, lanes: Lanes, common: Named, own: Named, images: Sequence[Images]
    ) -> Iterator[tuple[Indices, Flags, Named]]:
        """Whole images of all devices, some at a time: labels and which of them are there (D, n), and what a function
        gives of them."""
        most = max((len(one) for one in images), default=0)
        for first in range(0, most, ANSWERED_AT_ONCE):
            some = [slice(first, min(first + ANSWERED_AT_ONCE, len(one))) for one in images]
            length = min(ANSWERED_AT_ONCE, most - first)
            rows, labels = np.zeros((len(images), length), np.int64), np.zeros((len(images), length), np.int64)
            readable = np.zeros((len(images), length), bool)
            for device, (one, part) in enumerate(zip(images, some, strict=True)):
                there = len(one.rows[part])
                rows[device, :there], labels[device, :there] = one.rows[part], one.labels[part]
                readable[device, :there] = one.readable[part]
            pixels = self._pictures.pixels[self._sent(rows)]
            batch = {"batch/patches": unfolded(normalised(pixels, program.batch), program.batch.patch_size)}
            with torch.no_grad():
                yield labels, readable, lanes({}, own, common, batch, {})

    def _sent(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._place)


def _only(images: Images, chosen: Array) -> Images:
    split = replace(images.split, labels=images.labels[chosen])
    return Images(split, images.rows[chosen], images.readable[chosen])


def _loss(drawn: Drawn, losses: Array, repeats: int) -> float:
    """Mean over the samples of the last epoch; of a batch that is repeated, as the last repeat began."""
    batches = [number for number, epoch in enumerate(drawn.epochs) if epoch == drawn.epochs[-1]]
    counts = np.array([drawn.readable[number].sum() for number in batches])
    last = np.array([losses[number * repeats + repeats - 1] for number in batches], np.float64)
    return float((last * counts).sum() / counts.sum())


def answering_flops(program: Program, train: Images, test: Images) -> int:
    """Of a device's graphs in an evaluation, what it tunes before left out."""
    evaluate, size = program.evaluate, program.batch.answer_size
    flops = program.graphs[evaluate.graph].flops * -(-len(test) // size)
    if evaluate.gather:
        gathered = min(len(train), evaluate.gather.capacity)
        flops += program.graphs[evaluate.gather.graph].flops * -(-gathered // size)
    return flops


def _half_as_often(most: int, least: int) -> int:
    """The smallest of most, half of it, a quarter, ... that is not below `least`.

    >>> [_half_as_often(10, least) for least in (10, 6, 5, 2, 1)]
    [10, 10, 5, 2, 1]
    """
    while most > 1 and (half := -(-most // 2)) >= least:
        most = half
    return most
