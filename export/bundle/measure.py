"""Measures a bundle's files: answers, difference from the run's own graph, and latency."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from export.bundle.assemble import FEATURES, IMAGE, LOGITS, PATCHES, PROBABILITIES, Precision
from export.bundle.card import Agreement, Latency, MeasuredAccuracy, Parity
from fedvit.answers import count_right, find_equal
from fedvit.data.folder import Split
from fedvit.data.images import Floats, Indices, Pixels, normalise, unfold
from fedvit.errors import BadPayload, ExportMismatch
from fedvit.label_forms import LabelForm
from fedvit.onnx_file import check_self_contained
from fedvit.program import Batch
from fedvit.tensors import Array

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

TOLERANCES = {Precision.FP32: 1e-4, Precision.FP16: 1e-2, Precision.INT8: 1e-1, Precision.STATIC: 0.25}
"""Largest difference from the run's predict graph, relative to its largest value. The same sums in another order
give 1e-6; weights of 11 bits 5e-4; weights of 8 bits around 1e-2, growing with the model's depth; activations of 8
bits several times as much."""

VOTE_TOLERANCES = {Precision.FP32: 1e-3, Precision.FP16: 0.2, Precision.INT8: 0.5, Precision.STATIC: 0.5}
"""The same where neighbours vote. Weights of fewer bits select other neighbours, and each changes the vote by its
whole share."""

TIES = 16
"""If neighbours vote, one picture in this many may differ by more: rounding decides between two neighbours that are
equally near, and processors round differently. A wrong file differs for most pictures."""

LEAST_SCALE = 1e-3
"""Least scale of a comparison: all logits of an untrained model may be zero."""

RANDOM_PICTURES = 64
TOGETHER = 16
"""Pictures in one run of a model, if there are many."""
LATENCY_S = 2.0
LATENCY_RUNS = (5, 50)
"""Least and greatest number of timed runs, which take about LATENCY_S."""


class PictureBatch(NamedTuple):
    """Normalised pictures (N, 3, S, S), and their classes where these are known."""

    images: Floats
    labels: Indices | None


def random_pictures(batch: Batch, count: int = RANDOM_PICTURES) -> Iterator[PictureBatch]:
    """Coloured squares, eight by eight: the same ones each time."""
    squares = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    where = np.arange(batch.image_size) * 8 // batch.image_size
    pixels = squares[:, where][:, :, where]
    for first in range(0, count, TOGETHER):
        yield PictureBatch(as_input(pixels[first : first + TOGETHER], batch), None)


def pictures_of(images: Split, batch: Batch) -> Iterator[PictureBatch]:
    """A split's images as in a test; unreadable images are skipped."""
    for first in range(0, len(images), TOGETHER):
        rows = np.arange(first, min(first + TOGETHER, len(images)))
        pixels, readable = images.load(rows, batch.image_size)
        if readable.any():
            yield PictureBatch(as_input(pixels[readable], batch), images.labels[rows][readable])


def as_input(pixels_BSSC: Pixels, batch: Batch) -> Floats:
    """The model's input `image`: normalised, colours first."""
    return np.ascontiguousarray(normalise(pixels_BSSC, batch).transpose(0, 3, 1, 2))


def engine_version() -> str:
    """Return the version of the engine that measures."""
    import onnxruntime

    return str(onnxruntime.__version__)


def open_session(source: Path | bytes, threads: int) -> "InferenceSession":
    """Raises BadPayload for a model that could make onnxruntime read another file, or that it cannot load."""
    check_self_contained(source)
    import onnxruntime  # late: errors in flags need not wait for it

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.load_model_format", "ONNX")  # whatever its first bytes may say
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        model = source if isinstance(source, bytes) else str(source)
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        what = "a graph of the run" if isinstance(source, bytes) else str(source)
        raise BadPayload("FV2310", f"{what} cannot be loaded: {error}") from error


class RunGraph:
    """One of a run's own graphs for whole images, with the run's tensors, in batches of the run's size."""

    def __init__(self, graph: bytes, values: Mapping[str, Array], batch: Batch, threads: int) -> None:
        self._session = open_session(graph, threads)
        names = {node.name for node in self._session.get_inputs()} - {PATCHES}
        if missing := sorted(names - values.keys()):
            raise BadPayload("FV2310", f"a graph of the run reads {missing[0]!r}, which has no value")
        self._fixed = {name: values[name] for name in names}
        self._batch = batch

    def __call__(self, images_BCSS: Floats, output: str = LOGITS) -> Floats:
        """The graph's output for each picture."""
        size, results = self._batch.answer_size, []
        patches = unfold(images_BCSS.transpose(0, 2, 3, 1), self._batch.patch_size)
        for first in range(0, len(patches), size):
            some = patches[first : first + size]
            padded = np.zeros((size, *some.shape[1:]), np.float32)
            padded[: len(some)] = some
            [result] = self._session.run([output], {**self._fixed, PATCHES: padded})
            results.append(result[: len(some)])
        return np.concatenate(results)


