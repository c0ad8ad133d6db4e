"""A trained model -> a folder that works without fedvit: ONNX files, labels, preprocessing, a card.

Coordinator and device write the same folder with the same code, so nothing here needs torch or onnx.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from export.bundle.assemble import USUAL, Precision, assemble, open_predict_graph
from export.bundle.card import BundleMachine, Card, FileCard, Origin, Preprocessing, Reported, Training, readme
from export.bundle.measure import (
    PictureAnswers,
    PictureBatch,
    RunGraph,
    answer,
    are_probabilities,
    check_parity,
    engine_version,
    open_session,
    pictures_of,
    random_pictures,
    time_one,
)
from export.bundle.static_int8 import find_scales, list_activations, quantise_products, show_activations
from fedvit.data.folder import Split
from fedvit.data.images import Floats
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write, sync_folder
from fedvit.onnx_model import Model, Parts, read_model, size_bytes
from fedvit.program import Batch
from fedvit.tensors import Array

CARD, README, LABELS, PREPROCESSING = "card.json", "README.md", "labels.json", "preprocessing.json"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model as a run left it."""

    graph: bytes  # the run's predict graph
    values: Mapping[str, Array]  # of all its inputs but the patches, by the names of `fedvit.program`
    batch: Batch
    classes: tuple[str, ...]
    origin: Origin
    reported: Reported | None = None
    training: Training | None = None
    licence: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    model_options: Mapping[str, Any] | None = None  # None: unknown here

    def __post_init__(self) -> None:
        if self.batch.text:
            raise ConfigError(
                "FV1110", f"run {self.origin.run!r} has a model of text: bundles are of models that read images"
            )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The images and settings with which a bundle is measured."""

    images: Split | None  # with known classes; None or none: random pictures, and no accuracy
    described: str  # in the card: "the device's own test images"
    threads: int
    machine: str
    cores: int
    calibration: Split | None = None  # images that give the scales of int8 activations

    def pictures(self, batch: Batch) -> Iterator[PictureBatch]:
        return pictures_of(self.images, batch) if self.images else random_pictures(batch)

    def what(self, answers: PictureAnswers) -> str:
        return f"{len(answers.logits)} {self.described if self.images else 'random pictures'}"


def write_bundle(
    out: Path,
    trained: TrainedModel,
    bench: Bench,
    *,
    precisions: Sequence[Precision] = USUAL,
    progress: Callable[[str], None] = lambda line: None,
) -> Card:
    """Write the folder `out` completely, with every file compared with the run's own graph, or not at all.

    Raises ConfigError when `out` exists already, ExportMismatch when a file is too far from the original,
    StorageFailed when the disk is full.
    """
    with new_folder(out) as folder:
        return _fill(folder, trained, bench, precisions, progress)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes `out` when the block ends without an error, or vanishes.

    Raises ConfigError when `out` exists already, StorageFailed when the disk is full.
    """
    check_new(out)
    partial = out.absolute().parent / f".{out.name}.writing-{secrets.token_hex(4)}"
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new(out: Path) -> None:
    """Raises ConfigError when a bundle's folder exists already."""
    if out.exists():
        raise ConfigError("FV1905", f"{out} exists already: --out names the bundle's new folder")


def _fill(
    folder: Path, trained: TrainedModel, bench: Bench, precisions: Sequence[Precision], progress: Callable[[str], None]
) -> Card:
    batch = trained.batch
    if (some := next(bench.pictures(batch), None)) is None:  # none of the images can be read
        bench = replace(bench, images=None)
        some = next(random_pictures(batch))
    want = RunGraph(trained.graph, trained.values, batch, bench.threads)(some.images)
    voted = are_probabilities(want)
    model = open_predict_graph(read_model(trained.graph), batch, probabilities=voted)
    original = _Original(model, some.images, want, voted)
    files: dict[str, FileCard] = {}
    reference: PictureAnswers | None = None
    pictures = ""
    for precision in (entry for entry in Precision if entry in precisions):  # fp32 first, for the others to compare
        progress(f"{precision.file}: writing, comparing, measuring")
        files[precision], answers = _file(folder, precision, trained, original, bench, reference)
        if precision is Precision.FP32:
            reference = answers
        pictures = bench.what(answers)
    card = Card(
        origin=trained.origin,
        classes=len(trained.classes),
        files=files,
        pictures=pictures,
        reported=trained.reported,
        training=trained.training,
        licence=trained.licence,
        machine=BundleMachine(bench.machine, bench.cores, engine_version()),
    )
    preprocessing = Preprocessing.of(batch)
    for name, content in ((CARD, card), (LABELS, trained.classes), (PREPROCESSING, preprocessing)):
        atomic_write(folder / name, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    atomic_write(folder / README, readme(card, trained.classes, preprocessing).encode())
    return card


class _Original(NamedTuple):
    """The original model, and its answers to compare every file with."""

    model: Model
    images: Floats
    answers: Floats  # of the run's own graph
    voted: bool


def _file(
    folder: Path,
    precision: Precision,
    trained: TrainedModel,
    original: _Original,
    bench: Bench,
    reference: PictureAnswers | None,
) -> tuple[FileCard, PictureAnswers]:
    """Write one file, and measure it; `reference` is what the fp32 file answered."""
    metadata = {
        "labels": msgspec.json.encode(trained.classes).decode(),
        "preprocessing": msgspec.json.encode(Preprocessing.of(trained.batch)).decode(),
        "origin": msgspec.json.encode(trained.origin).decode(),
    }
    model, values = original.model, trained.values
    if precision is Precision.STATIC:
        model, values = _calibrate(model, trained, bench)
    assembled = assemble(model, values, precision, metadata)
    _write_parts(folder / precision.file, assembled.parts)
    session = open_session(folder / precision.file, bench.threads)
    parity = check_parity(session, precision, original.images, original.answers, voted=original.voted)
    answers = answer(session, bench.pictures(trained.batch))
    card = FileCard(
        file=precision.file,
        size_bytes=size_bytes(assembled.parts),
        weights=precision.meaning,
        tensors=assembled.tensors,
        tensors_not_float32=assembled.converted,
        parity=parity,
        agreement=answers.agreement(reference) if reference else None,
        accuracy=answers.accuracy,
        latency=time_one(session, original.images[:1], bench.threads),
    )
    return card, answers


def _calibrate(model: Model, trained: TrainedModel, bench: Bench) -> tuple[Model, Mapping[str, Array]]:
    """Return the model with int8 products, and its values. Raises ConfigError without images, or without products."""
    if bench.calibration is None or not len(bench.calibration):
        raise ConfigError("FV1908", f"{Precision.STATIC.file} needs images that give its scales: name them with --data")
    names = list_activations(model, trained.values)
    if not names:
        raise ConfigError("FV1908", f"{Precision.STATIC.file}: model {trained.origin.model!r} has no product for it")
    shown = assemble(show_activations(model, names), trained.values, Precision.FP32, {})
    session = open_session(b"".join(shown.parts), bench.threads)
    pictures = (some.images for some in pictures_of(bench.calibration, trained.batch))
    quantised = quantise_products(model, trained.values, find_scales(session, pictures, names))
    return quantised.model, {**trained.values, **quantised.values}


def _write_parts(path: Path, parts: Parts) -> None:
    with open(path, "xb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
