"""A trained model -> a folder that works without fedvit: ONNX files, labels, preprocessing, a card.

Coordinator and device write the same folder with the same code, so nothing here needs torch or onnx.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from export.bundle.assemble import USUAL, Precision, assemble, open_predict_graph
from export.bundle.calibration import Calibration, calibrate
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
from export.bundle.reference import REFERENCE, describe_images
from export.bundle.static_int8 import find_scales, list_activations, quantise_products, show_activations
from fedvit.data.folder import Split
from fedvit.data.images import Floats
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import sync_folder
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
    options: Mapping[str, Any] | None = None  # of the method; None: unknown here
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
    training: Split | None = None  # what pictures looked like when the model was made; gives the scales of int8

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
        return _fill(_FolderPlace(folder), trained, bench, precisions, progress)


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


def make_bundle(trained: TrainedModel, bench: Bench, *, precisions: Sequence[Precision]) -> dict[str, bytes]:
    """Return the files of a bundle by name, for a process that may write none. Raises ExportMismatch."""
    place = _MemoryPlace()
    _fill(place, trained, bench, precisions, lambda line: None)
    return place.files


def check_new(out: Path) -> None:
    """Raises ConfigError when a bundle's folder exists already."""
    if out.exists():
        raise ConfigError("FV1905", f"{out} exists already: --out names the bundle's new folder")


class _Place(Protocol):
    """A place for the files of a bundle."""

    def write(self, name: str, parts: Parts) -> None: ...

    def find(self, name: str) -> Path | bytes:
        """Return a file that was written."""
        ...


class _FolderPlace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, parts: Parts) -> None:
        with open(self._folder / name, "xb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())

    def find(self, name: str) -> Path:
        return self._folder / name


class _MemoryPlace:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def write(self, name: str, parts: Parts) -> None:
        self.files[name] = b"".join(parts)

    def find(self, name: str) -> bytes:
        return self.files[name]


def _fill(
    place: _Place, trained: TrainedModel, bench: Bench, precisions: Sequence[Precision], progress: Callable[[str], None]
) -> Card:
    batch = trained.batch
    if (some := next(bench.pictures(batch), None)) is None:  # none of the images can be read
        bench = replace(bench, images=None)
        some = next(random_pictures(batch))
    want = RunGraph(trained.graph, trained.values, batch, bench.threads)(some.images)
    voted = batch.labels is None and are_probabilities(want)
    model = open_predict_graph(read_model(trained.graph), batch, probabilities=voted)
    original = _Original(model, some.images, want, voted)
    files: dict[str, FileCard] = {}
    reference: PictureAnswers | None = None
    calibration: Calibration | None = None
    pictures = ""
    for precision in (entry for entry in Precision if entry in precisions):  # fp32 first, for the others to compare
        progress(f"{precision.file}: writing, comparing, measuring")
        files[precision], answers = _file(place, precision, trained, original, bench, reference)
        if precision is Precision.FP32:
            reference = answers
        pictures = bench.what(answers)
        if calibration is None and answers.labels is not None and batch.labels is None:
            calibration = calibrate(answers.logits, answers.labels)
    card = Card(
        origin=trained.origin,
        classes=len(trained.classes),
        files=files,
        pictures=pictures,
        reported=trained.reported,
        training=trained.training,
        licence=trained.licence,
        machine=BundleMachine(bench.machine, bench.cores, engine_version()),
        calibration=calibration,
    )
    if bench.images and bench.training and batch.labels is None:
        _write_reference(place, next(iter(files)), bench, batch, calibration)
    preprocessing = Preprocessing.of(batch)
    for name, content in ((CARD, card), (LABELS, trained.classes), (PREPROCESSING, preprocessing)):
        place.write(name, [msgspec.json.format(msgspec.json.encode(content)) + b"\n"])
    place.write(README, [readme(card, trained.classes, preprocessing).encode()])
    return card


def _write_reference(
    place: _Place, precision: str, bench: Bench, batch: Batch, calibration: Calibration | None
) -> None:
    """Write what the device's images look like to the model, if they are enough."""
    assert bench.images is not None
    assert bench.training is not None
    session = open_session(place.find(Precision(precision).file), bench.threads)
    temperature = calibration.temperature if calibration else 1.0
    if reference := describe_images(session, batch, bench.training, bench.images, temperature):
        place.write(REFERENCE, [msgspec.json.encode(reference)])


class _Original(NamedTuple):
    """The original model, and its answers to compare every file with."""

    model: Model
    images: Floats
    answers: Floats  # of the run's own graph
    voted: bool


def _file(
    place: _Place,
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
    place.write(precision.file, assembled.parts)
    session = open_session(place.find(precision.file), bench.threads)
    parity = check_parity(session, precision, original.images, original.answers, voted=original.voted)
    answers = answer(session, bench.pictures(trained.batch), trained.batch.labels)
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
    if bench.training is None or not len(bench.training):
        raise ConfigError("FV1908", f"{Precision.STATIC.file} needs images that give its scales: name them with --data")
    names = list_activations(model, trained.values)
    if not names:
        raise ConfigError("FV1908", f"{Precision.STATIC.file}: model {trained.origin.model!r} has no product for it")
    shown = assemble(show_activations(model, names), trained.values, Precision.FP32, {})
    session = open_session(b"".join(shown.parts), bench.threads)
    pictures = (some.images for some in pictures_of(bench.training, trained.batch))
    quantised = quantise_products(model, trained.values, find_scales(session, pictures, names))
    return quantised.model, {**trained.values, **quantised.values}
