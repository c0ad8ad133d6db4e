"""Training phases and evaluations of several devices with one Program, computed in one batch.

The results are those of `edge_client.work.runtime` on each device, with the same random draws. Letters: D devices,
T steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from coordinator.rounds.tasks import Work
from edge_client.work.answer_tally import AnswerTally, list_metrics, make_tally
from edge_client.work.batches import choose_rows, facts_of
from edge_client.work.sampler import Sampler, make_sampler
from fedvit.data.images import Flags, Indices
from fedvit.methods.base import Method
from fedvit.methods.calculus import TorchCalculus, TracedCalculus
from fedvit.methods.failures import name_errors
from fedvit.methods.products import products_in
from fedvit.methods.step import Step, gather_step, predict_step, whole_step
from fedvit.models.vit import PatchViT
from fedvit.program import LABELS, Gather, Program, Train
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import MAX_CLASS_COUNTS, ClassCount
from fleet.engines.pictures import DeviceImages, Drawn, Pictures, draw_training, whole_samples
from fleet.engines.reading import Reading, read_features, reads_features
from fleet.engines.settings import TorchSettings
from fleet.engines.steps import (
    BatchedStep,
    BatchWork,
    CapturedRunner,
    Named,
    Runner,
    batched_step,
    compile_step,
    one_by_one,
    skip_finished,
    with_precision,
)

PREDICTION_BATCH = 64
"""Images of each device in one prediction."""


class Values(NamedTuple):
    """Tensors of a Program for D devices: those common to all, and each device's own ones (D, ...)."""

    common: Named
    own: Named

    def of(self, name: str, devices: int) -> Tensor:
        """(D, ...)"""
        return self.own[name] if name in self.own else self.common[name].expand(devices, *self.common[name].shape)

    def with_own(self, tensors: Named) -> "Values":
        common = {name: value for name, value in self.common.items() if name not in tensors}
        return Values(common, {**self.own, **tensors})


@dataclass
class CohortUpdate:
    """The outcome of a round's training on D devices."""

    tensors: Named  # (D, ...): all tensors that a phase updated
    collected: list[Tensors]
    samples: list[int]  # each device's images that could be decoded
    losses: list[float]  # mean over the last epoch
    flops: list[int]
    steps: list[int]


class CountedAnswers(NamedTuple):
    """One device's evaluation."""

    metrics: dict[str, float]  # as in its result
    images: int
    by_class: tuple[ClassCount, ...]  # empty: not counted


class _PhaseRun(NamedTuple):
    method: Method
    phase: Train
    reading: Reading


