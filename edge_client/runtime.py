"""Runs a Program's graphs with onnxruntime on this device's images.

Knows no method: graphs say by their input and output names what they read and write (fedvit.program).
"""

import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from edge_client.sampler import MedianSampler
from fedvit.data.folder import DeviceData, Flags, Split
from fedvit.data.images import Indices, augment, draw_kept, normalise, select, unfold
from fedvit.errors import BadPayload, DataError, FedvitError
from fedvit.program import Batch, Gather, Program, Train
from fedvit.tensors import Array, Tensors

log = logging.getLogger(__name__)


class Stopped(FedvitError):
    """The task was cancelled between two steps; nothing of it is kept."""


@dataclass
class Watch:
    """How the runtime tells about its work, and is told to stop it."""

    step: Callable[[int, int, float | None], None]  # (done, total, loss)
    stopped: Callable[[], bool]


@dataclass(frozen=True)
class Seeds:
    """Every random draw of a task follows from these three."""

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
    """What a round's local work gave."""

    tensors: Tensors  # new values of every tensor that a phase moved
    collected: Tensors
    samples: int  # the device's images, but for those that could not be decoded
    loss: float  # mean over the last epoch
    steps: int
    step_s: float | None  # median
    flops: int


@dataclass
class Evaluated:
    correct: int
    samples: int
    flops: int


@functools.cache
def _share_arena() -> None:
    """One memory arena for all sessions of the process, growing by what is needed.

    By default each session has its own and doubles it: on the demo's two graphs that costs 12 MB of 149.
    """
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    same_as_requested = 1
    onnxruntime.create_and_register_allocator(
        place, onnxruntime.OrtArenaCfg({"arena_extend_strategy": same_as_requested})
    )