def are_probabilities(answers_BC: Floats) -> bool:
    """Return whether a predict graph's answers are probabilities, as with a vote of neighbours."""
    return bool((answers_BC >= 0).all() and (np.abs(answers_BC.sum(axis=1, dtype=np.float64) - 1) < 1e-4).all())


def check_parity(
    session: "InferenceSession", precision: Precision, images: Floats, want: Floats, *, voted: bool
) -> Parity:
    """Compare a file with the original's answers `want`, all pictures at once and one by itself.

    `voted`: the answers are probabilities, and the difference is that of all pictures but one in TIES. Raises
    ExportMismatch when they are further apart than allowed.
    """
    output, tolerances = (PROBABILITIES, VOTE_TOLERANCES) if voted else (LOGITS, TOLERANCES)
    got = run(session, images)[output]
    [alone] = run(session, images[:1])[output]
    scale = max(float(np.abs(want).max()), LEAST_SCALE)
    difference_B = np.abs(got - want).reshape(len(images), -1).max(axis=1)
    difference_B[0] = np.maximum(difference_B[0], np.abs(alone - want[0]).max())
    left_out = len(images) // TIES if voted else 0
    difference = float(np.sort(difference_B)[-1 - left_out]) if np.isfinite(difference_B).all() else np.nan
    parity = Parity(difference / scale, tolerances[precision], len(images))
    if not parity.difference <= parity.tolerance:  # also catches NaN
        raise ExportMismatch(
            "FV1907",
            f"the {precision} file differs from the run's predict graph by {parity.difference:.1e} of its largest "
            f"value, allowed is {parity.tolerance:.0e}; no bundle is written (--precision chooses which files it has)",
        )
    return parity


def run(session: "InferenceSession", images: Floats) -> dict[str, Floats]:
    """Raises BadPayload when the model cannot run."""
    names = [output.name for output in session.get_outputs() if output.name in (LOGITS, PROBABILITIES)]
    try:
        return dict(zip(names, session.run(names, {IMAGE: images}), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        raise BadPayload("FV2310", f"the model cannot run here: {error}") from error


class FeatureAnswers(NamedTuple):
    """Answers to pictures, with the features that they follow from."""

    logits: Floats
    features: Floats  # the logits, where a file gives no features


def run_features(session: "InferenceSession", images: Floats) -> FeatureAnswers:
    """Run a model for its features. Raises BadPayload when it cannot run."""
    has_features = any(output.name == FEATURES for output in session.get_outputs())
    names = [LOGITS, FEATURES if has_features else LOGITS]
    try:
        logits, features = session.run(names, {IMAGE: images})
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        raise BadPayload("FV2310", f"the model cannot run here: {error}") from error
    return FeatureAnswers(logits, features)


class PictureAnswers(NamedTuple):
    """A file's answers to pictures."""

    logits: Floats
    labels: Any | None  # (n,), or (n, ...) of other tasks
    form: LabelForm | None = None  # of a task without one class for each image

    @property
    def accuracy(self) -> MeasuredAccuracy | None:
        if self.labels is None:
            return None
        if self.form:
            return MeasuredAccuracy(float(count_right(self.form, self.labels, self.logits).sum()), len(self.labels))
        return MeasuredAccuracy(int((self.logits.argmax(axis=1) == self.labels).sum()), len(self.labels))

    def agreement(self, other: "PictureAnswers") -> Agreement:
        if self.form:
            equal = find_equal(self.form, self.logits, other.logits)
        else:
            equal = self.logits.argmax(axis=1) == other.logits.argmax(axis=1)
        difference = np.abs(self.logits - other.logits).max()
        return Agreement(float(equal.mean()), float(difference), len(equal))


def answer(
    session: "InferenceSession", pictures: Iterator[PictureBatch], form: LabelForm | None = None
) -> PictureAnswers:
    logits, labels = [], []
    for some in pictures:
        logits.append(run(session, some.images)[LOGITS])
        if some.labels is not None:
            labels.append(some.labels)
    return PictureAnswers(np.concatenate(logits), np.concatenate(labels) if labels else None, form)


def time_one(session: "InferenceSession", image: Floats, threads: int) -> Latency:
    """`image` is one picture (1, 3, S, S)."""
    run(session, image)  # memory is fetched in the first run
    least, most = LATENCY_RUNS
    seconds: list[float] = []
    while len(seconds) < least or (sum(seconds) < LATENCY_S and len(seconds) < most):
        began = time.perf_counter()
        run(session, image)
        seconds.append(time.perf_counter() - began)
    return Latency(median(seconds), len(seconds), threads)