class Cohort:
    """The step functions of a run's methods, and the images of its devices."""

    def __init__(self, vit: PatchViT, pictures: Pictures, settings: TorchSettings, log: Callable[[str], None]) -> None:
        self._log = log
        self._settings = settings
        self._accelerator = torch.device(settings.accelerator)
        self._captures = self._accelerator.type == "cuda" and not settings.is_eager
        self._vit = vit
        self._pictures = pictures
        self._steps: dict[tuple[Method, Train | Gather | None, bool], BatchedStep] = {}
        self._runners: dict[tuple[Method, Train, int, bool], Runner] = {}
        self._features: dict[tuple[str, str], Reading] = {}  # by what a frozen backbone is sent in

    def forget(self) -> None:
        """Free the memory of recorded and compiled functions; they are made again when they are needed."""
        self._runners.clear()
        self._steps.clear()
        if self._captures:
            torch.cuda.empty_cache()

    # --- training -------------------------------------------------------------------------------------

    def train(
        self,
        work: Work,  # of each device
        method: Method,
        phases: Sequence[Train],
        values: Values,
        images: Sequence[DeviceImages],  # of each device
        generators: Sequence[list[np.random.Generator]],  # of each device
    ) -> CohortUpdate:
        """Run the phases from the round's start values. Raises DataError when a device has no readable image."""
        program, count, start = work.program, len(images), values
        reading = self._read(method, program, values)
        trained = CohortUpdate({}, [{} for _ in images], [], [0.0] * count, [0] * count, [0] * count)
        lost: list[set[int]] = [set() for _ in images]
        for phase in phases:
            facts = [
                facts_of(program, phase, one.split, drawing[4]) for one, drawing in zip(images, generators, strict=True)
            ]
            samplers = [
                make_sampler(phase.collect, one.labels, phase.epochs, drawing[3]) if phase.collect else None
                for one, drawing in zip(images, generators, strict=True)
            ]
            drawn = [
                draw_training(one, program.batch, phase, drawing[:3])
                for one, drawing in zip(images, generators, strict=True)
            ]
            for device, (one, drawing) in enumerate(zip(images, drawn, strict=True)):
                for rows in drawing.rows:
                    lost[device].update(rows[~one.readable[rows]].tolist())
                trained.steps[device] += len(drawing.epochs) * phase.repeats
                trained.flops[device] += drawing.runs * phase.repeats * program.graphs[phase.graph].flops
            arrays = self._arrays(work, phase, values, start, facts, drawn)
            run = _PhaseRun(method, phase, reading)
            tensors, trained.losses = self._run(run, arrays, drawn, samplers, trained)
            values = values.with_own(tensors)
            trained.tensors |= tensors
        trained.samples = [len(one) - len(gone) for one, gone in zip(images, lost, strict=True)]
        return trained

    def _arrays(
        self,
        work: Work,
        phase: Train,
        values: Values,
        start: Values,
        facts: Sequence[dict[str, Array]],
        drawn: Sequence[Drawn],
    ) -> BatchWork:
        program, count = work.program, len(drawn)
        names = [name for group in phase.groups for name in program.names(group)]
        updated = {f"tensor/{name}": values.of(name, count) for name in names}
        for slot in phase.slots:
            updated |= {f"slot/{slot}/{name}": torch.zeros_like(updated[f"tensor/{name}"]) for name in names}
        own = {f"tensor/{name}": value for name, value in values.own.items() if name not in names}
        common = {f"tensor/{name}": value for name, value in values.common.items() if name not in names}
        for name in (name for group in phase.anchors for name in program.names(group)):
            side = own if name in start.own else common
            side[f"anchor/{name}"] = start.own[name] if name in start.own else start.common[name]
        for name in facts[0]:
            own[name] = self._to_accelerator(np.stack([of[name] for of in facts]))
        steps = max(len(of.epochs) for of in drawn) * phase.repeats
        arrays: Named = {}
        for name, first in drawn[0].arrays.items():
            whole = np.zeros((steps, count, *first.shape[1:]), first.dtype)
            for device, of in enumerate(drawn):
                array = np.repeat(of.arrays[name], phase.repeats, axis=0)
                whole[: len(array), device] = array
            arrays[name] = self._to_accelerator(whole)
        last = self._to_accelerator((np.arange(steps) % phase.repeats == phase.repeats - 1).astype(np.float32))
        ends = self._to_accelerator(np.array([len(of.epochs) * phase.repeats for of in drawn]))
        rate = self._to_accelerator(np.array(phase.lr * work.planned.lr_scale, np.float32))
        return BatchWork(updated, own, common, arrays, ends, last, rate)

    def _read(self, method: Method, program: Program, values: Values) -> Reading:
        """Return images, or their features, which are computed once, where the backbone stays as it is."""
        if self._settings.is_eager or not reads_features(method, self._vit, program.batch):
            return self._read_images()
        sent = (method.sent_precision, method.compute)
        if sent not in self._features:
            frozen = {name: value for name, value in values.common.items() if name in self._vit.tensors()}
            with products_in(self._settings.precision, self._accelerator):
                self._features[sent] = read_features(self._vit, frozen, self._pictures.pixels, self._pictures.batch)
        return self._features[sent]

    def _read_images(self) -> Reading:
        return Reading(self._vit, self._pictures.pixels, self._pictures.batch)

    def _run(
        self,
        run: "_PhaseRun",
        work: BatchWork,
        drawn: Sequence[Drawn],
        samplers: Sequence[Sampler | None],
        trained: CohortUpdate,
    ) -> tuple[Named, list[float]]:
        """The updated tensors (D, ...), and each device's loss. Devices without further batches leave the batch."""
        phase, given = run.phase, list(range(len(drawn)))
        # the fewest batches last; one without a readable image does not count, so images do not tell the order
        order = sorted(given, key=lambda device: -len(drawn[device].epochs))
        if order != given:
            work = work.select_devices(order)
        ends = [len(drawn[device].epochs) * phase.repeats for device in order]
        losses = torch.zeros(ends[0], len(ends), device=self._accelerator)
        kept: list[list[tuple[int, list[int], Tensor]]] = [[] for _ in drawn]

        def keep(step: int, outputs: Named) -> None:
            batch, repeat = divmod(step, phase.repeats)
            if phase.collect is None or repeat < phase.repeats - 1:
                return
            values = outputs[f"collect/{phase.collect.output}"]
            for place, device in enumerate(order[: sum(end > step for end in ends)]):
                of, sampler = drawn[device], samplers[device]
                assert sampler is not None
                chosen = sampler.positions(of.epochs[batch], of.rows[batch], of.readable[batch])
                if chosen:
                    kept[device].append((batch, chosen, values[place, chosen]))

        pieces: list[Named] = []
        first = 0
        for count, last in self._segments(ends):
            work = work.select_devices(slice(count))
            # on a GPU each number of devices would be compiled anew; elsewhere it is one device at a time
            fused = bool(self._settings.fused) and (count == len(ends) or not self._captures)
            runner = self._runner(run, count, fused=fused)
            work.updated = runner.run(work, first, last, losses, keep if phase.collect else None)
            first, left = last, self._device_count(ends, last)
            pieces.append({name: value[left:] for name, value in work.updated.items() if name.startswith("tensor/")})
        updated = {
            name.removeprefix("tensor/"): torch.cat([piece[name] for piece in reversed(pieces)]) for name in pieces[0]
        }
        places = [order.index(device) for device in given]
        if order != given:
            updated = {name: value[places] for name, value in updated.items()}
        for of, sampler, parts, collected in zip(drawn, samplers, kept, trained.collected, strict=True):
            if phase.collect is None or sampler is None:
                continue
            for batch, chosen, part in parts:
                rows, readable = of.rows[batch][chosen], of.readable[batch][chosen]
                sampler.record(of.epochs[batch], rows, readable, part.float().cpu().numpy())
            values, labels = sampler.collect(phase.collect.shape)
            collected |= {phase.collect.output: values, LABELS: labels}
        by_step = losses.cpu().numpy()
        return updated, [_loss(of, by_step[:, place], phase.repeats) for of, place in zip(drawn, places, strict=True)]

    def _segments(self, ends: list[int]) -> Iterator[tuple[int, int]]:
        """(devices in the batch, step before which it gets smaller), until all are finished."""
        steps = sorted(set(ends))
        for last, following in pairwise([*steps, None]):
            assert last is not None
            count = self._device_count(ends, last - 1)
            if following is None or self._device_count(ends, following - 1) != count:
                yield count, last

    def _device_count(self, ends: list[int], step: int) -> int:
        """Number of devices in a step's batch: those with further batches; `ends` are descending.

        On a GPU each number of devices has its own recording, so the numbers are rounded up to few values.
        """
        active = sum(end > step for end in ends)
        return active if not (self._captures and active) else _halve_until(len(ends), active)

    def _runner(self, run: "_PhaseRun", devices: int, *, fused: bool) -> Runner:
        method, phase, (vit, pixels, batch) = run
        # recomputing blocks saves a small device's memory, and changes no result; a step reads what was drawn as inputs
        plain, phase = replace(method.as_traced(), recompute=False), msgspec.structs.replace(phase, draws=())
        key = (plain, phase, devices if self._captures else 0, fused)
        if key not in self._runners:
            step = partial(whole_step, plain, vit, phase, TorchCalculus if self._settings.is_eager else TracedCalculus)
            batched = self._make_step((plain, phase), step, trains=True, fused=fused)
            given = batched, pixels, batch
            recorded = self._accelerator.type == "cuda"
            self._runners[key] = CapturedRunner(*given, recorded=recorded) if self._captures else Runner(*given)
        return self._runners[key]

    def _make_step(
        self,
        purpose: tuple[Method, Train | Gather | None],
        step: Callable[[], Step],
        *,
        trains: bool = False,
        fused: bool = False,
    ) -> BatchedStep:
        key = (*purpose, fused)
        if key not in self._steps:
            made = step()
            precise = partial(with_precision, precision=self._settings.precision, accelerator=self._accelerator)
            if self._settings.is_eager:
                batched = precise(one_by_one(name_errors(made, *purpose)))
            elif fused and not self._captures:  # one function serves any number of devices
                batched = one_by_one(compile_step(precise(made)))
            else:
                batched = precise(batched_step(made, self._log))
            # without a recording a batch has only devices with further batches
            batched = skip_finished(batched) if trains and self._captures else batched
            self._steps[key] = compile_step(batched) if fused and self._captures else batched
        return self._steps[key]

    # --- evaluation -----------------------------------------------------------------------------------

    def answer(
        self,
        program: Program,
        method: Method,
        values: Values,
        train: Sequence[DeviceImages],
        test: Sequence[DeviceImages],
        choices: Sequence[np.random.Generator],
    ) -> list[CountedAnswers]:
        """Each device's answers on its test images, whole and not varied."""
        evaluate = program.evaluate
        own = {f"tensor/{name}": value for name, value in values.own.items()}
        common = {f"tensor/{name}": value for name, value in values.common.items()}
        if evaluate.gather:
            own |= self._gather(program, method, common, own, train, choices)
        reading = self._read(method, program, values)
        batched = self._make_step((method.as_traced(), None), lambda: predict_step(method, reading.vit))
        tallies = [make_tally(program) for _ in test]
        for labels, readable, outputs in self._full(reading, batched, common, own, test):
            # the largest are fewer numbers to copy
            scores = tallies[0].reads_scores
            answers = outputs["logits"].float() if scores else outputs["logits"].argmax(dim=-1)
            for tally, true, given, there in zip(tallies, labels, answers.cpu().numpy(), readable, strict=True):
                if scores:
                    tally.add(true[there], given[there])
                else:
                    tally.add_answers(true[there], given[there])
        return [
            _list_counts(tally, int(one.readable.sum()), counts_classes=evaluate.counts_classes)
            for tally, one in zip(tallies, test, strict=True)
        ]

    def _gather(
        self,
        program: Program,
        method: Method,
        common: Named,
        own: Named,
        train: Sequence[DeviceImages],
        choices: Sequence[np.random.Generator],
    ) -> Named:
        """Outputs of a graph for each device's chosen training images, as inputs of the prediction."""
        gather = program.evaluate.gather
        assert gather is not None
        chosen = [
            _only(one, choose_rows(len(one), gather.capacity, choice))
            for one, choice in zip(train, choices, strict=True)
        ]
        reading = self._read_images()
        batched = self._make_step((method.as_traced(), gather), lambda: gather_step(method, reading.vit, gather))
        count = len(chosen)
        values = torch.zeros(count, gather.capacity, *gather.shape, device=self._accelerator)
        labels, weight = np.zeros((count, gather.capacity), np.int64), np.zeros((count, gather.capacity), np.float32)
        first = 0
        for some, readable, outputs in self._full(reading, batched, common, own, chosen):
            last = min(first + some.shape[1], gather.capacity)
            values[:, first:last] = outputs[f"collect/{gather.output}"][:, : last - first]
            labels[:, first:last], weight[:, first:last] = some[:, : last - first], readable[:, : last - first]
            first = last
        return {
            f"gathered/{gather.output}": values,
            "gathered/labels": self._to_accelerator(labels),
            "gathered/weight": self._to_accelerator(weight),
        }

    def _full(
        self, reading: Reading, batched: BatchedStep, common: Named, own: Named, images: Sequence[DeviceImages]
    ) -> Iterator[tuple[Indices, Flags, Named]]:
        """Whole images of all devices, some at a time: labels and which of them are there (D, n), and what a function
        gives of them."""
        most = max((len(one) for one in images), default=0)
        for first in range(0, most, PREDICTION_BATCH):
            some = [slice(first, min(first + PREDICTION_BATCH, len(one))) for one in images]
            length = min(PREDICTION_BATCH, most - first)
            rows = np.zeros((len(images), length), np.int64)
            labels = np.zeros((len(images), length, *images[0].labels.shape[1:]), images[0].labels.dtype)
            readable = np.zeros((len(images), length), bool)
            for device, (one, part) in enumerate(zip(images, some, strict=True)):
                there = len(one.rows[part])
                rows[device, :there], labels[device, :there] = one.rows[part], one.labels[part]
                readable[device, :there] = one.readable[part]
            batch = whole_samples(reading.pixels[self._to_accelerator(rows)], reading.batch)
            with torch.no_grad():
                yield labels, readable, batched({}, own, common, batch, {})

    def _to_accelerator(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._accelerator)