@dataclass
class Runtime:
    """Sessions of the graphs in use; one runtime serves any number of tasks."""

    threads: int
    _sessions: dict[str, onnxruntime.InferenceSession] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        _share_arena()

    def open(self, digest: str, path: Path) -> None:
        """Load a graph once. Raises BadPayload when onnxruntime cannot."""
        with self._lock:
            if digest not in self._sessions:
                self._sessions[digest] = self._load(digest, path)

    def _load(self, digest: str, path: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # several clients may share the cores: a spinning thread would take them from the others
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.log_severity_level = 3
        try:
            return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise BadPayload(f"graph {digest} cannot be loaded: {error}") from error

    def keep_only(self, digests: set[str]) -> None:
        """Close graphs of programs that are over."""
        with self._lock:
            for digest in self._sessions.keys() - digests:
                del self._sessions[digest]

    # --- training -------------------------------------------------------------------------------------

    def train(
        self, program: Program, start: Mapping[str, Array], images: Split, seeds: Seeds, lr_scale: float, watch: Watch
    ) -> Trained:
        """Run all training phases from the round's start values. Raises Stopped, BadPayload, DataError."""
        return self._run_phases(program, program.train, start, images, seeds.generators(5), lr_scale, watch)

    def _run_phases(
        self,
        program: Program,
        phases: Sequence[Train],
        start: Mapping[str, Array],
        images: Split,
        generators: Sequence[np.random.Generator],
        lr_scale: float,
        watch: Watch,
    ) -> Trained:
        order_rng, picture_rng, mask_rng, sample_rng, number_rng = generators
        values: Tensors = dict(start)
        result = Trained({}, {}, 0, float("nan"), 0, None, 0)
        batches = -(-len(images) // program.batch.batch_size)
        total = sum(_planned_steps(phase, batches) for phase in phases)
        times: list[float] = []
        lost: set[int] = set()  # rows that could not be decoded
        for phase in phases:
            facts = _facts(program, phase, images, number_rng)
            loop = _PhaseLoop(self._session(program, phase.graph), program, phase, values, start, facts, lr_scale)
            sampler = (
                MedianSampler(images.labels, phase.epochs, phase.collect.threshold, sample_rng)
                if phase.collect
                else None
            )
            left = phase.steps if phase.steps is not None else phase.epochs * batches
            for epoch in range(phase.epochs):
                losses, weights = 0.0, 0
                order = order_rng.permutation(len(images))
                for first in range(0, len(order), program.batch.batch_size):
                    if left == 0:
                        break
                    left -= 1
                    if watch.stopped():
                        raise Stopped("the task was cancelled")
                    rows = order[first : first + program.batch.batch_size]
                    feeds, readable = training_feeds(images, rows, program.batch, picture_rng, mask_rng)
                    lost.update(rows[~readable].tolist())
                    if not readable.any():
                        continue
                    for repeat in range(phase.repeats):
                        began = time.perf_counter()
                        outputs = loop.step(feeds, last=repeat == phase.repeats - 1)
                        times.append(time.perf_counter() - began)
                        result.steps += 1
                        result.flops += program.graphs[phase.graph].flops
                    count = int(readable.sum())
                    loss = float(outputs["metric/loss"])
                    losses, weights = losses + loss * count, weights + count
                    if sampler and phase.collect:
                        sampler.record(epoch, rows, readable, outputs[f"collect/{phase.collect.output}"])
                    watch.step(result.steps, total, loss)
                if weights:
                    result.loss = losses / weights
            if not loop.count:
                raise DataError(f"none of the {len(images)} training images can be decoded")
            values.update(loop.trained)
            result.tensors.update(loop.trained)
            if sampler and phase.collect:
                features, labels = sampler.collected(phase.collect.shape)
                result.collected |= {phase.collect.output: features, "labels": labels}
        result.samples = len(images) - len(lost)
        result.step_s = median(times) if times else None
        return result

    # --- evaluation -----------------------------------------------------------------------------------

    def evaluate(
        self, program: Program, values: Mapping[str, Array], data: DeviceData, seeds: Seeds, watch: Watch
    ) -> Evaluated:
        """Count right answers on full, unaugmented test images; `values` are left as they are.

        Raises Stopped, BadPayload, DataError.
        """
        *training, choice_rng = seeds.generators(6)
        evaluate, images, batch = program.evaluate, data.test, program.batch
        session, flops = self._session(program, evaluate.graph), 0
        if evaluate.adapt:
            quiet = Watch(lambda *_: None, watch.stopped)
            adapted = self._run_phases(program, evaluate.adapt, values, data.train, training, 1.0, quiet)
            values, flops = {**values, **adapted.tensors}, adapted.flops
        feeds = {f"tensor/{name}": value for name, value in values.items()}
        if evaluate.gather:
            rows = _chosen(len(data.train), evaluate.gather.capacity, choice_rng)
            feeds |= self._gather(program, evaluate.gather, feeds, data.train, rows, watch)
            flops += program.graphs[evaluate.gather.graph].flops * -(-len(rows) // batch.batch_size)
        fixed = _bind(session, feeds, {"batch/patches"})
        correct, seen = 0, 0
        total = -(-len(images) // batch.batch_size)
        for number, (rows, readable, patches) in enumerate(_full_images(images, np.arange(len(images)), batch)):
            if watch.stopped():
                raise Stopped("the task was cancelled")
            outputs = _run(session, {**fixed, "batch/patches": patches})
            answers = outputs["logits"][: len(rows)].argmax(axis=1)
            correct += int(((answers == images.labels[rows]) & readable).sum())
            seen += int(readable.sum())
            watch.step(number + 1, total, None)
        return Evaluated(correct, seen, flops + program.graphs[evaluate.graph].flops * total)

    def _gather(
        self,
        program: Program,
        gather: Gather,
        values: Mapping[str, Array],
        images: Split,
        chosen: Indices,
        watch: Watch,
    ) -> dict[str, Array]:
        """What a graph gives of the chosen images, as inputs of the predict graph; empty places have weight 0."""
        session = self._session(program, gather.graph)
        fixed = _bind(session, values, {"batch/patches"})
        gathered = np.zeros((gather.capacity, *gather.shape), np.float32)
        labels, weight = np.zeros(gather.capacity, np.int64), np.zeros(gather.capacity, np.float32)
        filled = 0
        for rows, readable, patches in _full_images(images, chosen, program.batch):
            if watch.stopped():
                raise Stopped("the task was cancelled")
            outputs = _run(session, {**fixed, "batch/patches": patches})
            places = slice(filled, filled + len(rows))
            gathered[places] = outputs[f"collect/{gather.output}"][: len(rows)]
            labels[places], weight[places] = images.labels[rows], readable
            filled += len(rows)
        return {f"gathered/{gather.output}": gathered, "gathered/labels": labels, "gathered/weight": weight}

    def _session(self, program: Program, graph: str) -> onnxruntime.InferenceSession:
        return self._sessions[program.graphs[graph].digest]


class _PhaseLoop:
    """The state of one phase: tensors in motion and their optimizer slots."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        program: Program,
        phase: Train,
        values: Mapping[str, Array],
        start: Mapping[str, Array],
        facts: Mapping[str, Any],
        lr_scale: float,
    ) -> None:
        self._session = session
        moved = [name for group in phase.groups for name in program.names(group)]
        self.trained: Tensors = {name: values[name] for name in moved}
        self._slots = {f"slot/{slot}/{name}": np.zeros_like(values[name]) for slot in phase.slots for name in moved}
        anchored = {f"anchor/{name}": start[name] for group in phase.anchors for name in program.names(group)}
        fixed = {f"tensor/{name}": value for name, value in values.items() if name not in self.trained}
        rate = {"hyper/lr": np.array(phase.lr * lr_scale, np.float32)}
        later = {f"tensor/{name}" for name in moved} | self._slots.keys() | {"hyper/step"}
        later |= {"batch/patches", "batch/kept", "batch/labels", "batch/weight", "hyper/last"}
        self._fixed = _bind(session, {**fixed, **anchored, **facts, **rate}, later)
        self._wanted = {node.name for node in session.get_inputs()}
        self.count = 0  # steps so far

    def step(self, feeds: Mapping[str, Any], *, last: bool) -> dict[str, Any]:
        """One optimizer step; returns metrics and what may be collected."""
        self.count += 1
        moving = {f"tensor/{name}": value for name, value in self.trained.items()}
        hyper = {"hyper/step": np.array(self.count, np.float32), "hyper/last": np.array(last, np.float32)}
        fed = {**self._fixed, **moving, **self._slots, **feeds, **hyper}
        outputs = _run(self._session, {name: value for name, value in fed.items() if name in self._wanted})
        for name in self.trained:
            self.trained[name] = outputs.pop(f"new/tensor/{name}")
        for name in self._slots:
            self._slots[name] = outputs.pop(f"new/{name}")
        return outputs


def training_feeds(
    images: Split,
    rows: npt.NDArray[np.int64],
    batch: Batch,
    picture_rng: np.random.Generator,
    mask_rng: np.random.Generator,
) -> tuple[dict[str, Any], Flags]:
    """Graph inputs of one batch, padded to the batch size, and which of `rows` could be read."""
    pictures, readable = images.load(rows, batch.image_size)
    patches = unfold(normalise(augment(pictures, batch, picture_rng), batch), batch.patch_size)
    feeds: dict[str, Any] = {}
    if batch.kept_patches < batch.patches:
        kept = draw_kept(mask_rng, len(rows), batch.patches, batch.kept_patches)
        patches = select(patches, kept)
        feeds["batch/kept"] = _pad(kept, batch.batch_size)
    feeds["batch/patches"] = _pad(patches, batch.batch_size)
    feeds["batch/labels"] = _pad(images.labels[rows], batch.batch_size)
    feeds["batch/weight"] = _pad(readable.astype(np.float32), batch.batch_size)
    return feeds, readable


def _full_images(images: Split, chosen: Indices, batch: Batch) -> Iterator[tuple[Indices, Flags, Array]]:
    """Batches of whole images without augmentation: rows, which of them could be read, padded patches."""
    for first in range(0, len(chosen), batch.batch_size):
        rows = chosen[first : first + batch.batch_size]
        pictures, readable = images.load(rows, batch.image_size)
        patches = unfold(normalise(pictures, batch), batch.patch_size)
        yield rows, readable, _pad(patches, batch.batch_size)


def _chosen(count: int, capacity: int, rng: np.random.Generator) -> Indices:
    """All rows, or a random choice of as many as fit, ascending."""
    return np.arange(count) if count <= capacity else np.sort(rng.choice(count, capacity, replace=False))


def _planned_steps(phase: Train, batches: int) -> int:
    steps = phase.epochs * batches
    return phase.repeats * (steps if phase.steps is None else min(phase.steps, steps))


def _facts(program: Program, phase: Train, images: Split, rng: np.random.Generator) -> dict[str, Any]:
    """What a phase may read of the device itself, and the numbers that it wants drawn."""
    counts = np.bincount(images.labels, minlength=len(program.classes)).astype(np.float32)
    facts: dict[str, Any] = {"fact/class_counts": counts}
    for draw in phase.draws:
        numbers = rng.integers(draw.low, draw.high, draw.count)
        facts[f"draw/{draw.name}"] = np.sort(numbers) if draw.ascending else numbers
    return facts


def _pad(rows: Any, length: int) -> Any:
    """Zeros behind a short last batch; their weight is zero, too."""
    if len(rows) == length:
        return rows
    return np.concatenate([rows, np.zeros((length - len(rows), *rows.shape[1:]), rows.dtype)])


def _bind(session: onnxruntime.InferenceSession, values: Mapping[str, Any], later: set[str]) -> dict[str, Any]:
    """The part of `values` that the graph reads. Raises BadPayload when an input has no source."""
    names = [node.name for node in session.get_inputs()]
    if missing := [name for name in names if name not in values and name not in later]:
        raise BadPayload(f"the graph reads {missing[0]!r}, which the program does not provide")
    return {name: values[name] for name in names if name in values}


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    names = [node.name for node in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, feeds), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        raise BadPayload(f"the graph cannot run on this device: {error}") from error
