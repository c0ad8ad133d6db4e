"""The slow reference of the information-flow check: the influence of each pixel on each number that would be sent.

One step of every phase runs on one batch of a tiny model, once more for each pixel, which is changed a little. A number
that follows from few pixels, or from one image, tells more of them than a gradient does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnxruntime

from edge_client.work.steps import Graph
from fedvit.program import SEEDS, Program, Role, Train
from fedvit.tensors import Array, Tensors
from tests.support.program_mutations import Graphs

STEP = 0.05
"""Change of a pixel, whose standard deviation is 1."""
LEAST = 2e-4
"""Influence of a pixel below which a number follows from rounding alone; of a tensor's numbers, which are about 0.1."""
ONE = 1.05
"""Effective number of images up to which a number follows from a single one."""
PERSONAL_NUMBERS = 24
"""Numbers of local tensors whose influence is measured at first."""
SUSPICIOUS = 1.1
"""Effective number of these up to which a number may be the copy of one: then all of their tensor are measured."""


@dataclass(frozen=True)
class Influence:
    """Numbers of pixels, personal numbers and class counts that a sent number follows from, at the least.

    `images` is the median over all sent numbers; infinite: none. `single` counts the sent numbers that follow from one
    image."""

    pixels: float
    images: float
    single: int
    personal: float
    counts: float

    def is_more_than(self, honest: "Influence", images: int) -> bool:
        """Return whether a batch of `images` tells more of single pixels, images or personal numbers than honestly.

        A sum over a batch follows from more than a pixel of each image, a mean of copies from just one.
        """
        return (
            self.pixels < min(0.6 * honest.pixels, 1.1 * images)
            or (self.images < ONE and honest.images > 1.2 and self.single > honest.single)
            or self.personal < min(0.6 * honest.personal, SUSPICIOUS)
            or self.counts < min(0.6 * honest.counts, SUSPICIOUS)
        )


class Device:
    """Images, tensors and labels that stay the same while one number after the other is changed."""

    def __init__(self, program: Program, seed: int) -> None:
        draw = np.random.default_rng(seed)
        batch, count = program.batch, program.batch.batch_size
        self.program = program
        self.values: Tensors = {}
        for name, spec in program.tensors.items():
            value = 0.3 * draw.standard_normal(spec.shape)
            self.values[name] = np.asarray(value, np.dtype(spec.dtype))
        self.patches = draw.standard_normal((count, batch.kept_patches, batch.patch_values)).astype(np.float32)
        self.feeds = {
            "batch/labels": np.arange(count) % len(program.classes),
            "batch/weight": np.ones(count, np.float32),
            "batch/seeds": draw.integers(0, SEEDS, count),
        }
        if batch.labels:
            numbers = draw.standard_normal((count, len(program.classes))).astype(np.float32)
            is_set = batch.labels.task == "multi_label"
            self.feeds["batch/labels"] = (numbers > 0).astype(np.float32) if is_set else numbers
        if batch.mask_ratio:
            kept = [np.sort(draw.permutation(batch.patches)[: batch.kept_patches]) for _ in range(count)]
            self.feeds["batch/kept"] = np.array(kept)
        self.counts = np.bincount(np.arange(count) % len(program.classes)).astype(np.float32)
        local = [name for group in program.with_role(Role.LOCAL) for name in program.names(group)]
        places = [(name, place) for name in local for place in range(self.values[name].size)]
        chosen = draw.permutation(len(places))[:PERSONAL_NUMBERS]
        self.personal = [places[place] for place in chosen]


def measure_influence(program: Program, graphs: Graphs, device: Device) -> Influence:
    """Measure the influence of the device's data on what a Program's graphs would send.

    Raises whatever the engine raises for graphs that it cannot run.
    """
    run = _Run(program, graphs)
    start = run.sent(device, device.patches, device.values, device.counts)

    def change(patches: Array, values: Mapping[str, Array], counts: Array) -> Array:
        return np.abs(run.sent(device, patches, values, counts) - start) / STEP

    pixels = []
    for place in np.ndindex(device.patches.shape):
        patches = device.patches.copy()
        patches[place] += STEP
        pixels.append(change(patches, device.values, device.counts))
    by_pixel = np.stack(pixels, axis=1)
    by_image = by_pixel.reshape(len(start), len(device.patches), -1).sum(axis=2)

    def change_numbers(places: list[tuple[str, int]]) -> Array:
        columns = [np.zeros(len(start))]
        for name, place in places:
            value = device.values[name].copy()
            value.reshape(-1)[place] += STEP
            columns.append(change(device.patches, {**device.values, name: value}, device.counts))
        return np.stack(columns, axis=1)

    personal = change_numbers(device.personal)
    if _fewest(personal) < SUSPICIOUS:  # perhaps one of the few that were drawn, out of many
        alone = personal[(personal.max(axis=1) > LEAST) & (_count(personal) < SUSPICIOUS)]
        names = {device.personal[column - 1][0] for column in np.flatnonzero(alone.max(axis=0) > LEAST)}
        others = [(name, place) for name in sorted(names) for place in range(device.values[name].size)]
        personal = np.concatenate(
            [personal, change_numbers([one for one in others if one not in device.personal])], axis=1
        )
    counted = [np.zeros(len(start))]
    for place in range(len(device.counts)):
        counts = device.counts.copy()
        counts[place] += STEP
        counted.append(change(device.patches, device.values, counts))
    images = _count(by_image[by_pixel.max(axis=1) > LEAST])
    return Influence(
        _fewest(by_pixel),
        float(np.median(images)) if len(images) else math.inf,
        int((images < ONE).sum()),
        _fewest(personal),
        _fewest(np.stack(counted, axis=1)),
    )