def _list_counts(tally: AnswerTally, images: int, *, counts_classes: bool) -> CountedAnswers:
    """Return the counts that a device sends."""
    by_class = tally.by_class() if counts_classes else ()
    metrics = list_metrics(tally.correct, tally.errors, tally.labels, counts_classes=counts_classes)
    return CountedAnswers(metrics, images, by_class if len(by_class) <= MAX_CLASS_COUNTS else ())


def _only(images: DeviceImages, chosen: Array) -> DeviceImages:
    split = replace(images.split, labels=images.labels[chosen])
    return DeviceImages(split, images.rows[chosen], images.readable[chosen])


def _loss(drawn: Drawn, losses: Array, repeats: int) -> float:
    """Mean over the samples of the last epoch; of a batch that is repeated, as the last repeat began."""
    batches = [number for number, epoch in enumerate(drawn.epochs) if epoch == drawn.epochs[-1]]
    counts = np.array([drawn.readable[number].sum() for number in batches])
    last = np.array([losses[number * repeats + repeats - 1] for number in batches], np.float64)
    return float((last * counts).sum() / counts.sum())


def evaluation_flops(program: Program, train: DeviceImages, test: DeviceImages) -> int:
    """Graphs of an evaluation, without those that tune the model before it."""
    evaluate, size = program.evaluate, program.batch.answer_size
    flops = program.graphs[evaluate.graph].flops * -(-len(test) // size)
    if evaluate.gather:
        gathered = min(len(train), evaluate.gather.capacity)
        flops += program.graphs[evaluate.gather.graph].flops * -(-gathered // size)
    return flops


def _halve_until(most: int, least: int) -> int:
    """The smallest of most, half of it, a quarter, ... that is not below `least`.

    >>> [_halve_until(10, least) for least in (10, 6, 5, 2, 1)]
    [10, 10, 5, 2, 1]
    """
    while most > 1 and (half := -(-most // 2)) >= least:
        most = half
    return most
