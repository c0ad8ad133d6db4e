"""Makes a bundle of a device's model, and compares its answers with those of the bundle that the device uses."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_client.work.runtime import Challenge, Compared, ModelSource, ModelTest, Runtime, Stopped, Watch
from export.bundle.assemble import LOGITS, Precision
from export.bundle.card import Origin, Training
from export.bundle.measure import TOGETHER, as_input, open_session, run
from export.bundle.read import Bundle
from export.bundle.write import Bench, TrainedModel, make_bundle
from fedvit.comparison import Comparison
from fedvit.data.folder import DeviceData, Split
from fedvit.errors import BadPayload, ConfigError
from fedvit.program import Batch, Program
from fedvit.tensors import Tensors

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

log = logging.getLogger(__name__)

NOT_COUNTED = "these are this device's images, those of the run's other devices are not known here"
"""The first line of a card's policy."""

_PAIRS = ((True, True), (True, False), (False, True), (False, False))
"""Right answers of the challenger and the champion, in the order of a comparison's counts."""


def make_model(program: Program, graph: bytes, inputs: Tensors, source: ModelSource) -> TrainedModel:
    """Return a device's model for a bundle; `inputs` are those of the predict graph but the images."""
    evaluate = program.evaluate
    origin = Origin(
        run=source.run,
        method=program.method,
        model=program.model,
        round=source.round,
        device=source.device,
        made_by=f"edge-client {version('fedvit')}",
        personal_tensors=source.personal_tensors,
        adapted=bool(evaluate.adapt),
        remembered=int(inputs["gathered/weight"].sum()) if evaluate.gather else 0,
    )
    return TrainedModel(graph=graph, values=inputs, batch=program.batch, classes=program.classes, origin=origin)


def count_images(data: DeviceData, policy: str) -> Training:
    """Count the device's images for a bundle's card; `policy` tells what may be sent."""
    return Training(devices=1, train_images=len(data.train), test_images=len(data.test), policy=(NOT_COUNTED, policy))


def compare_models(runtime: Runtime, test: ModelTest, watch: Watch, challenge: Challenge) -> Compared:
    """Make the challenger's bundle, and count the test images that each model answers right.

    Raises Stopped, BadPayload, DataError, and ExportMismatch for a bundle that differs from the run's graph.
    """
    program, data = test.program, test.data
    inputs, flops = runtime.prepare(test, watch)
    trained = make_model(program, challenge.graph.read_bytes(), inputs, challenge.source)
    trained = replace(trained, training=count_images(data, challenge.policy))
    if watch.stopped():
        raise Stopped("FV1422", "the task was stopped")
    bench = Bench(
        images=data.test if len(data.test) else None,
        described="of the device's own test images",
        threads=runtime.threads,
        machine=challenge.machine,
        cores=challenge.cores,
        training=data.train,
    )
    files = make_bundle(trained, bench, precisions=(Precision.FP32,))
    session = open_session(files[Precision.FP32.file], runtime.threads)
    report = _make_report(watch, program.batch.answer_size, len(data.test))
    new = list(find_right(session, program.batch, program.classes, data.test, program.classes, report(0)))
    champion = _open(challenge.champion, runtime.threads)
    old: list[bool | None] = [False if right is not None else None for right in new]
    if champion:
        old = list(find_right(champion.session, champion.batch, champion.labels, data.test, program.classes, report(1)))
    pairs = [(bool(a), bool(b)) for a, b in zip(new, old, strict=True) if a is not None and b is not None]
    comparison = Comparison(*map(pairs.count, _PAIRS))
    flops += program.graphs[program.evaluate.graph].flops * -(-len(data.test) // program.batch.answer_size)
    return Compared(comparison, champion is not None, files, flops)


def find_right(
    session: "InferenceSession",
    batch: Batch,
    labels: Sequence[str],
    images: Split,
    classes: Sequence[str],
    watch: Watch,
) -> Iterator[bool | None]:
    """Yield for each image whether a model's answer is right; None for one that cannot be read.

    Answers are compared by name: two models may know other classes, or the same ones in another order.
    """
    for first in range(0, len(images), TOGETHER):
        if watch.stopped():
            raise Stopped("FV1422", "the task was stopped")
        rows = np.arange(first, min(first + TOGETHER, len(images)))
        pixels, readable = images.load(rows, batch.image_size)
        answers = run(session, as_input(pixels, batch))[LOGITS].argmax(axis=1)
        for row, can_read, place in zip(rows.tolist(), readable.tolist(), answers.tolist(), strict=True):
            yield labels[place] == classes[int(images.labels[row])] if can_read else None
        watch.step(int(rows[-1]) + 1, len(images), None)


def _make_report(watch: Watch, batch_size: int, images: int) -> Callable[[int], Watch]:
    """Return a function that makes the watch of the first model (0) or the second one (1): steps are batches."""
    steps = -(-images // batch_size)

    def make(place: int) -> Watch:
        def step(done: int, total: int, loss: float | None) -> None:
            watch.step(place * steps + -(-done // batch_size), 2 * steps, loss)

        return Watch(step, watch.stopped)

    return make


def _open(folder: Path | None, threads: int) -> Bundle | None:
    """Open the bundle that the device uses; None if there is none, or it is damaged."""
    if folder is None:
        return None
    try:
        return Bundle.open(folder, None, threads)
    except (ConfigError, BadPayload) as error:
        log.warning("the model in use cannot be compared", extra={"reason": str(error)})
        return None
