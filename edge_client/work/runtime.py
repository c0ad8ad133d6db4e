"""Runs a Program's graphs with onnxruntime on this device's images.

It does not depend on the method: the names of a graph's inputs and outputs define their meaning (fedvit.program).
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from edge_client.health.guard import Tally
from edge_client.work.answer_tally import ErrorSum, LabelSum, make_tally
from edge_client.work.batches import Fed, ahead, choose_rows, facts_of, training_batches, whole_samples
from edge_client.work.frozen_features import CutGraph, FrozenFeatures, count_flops, open_features
from edge_client.work.sampler import make_sampler
from edge_client.work.steps import Graph, Steps, SummedSteps, WholeSteps
from fedvit.comparison import Comparison
from fedvit.data.folder import DeviceData, Split
from fedvit.data.images import Indices
from fedvit.engine import CPU, load_engine, open_session, trim_memory
from fedvit.errors import BadPayload, DataError, FedvitError, OverBudget
from fedvit.program import LABELS, Gather, Program, Train
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import ClassCount

INPUTS = {"batch/patches", "batch/tokens"}
"""Graph inputs that a sample without a label has: one for images, one for text."""


class GraphRunner(Protocol):
    """Runs the graphs of tasks: in this process (`Runtime`), or in one that is confined."""

    def load(self) -> None: ...

    def open(self, digest: str, path: Path, cut: CutGraph | None = None) -> None: ...

    def keep_only(self, digests: set[str]) -> None: ...

    def trim(self) -> None: ...

    def release(self) -> None: ...

    def train(
        self,
        program: Program,
        start: Mapping[str, Array],
        images: Split,
        seeds: "Seeds",
        lr_scale: float,
        watch: "Watch",
    ) -> "Trained": ...

    def evaluate(self, test: "ModelTest", watch: "Watch") -> "Evaluated": ...

    def compare(self, test: "ModelTest", watch: "Watch", challenge: "Challenge") -> "Compared": ...


class Stopped(FedvitError):
    """The task was stopped between two steps; nothing of it is kept."""


class OutOfMemory(OverBudget):
    """A graph needed more memory than the device allows; nothing of the task is kept."""


@dataclass
class Watch:
    """Callbacks with which the runtime reports its progress and learns that it has to stop."""

    step: Callable[[int, int, float | None], None]  # (done, total, loss)
    stopped: Callable[[], bool]
    tally: Tally = field(default_factory=Tally)  # of the steps so far


@dataclass(frozen=True)
class Seeds:
    """The seeds from which every random draw of a task follows."""

    run: int
    round: int
    device: str

    def generators(self, count: int) -> list[np.random.Generator]:
        """Independent generators, so that one kind of draw does not shift another."""
        device = int.from_bytes(hashlib.blake2b(self.device.encode(), digest_size=8).digest(), "big")
        sequence = np.random.SeedSequence([self.run, self.round, device])
        return [np.random.default_rng(child) for child in sequence.spawn(count)]


@dataclass
class Trained:
    """The outcome of a round's local training."""

    tensors: Tensors  # new values of every tensor that a phase trained
    collected: Tensors
    samples: int  # the device's images without those that could not be decoded
    loss: float  # mean over the last epoch
    steps: int
    step_s: float | None  # median
    flops: int


@dataclass
class Evaluated:
    correct: float  # of a text the share of a sample's characters
    samples: int
    flops: int
    by_class: tuple[ClassCount, ...]  # of the classes with test images; () of a text
    errors: dict[ErrorSum, float] = field(default_factory=dict)  # sums over images, of a regression
    labels: dict[LabelSum, float] = field(default_factory=dict)  # sums that tell of the device's labels alone


class ModelTest(NamedTuple):
    """A model of a device that is tested on its images: a Program and its tensors, which do not change."""

    program: Program
    values: Mapping[str, Array]
    data: DeviceData
    seeds: Seeds


class ModelSource(NamedTuple):
    """The round and the device whose tensors a model has."""

    run: str
    round: int
    device: str
    personal_tensors: int  # of the device's own


class Challenge(NamedTuple):
    """The model that a device makes of a run's round, and the one that it uses."""

    source: ModelSource
    graph: Path  # of the Program's evaluation
    champion: Path | None  # folder of its bundle; None: the device uses no model
    machine: str
    cores: int
    policy: str  # what may be sent, in words


class Compared(NamedTuple):
    """The outcome of a comparison."""

    comparison: Comparison
    with_champion: bool
    files: dict[str, bytes]  # the challenger's bundle
    flops: int


