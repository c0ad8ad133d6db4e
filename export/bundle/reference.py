"""The reference that drift is measured against: the look of pictures when a model was made.

It holds quantiles and sums over the device's images, no value of a single one beyond those quantiles.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from export.bundle.calibration import soften
from export.bundle.measure import TOGETHER, as_input, run_features
from fedvit.data.folder import Split
from fedvit.data.images import Floats, Indices, Pixels
from fedvit.program import Batch

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

REFERENCE = "reference.json"
LEAST_IMAGES = 30
"""Images below which there is no reference."""
MOST_IMAGES = 2000
QUANTILES = 65
MOST_CENTRE_VALUES = 1 << 16
"""Most numbers in the means of all classes: 0.6 MB of JSON."""
LEAST_OF_CLASS = 5
"""Test images of a class whose mean leaves the device."""
_LEAST_VARIANCE = 1e-6
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


class Quantiles(Struct, frozen=True):
    """The distribution of one value over images."""

    images: int
    quantiles: tuple[float, ...]  # QUANTILES of them, ascending

    @classmethod
    def of(cls, values: Floats) -> "Quantiles":
        points = np.quantile(values.astype(np.float64), np.linspace(0, 1, QUANTILES))
        return cls(len(values), tuple(float(f"{point:.6g}") for point in points))


class FeatureCentres(Struct, frozen=True, kw_only=True):
    """Features of test images around the mean of the class that was answered."""

    means: tuple[tuple[float, ...], ...]  # by class; that of all images where a class was not answered
    variance: tuple[float, ...]  # around these means
    images: tuple[int, ...]  # by class
    spread: float  # sum of the squared correlations between features, at least their number


class PictureReference(Struct, frozen=True, kw_only=True):
    """The device's images as the model sees them."""

    mean: tuple[float, ...]  # of the features of training images
    variance: tuple[float, ...]
    samples: dict[str, Quantiles]  # by the names in `MEASURES`
    centres: FeatureCentres | None = None  # None: too few test images, or too many classes


MEASURES = ("brightness", "blur", "confidence", "distance")


def measure_pixels(pixels_BSSC: Pixels) -> dict[str, Floats]:
    """Return brightness (0 to 255), and sharpness: the logarithm of the Laplacian's variance, which blur lowers."""
    luma_BSS = pixels_BSSC.astype(np.float32) @ _LUMA
    inner = luma_BSS[:, 1:-1, 1:-1]
    edges = (
        luma_BSS[:, :-2, 1:-1] + luma_BSS[:, 2:, 1:-1] + luma_BSS[:, 1:-1, :-2] + luma_BSS[:, 1:-1, 2:]
    ) - 4 * inner
    return {"brightness": luma_BSS.mean(axis=(1, 2)), "blur": np.log(edges.var(axis=(1, 2)) + 1.0)}


def measure_answers(
    logits_BC: Floats, features_BD: Floats, mean_D: Floats, variance_D: Floats, temperature: float
) -> dict[str, Floats]:
    """Return confidence, and the distance of features from those of training: mean square of standard scores."""
    distance_B = (np.square(features_BD - mean_D) / variance_D).mean(axis=1)
    return {"confidence": soften(logits_BC, temperature).max(axis=1), "distance": distance_B}


def find_centres(features_BD: Floats, answers_B: Indices, classes: int) -> FeatureCentres | None:
    """Describe features around the means of the answered classes; None if these would be too many numbers."""
    count, width = features_BD.shape
    if classes * width > MOST_CENTRE_VALUES:
        return None
    images_C = np.bincount(answers_B, minlength=classes)
    means_CD = np.repeat(features_BD.mean(axis=0, keepdims=True), classes, axis=0)
    images_C[images_C < LEAST_OF_CLASS] = 0  # a mean of few would tell their features
    for label in np.flatnonzero(images_C):
        means_CD[label] = features_BD[answers_B == label].mean(axis=0)
    rest_BD = (features_BD - means_CD[answers_B]).astype(np.float64)
    free = max(count - int(np.count_nonzero(images_C)), 1)
    variance_D = np.square(rest_BD).sum(axis=0) / free + _LEAST_VARIANCE
    scores_BD = rest_BD / np.sqrt(variance_D)
    squares = float(np.square(scores_BD @ scores_BD.T / free).sum()) - width**2 / free  # less what chance adds
    return FeatureCentres(
        means=tuple(_shorten(mean) for mean in means_CD),
        variance=_shorten(variance_D),
        images=tuple(images_C.tolist()),
        spread=round(max(squares, width), 3),
    )


def _shorten(values: Floats | npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values)


def describe_images(
    session: "InferenceSession", batch: Batch, training: Split, test: Split, temperature: float
) -> PictureReference | None:
    """Make the reference from a model's answers to images; None if there are too few training images.

    Confidence and distance are those of test images: a model knows its training images, and is surer of them.
    """
    trained, tested = _measure(session, batch, training), _measure(session, batch, test)
    if trained is None or len(trained.logits) < LEAST_IMAGES:
        return None
    mean_D, variance_D = trained.features.mean(axis=0), trained.features.var(axis=0) + _LEAST_VARIANCE
    samples = {name: Quantiles.of(values) for name, values in trained.pixels.items()}
    centres = None
    if tested is not None and len(tested.logits) >= LEAST_IMAGES:
        values = measure_answers(tested.logits, tested.features, mean_D, variance_D, temperature)
        samples |= {name: Quantiles.of(value) for name, value in values.items()}
        best_B = tested.logits.argmax(axis=1)
        centres = find_centres(tested.features, best_B, trained.logits.shape[1])
    return PictureReference(
        mean=_shorten(mean_D),
        variance=_shorten(variance_D),
        samples=samples,
        centres=centres,
    )


class _Measured(NamedTuple):
    pixels: dict[str, Floats]
    logits: Floats
    features: Floats


def _measure(session: "InferenceSession", batch: Batch, images: Split) -> _Measured | None:
    """Answer at most MOST_IMAGES readable images, from all parts of the split; None if there are none."""
    chosen = np.unique(np.linspace(0, max(len(images) - 1, 0), min(len(images), MOST_IMAGES)).astype(np.int64))
    parts: list[_Measured] = []
    for first in range(0, len(chosen), TOGETHER):
        pixels, readable = images.load(chosen[first : first + TOGETHER], batch.image_size)
        if readable.any():
            seen = pixels[readable]
            answers = run_features(session, as_input(seen, batch))
            parts.append(_Measured(measure_pixels(seen), answers.logits, answers.features))
    if not parts:
        return None
    return _Measured(
        {name: np.concatenate([part.pixels[name] for part in parts]) for name in parts[0].pixels},
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.features for part in parts]),
    )
