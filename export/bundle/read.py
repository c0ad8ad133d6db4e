"""Reads a bundle, and answers pictures with it."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import onnxruntime
from PIL import Image

from export.bundle.assemble import IMAGE, LOGITS, Precision
from export.bundle.calibration import soften
from export.bundle.card import CARD_VERSION, Card, Preprocessing
from export.bundle.measure import FeatureAnswers, as_input, open_session, run_features
from export.bundle.reference import REFERENCE, PictureReference
from export.bundle.write import CARD, LABELS, PREPROCESSING
from fedvit.answers import find_probabilities, unscale_outputs
from fedvit.data.images import Floats, Indices, Pixels, read_image, read_size
from fedvit.errors import BadPayload, ConfigError
from fedvit.program import Batch

Kind = TypeVar("Kind")


class ClassProbability(NamedTuple):
    label: str
    probability: float


class NamedNumber(NamedTuple):
    label: str
    number: float


@dataclass(frozen=True)
class Bundle:
    """A model from a bundle's folder, ready to answer."""

    card: Card
    labels: tuple[str, ...]
    batch: Batch
    session: onnxruntime.InferenceSession

    @classmethod
    def open(cls, folder: Path, precision: Precision | None, threads: int) -> "Bundle":
        """Open with the given precision, or the first available one.

        Raises ConfigError when the folder is no bundle or has no such file, BadPayload when a file is damaged, or has
        other pictures or classes than the rest.
        """
        if not (folder / CARD).is_file():
            raise ConfigError(
                "FV1908", f"{folder} is not a bundle: it has no {CARD}; name another folder with --bundle"
            )
        version = _read(folder / CARD, _Version).v
        if version != CARD_VERSION:
            raise BadPayload(
                "FV1908", f"{folder / CARD} has version {version}, this software knows version {CARD_VERSION}"
            )
        card = _read(folder / CARD, Card)
        labels = _read(folder / LABELS, tuple[str, ...])
        if len(labels) != card.classes:
            raise BadPayload(
                "FV1908", f"{folder / LABELS} has {len(labels)} labels, {folder / CARD} says {card.classes}"
            )
        wanted = precision or next(iter(card.files), None)
        if wanted is None or wanted not in card.files:
            known = ", ".join(card.files) or "none"
            raise ConfigError("FV1908", f"{folder} has no model in precision {wanted!s}; available: {known}")
        batch = _read(folder / PREPROCESSING, Preprocessing).batch
        file = folder / Precision(wanted).file
        session = open_session(file, threads)
        shapes = {port.name: list(port.shape[1:]) for port in (*session.get_inputs(), *session.get_outputs())}
        positions = [batch.patches] if batch.labels and batch.labels.labels_patches else []
        for name, shape in ((IMAGE, [3, batch.image_size, batch.image_size]), (LOGITS, [*positions, card.classes])):
            if shapes.get(name) != shape:
                raise BadPayload(
                    "FV1908", f"{file} has {shapes.get(name)} values of {name}, the bundle's other files say {shape}"
                )
        return cls(card, labels, batch, session)

    def answer(self, image: Path, top: int) -> list[ClassProbability] | list[NamedNumber]:
        """Answer one picture: the likeliest classes; of a multi-label task those above one half, or more if `top` is.

        Of a regression it is the number, of a segmentation the share of patches of each class that it has. Raises
        DataError, naming the file, when it cannot be read.
        """
        pixels = read_image(image, self.batch.image_size)
        if form := self.batch.labels:
            if form.labels_patches:
                return self.list_shares(self.segment(pixels))
            logits_C = self.run(pixels).logits[0]
            if form.task == "regression":
                return [NamedNumber(self.labels[0], float(unscale_outputs(form, logits_C)[0]))]
            count = max(int((logits_C > 0).sum()), top if top > 1 else 0)
            return self.rank(find_probabilities(logits_C), count)
        return self.rank(self.calibrate(self.run(pixels).logits[0]), top)

    def segment(self, pixels_SSC: Pixels) -> Indices:
        """Return the class of each patch of a picture, (rows, columns). Raises BadPayload when the model cannot run."""
        grid = self.batch.image_size // self.batch.patch_size
        places: Indices = self.run(pixels_SSC).logits[0].argmax(axis=-1).reshape(grid, grid)
        return places

    def make_mask(self, image: Path) -> bytes:
        """Make a PNG of a picture's own size, upright: of each pixel the place of its class among the labels.

        Raises DataError for a picture that cannot be read, ConfigError for a model of another task.
        """
        if self.batch.labels is None or not self.batch.labels.labels_patches:
            raise ConfigError("FV2492", "only models of task segmentation answer with masks; leave --masks out")
        places = Image.fromarray(self.segment(read_image(image, self.batch.image_size)).astype(np.uint8))
        made = BytesIO()
        places.resize(read_size(image), Image.Resampling.NEAREST).save(made, "PNG")
        return made.getvalue()

    def list_shares(self, places: Indices) -> list[NamedNumber]:
        """List the share of patches of each class that has some, the largest first."""
        shares = np.bincount(places.ravel(), minlength=len(self.labels)) / places.size
        order = np.argsort(-shares, kind="stable")
        return [NamedNumber(self.labels[place], float(shares[place])) for place in order if shares[place]]

    def check_classifies(self) -> None:
        """Raise ConfigError if the model's answer to a picture is not one class."""
        if form := self.batch.labels:
            raise ConfigError(
                "FV2492", f"a model of task {form.task} does not serve: its answers are not one class; use predict"
            )

    def run(self, pixels_SSC: Pixels) -> FeatureAnswers:
        """Answer one picture. Raises BadPayload when the model cannot run."""
        return run_features(self.session, as_input(pixels_SSC[None], self.batch))

    def calibrate(self, logits_C: Floats) -> Floats:
        """Return the calibrated probabilities of one answer."""
        calibration = self.card.calibration
        [probabilities_C] = soften(logits_C[None], calibration.temperature if calibration else 1.0)
        return np.asarray(probabilities_C)

    def rank(self, probabilities_C: Floats, top: int) -> list[ClassProbability]:
        """List the likeliest classes of an answer."""
        order = np.argsort(-probabilities_C, kind="stable")[:top]
        return [ClassProbability(self.labels[index], float(probabilities_C[index])) for index in order]

    def is_unsure(self, confidence: float) -> bool:
        """Return whether an answer may be of no class, by the threshold that was chosen on test images."""
        return self.card.calibration is not None and confidence < self.card.calibration.unsure_below


def can_open(folder: Path, threads: int) -> bool:
    """Return whether a folder is a bundle whose files are whole."""
    try:
        Bundle.open(folder, None, threads)
    except (ConfigError, BadPayload):
        return False
    return True


def read_reference(folder: Path) -> PictureReference | None:
    """Read what pictures looked like when a bundle was made; None if it does not say. Raises BadPayload."""
    file = folder / REFERENCE
    return _read(file, PictureReference) if file.is_file() else None


class _Version(msgspec.Struct):
    v: int


def _read(file: Path, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError("FV1702", f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadPayload("FV1704", f"{file} is damaged: {error}") from error