@dataclass
class Runtime:
    """Sessions of the graphs in use; one runtime serves any number of tasks."""

    threads: int
    provider: str = CPU
    own_kernels: bool = True  # where they are installed
    open_features: Callable[[Path], int] = open_features  # returns a handle of the file
    _graphs: dict[str, Graph] = field(default_factory=dict)
    _cuts: dict[str, CutGraph] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, digest: str, path: Path, cut: CutGraph | None = None) -> None:
        """Load a graph once; of one that is cut, only the rest. Raises BadPayload when onnxruntime cannot."""
        with self._lock:
            before = self._cuts.pop(digest, None)
            if cut:
                self._cuts[digest] = cut
            if digest not in self._graphs or (before and before.rest) != (cut and cut.rest):
                self._graphs[digest] = self._load(digest, cut.rest if cut else path)

    def _load(self, digest: str, graph: Path | bytes) -> Graph:
        try:
            return Graph(open_session(graph, self.threads, self.provider, own_kernels=self.own_kernels))
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise BadPayload("FV1418", f"graph {digest} cannot be loaded: {error}") from error

    def keep_only(self, digests: set[str]) -> None:
        """Close graphs of finished programs."""
        with self._lock:
            for digest in self._graphs.keys() - digests:
                del self._graphs[digest]
                self._cuts.pop(digest, None)

    def load(self) -> None:
        """Import the engine: its memory is there before a task begins."""
        load_engine()

    def trim(self) -> None:
        """Return memory to the system that no graph needs any more."""
        trim_memory()

    def release(self) -> None:
        """Close all graphs, and return their memory to the system."""
        with self._lock:
            self._graphs.clear()
        trim_memory()

    # --- training -------------------------------------------------------------------------------------

    def train(
        self, program: Program, start: Mapping[str, Array], images: Split, seeds: Seeds, lr_scale: float, watch: Watch
    ) -> Trained:
        """Run all training phases from the round's start values. Raises Stopped, BadPayload, DataError."""
        phases = [msgspec.structs.replace(phase, lr=phase.lr * lr_scale) for phase in program.train]
        return self._run_phases(program, phases, start, images, seeds.generators(5), watch)

    def _run_phases(
        self,
        program: Program,
        phases: Sequence[Train],
        start: Mapping[str, Array],
        images: Split,
        generators: Sequence[np.random.Generator],
        watch: Watch,
    ) -> Trained:
        order_rng, picture_rng, mask_rng, sample_rng, number_rng = generators
        values: Tensors = dict(start)
        result, tally = Trained({}, {}, 0, float("nan"), 0, None, 0), Tally()
        total = sum(program.steps_of(phase, len(images)) for phase in phases)
        lost: set[int] = set()  # rows that could not be decoded
        for phase in phases:
            times: list[float] = []
            for counts in (tally, watch.tally):
                counts.phases.append(times)
            loop = self._steps(program, phase, values, start, facts_of(program, phase, images, number_rng))
            collect = phase.collect
            sampler = make_sampler(collect, images.labels, phase.epochs, sample_rng) if collect else None
            losses: dict[int, list[tuple[float, int]]] = {}
            cut, flops = self._find_cut(program, phase), program.graphs[phase.graph].flops
            with (
                self._make_batches(program, phase, values, images, (order_rng, picture_rng, mask_rng)) as batches,
                closing(ahead(batches)) as ready,
            ):
                for fed in ready:
                    lost.update(fed.rows[~fed.readable].tolist())
                    if not fed.readable.any():
                        continue
                    for repeat in range(phase.repeats):
                        if watch.stopped():
                            raise Stopped("FV1422", "the task was stopped")
                        began = time.perf_counter()
                        stepped = loop.step(fed.feeds, last=repeat == phase.repeats - 1)
                        times.append(time.perf_counter() - began)
                        for counts in (tally, watch.tally):
                            counts.flops += count_flops(flops, cut, stepped.runs, 0 if repeat else fed.computed)
                    losses.setdefault(fed.epoch, []).append((stepped.loss, int(fed.readable.sum())))
                    if sampler and collect:
                        values_of_rows = stepped.collected[f"collect/{collect.output}"]
                        sampler.record(fed.epoch, fed.rows, fed.readable, values_of_rows)
                    watch.step(tally.steps, total, stepped.loss)
            if not loop.count:
                raise DataError("FV1403", f"none of the {len(images)} training images can be decoded")
            last_epoch = losses[max(losses)]
            result.loss = sum(loss * count for loss, count in last_epoch) / sum(count for _, count in last_epoch)
            values.update(loop.tensors)
            result.tensors.update(loop.tensors)
            if sampler and collect:
                features, labels = sampler.collect(collect.shape)
                result.collected |= {collect.output: features, LABELS: labels}
        result.samples = len(images) - len(lost)
        result.steps, result.step_s, result.flops = tally.steps, tally.step_s, tally.flops
        return result

    def _find_cut(self, program: Program, phase: Train) -> CutGraph | None:
        return self._cuts.get(program.graphs[phase.graph].digest)

    @contextmanager
    def _make_batches(
        self,
        program: Program,
        phase: Train,
        values: Mapping[str, Array],
        images: Split,
        generators: tuple[np.random.Generator, np.random.Generator, np.random.Generator],
    ) -> Iterator[Iterator[Fed]]:
        """Give the batches of a phase: of images, or of features that are kept where its graph is cut."""
        order_rng, picture_rng, mask_rng = generators
        if (cut := self._find_cut(program, phase)) is None:
            yield training_batches(images, program.batch, phase, order_rng, picture_rng, mask_rng)
            return

        def load(content: bytes) -> Graph:
            return self._load(f"{program.graphs[phase.graph].digest}, its first part,", content)

        with closing(FrozenFeatures(cut, self.open_features(cut.file), load, program, values, images)) as frozen:
            yield frozen.batches(phase, order_rng, picture_rng, mask_rng)

    # --- evaluation -----------------------------------------------------------------------------------

    def evaluate(self, test: ModelTest, watch: Watch) -> Evaluated:
        """Count right answers on full, unaugmented test images. Raises Stopped, BadPayload, DataError."""
        program, images, batch = test.program, test.data.test, test.program.batch
        graph = self._graph(program, program.evaluate.graph)
        feeds, flops = self.prepare(test, watch)
        graph.require(feeds.keys() | INPUTS)
        answer = graph.hold(feeds)
        seen, tally = 0, make_tally(program)
        total = -(-len(images) // batch.answer_size)
        for number, (rows, readable, fed) in enumerate(whole_samples(images, np.arange(len(images)), batch)):
            if watch.stopped():
                raise Stopped("FV1422", "the task was stopped")
            outputs = answer(fed)
            tally.add(images.labels[rows][readable], outputs["logits"][: len(rows)][readable])
            seen += int(readable.sum())
            watch.step(number + 1, total, None)
        flops += program.graphs[program.evaluate.graph].flops * total
        return Evaluated(tally.correct, seen, flops, tally.by_class(), tally.errors, tally.labels)

    def compare(self, test: ModelTest, watch: Watch, challenge: Challenge) -> Compared:
        """Make a bundle of the model, and compare it with the one that the device uses.

        Raises Stopped, BadPayload, DataError, ExportMismatch.
        """
        comparing = import_module("edge_client.work.comparing")  # late: few tasks need the code of bundles
        compared: Compared = comparing.compare_models(self, test, watch, challenge)
        return compared

    def prepare(self, test: ModelTest, watch: Watch) -> tuple[Tensors, int]:
        """The predict graph's inputs but the images, and the FLOPs that they cost.

        They are the tensors, tuned on the device's training images if the method tunes, and the features of these
        images if the method gathers them. Raises Stopped, BadPayload, DataError.
        """
        program, values, images = test.program, test.values, test.data.train
        *training, choice_rng = test.seeds.generators(6)
        evaluate, flops = program.evaluate, 0
        if evaluate.adapt:
            quiet = Watch(lambda *_: None, watch.stopped)
            adapted = self._run_phases(program, evaluate.adapt, values, images, training, quiet)
            values, flops = {**values, **adapted.tensors}, adapted.flops
        feeds = {f"tensor/{name}": value for name, value in values.items()}
        if gather := evaluate.gather:
            rows = choose_rows(len(images), gather.capacity, choice_rng)
            feeds |= self._gather(program, gather, feeds, images, rows, watch)
            flops += program.graphs[gather.graph].flops * -(-len(rows) // program.batch.answer_size)
        return feeds, flops

    def _gather(
        self,
        program: Program,
        gather: Gather,
        values: Mapping[str, Array],
        images: Split,
        chosen: Indices,
        watch: Watch,
    ) -> dict[str, Array]:
        """The outputs of a graph for the chosen images, as inputs of the predict graph; empty rows have weight 0."""
        graph = self._graph(program, gather.graph)
        graph.require(values.keys() | INPUTS)
        answer = graph.hold(values)
        gathered = np.zeros((gather.capacity, *gather.shape), np.float32)
        labels, weight = np.zeros(gather.capacity, np.int64), np.zeros(gather.capacity, np.float32)
        filled = 0
        for rows, readable, fed in whole_samples(images, chosen, program.batch):
            if watch.stopped():
                raise Stopped("FV1422", "the task was stopped")
            outputs = answer(fed)
            target = slice(filled, filled + len(rows))
            gathered[target] = outputs[f"collect/{gather.output}"][: len(rows)]
            labels[target], weight[target] = images.labels[rows], readable
            filled += len(rows)
        return {f"gathered/{gather.output}": gathered, "gathered/labels": labels, "gathered/weight": weight}

    def _graph(self, program: Program, name: str) -> Graph:
        return self._graphs[program.graphs[name].digest]

    def _steps(
        self,
        program: Program,
        phase: Train,
        values: Mapping[str, Array],
        start: Mapping[str, Array],
        facts: Mapping[str, Any],
    ) -> Steps:
        task = (self._graph(program, phase.graph), program, phase, values, start, facts)
        return SummedSteps(*task, update=self._graph(program, phase.update)) if phase.update else WholeSteps(*task)