def _fewest(influence: Array) -> float:
    """Smallest effective number of columns among the rows that follow from any."""
    influence = influence[influence.max(axis=1) > LEAST]
    return float(_count(influence).min()) if len(influence) else math.inf


def _count(influence: Array) -> Array:
    """Effective number of columns that each row follows from: (sum)^2 / sum of squares."""
    squares = np.maximum((influence**2).sum(axis=1), np.finfo(np.float64).tiny)
    return np.asarray(influence.sum(axis=1) ** 2 / squares)


class _Run:
    """The sessions of a Program's training graphs."""

    def __init__(self, program: Program, graphs: Graphs) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self._program = program
        self._graphs = {
            name: Graph(onnxruntime.InferenceSession(graphs[name], options, providers=["CPUExecutionProvider"]))
            for name in program.graphs_for("train")
        }

    def sent(self, device: Device, patches: Array, values: Mapping[str, Array], counts: Array) -> Array:
        """Return all numbers that would be sent after one step of every phase."""
        program, now = self._program, dict(values)
        parts: list[Array] = []
        for phase in program.train:
            feeds = {"batch/patches": patches, **device.feeds, "fact/class_counts": counts, **_draws(phase)}
            feeds |= {name: np.array(value, np.float32) for name, value in _scalars(phase).items()}
            feeds |= {f"anchor/{name}": values[name] for group in phase.anchors for name in program.names(group)}
            names = [name for group in phase.groups for name in program.names(group)]
            outputs = (self._sum_gradients if phase.update else self._make_step)(phase, names, now, feeds)
            now |= {name: outputs[f"new/tensor/{name}"] for name in names}
            parts += [value.ravel() for name, value in outputs.items() if not name.startswith("new/")]
        for group in program.with_role(Role.SHARED, Role.GENERATED):
            parts += [(now[name] - values[name]).ravel() for name in program.names(group)]
        return np.concatenate(parts).astype(np.float64)

    def _make_step(self, phase: Train, names: list[str], now: Tensors, feeds: Tensors) -> Tensors:
        feeds = feeds | {f"tensor/{name}": value for name, value in now.items()}
        feeds |= {f"slot/{slot}/{name}": np.zeros_like(now[name]) for slot in phase.slots for name in names}
        outputs = self._graphs[phase.graph].run(feeds)
        collected = f"collect/{phase.collect.output}" if phase.collect else None
        wanted = {"metric/loss", collected, *(f"new/tensor/{name}" for name in names)}
        return {name: value for name, value in outputs.items() if name in wanted}

    def _sum_gradients(self, phase: Train, names: list[str], now: Tensors, feeds: Tensors) -> Tensors:
        batch = self._program.batch
        grads = {f"grad/{name}": np.zeros_like(now[name]) for name in names}
        results: Tensors = {"metric/loss": np.zeros((), np.float32)}
        collected: list[Array] = []
        for first in range(0, batch.batch_size, batch.run_size):
            part = {
                name: value[first : first + batch.run_size] if name.startswith("batch/") else value
                for name, value in feeds.items()
            }
            part |= {f"tensor/{name}": value for name, value in now.items()} | grads
            part["batch/share"] = np.array(batch.run_size / batch.batch_size, np.float32)
            outputs = self._graphs[phase.graph].run(part)
            grads = {name: outputs[f"new/{name}"] for name in grads}
            results["metric/loss"] = results["metric/loss"] + outputs["metric/loss"]
            if phase.collect:
                collected.append(outputs[f"collect/{phase.collect.output}"])
        if phase.collect:
            results[f"collect/{phase.collect.output}"] = np.concatenate(collected)
        assert phase.update
        value = np.concatenate([now[name].ravel() for name in names])
        vectors = {"value": value, "grad": np.concatenate([grad.ravel() for grad in grads.values()])}
        vectors |= {f"slot/{slot}": np.zeros_like(value) for slot in phase.slots}
        updated = self._graphs[phase.update].run(feeds | vectors)["new/value"]
        ends = np.cumsum([now[name].size for name in names])
        pieces = zip(names, np.split(updated, ends[:-1]), strict=True)
        return results | {f"new/tensor/{name}": piece.reshape(now[name].shape) for name, piece in pieces}


def _scalars(phase: Train) -> dict[str, float]:
    return {"hyper/lr": phase.lr, "hyper/step": 1.0, "hyper/last": 1.0}


def _draws(phase: Train) -> dict[str, Array]:
    draw = np.random.default_rng(0)
    return {f"draw/{one.name}": np.sort(draw.integers(one.low, one.high, one.count)) for one in phase.draws}
