"""A labelled data set before it is dealt out to devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedvit.data.images import Indices, Pixels
from fedvit.data.label_file import SEPARATOR
from fedvit.data.layout import is_hidden
from fedvit.errors import ConfigError, DataError
from fedvit.label_forms import OtherTask

MASK_FOLDER = "masks"
STRATA = 10
"""Groups of the numbers of a regression, by which partitions deal images out."""


class ImageSource(Protocol):
    """Pixels by row number: an array in memory, or a reader that decodes what is asked for.

    A reader raises DataError, naming the file, when an image asked for cannot be decoded.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Indices, /) -> Pixels: ...


class ArrayImages:
    """Images in memory as the data set has them: (n, h, w) gray or (n, h, w, 3), uint8.

    Rows come out as RGB of `size`, resized bilinearly where that is needed.
    """

    def __init__(self, stored: Pixels, size: int) -> None:
        self._stored = stored
        self._size = size

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, rows: Indices, /) -> Pixels:
        images = self._stored[rows]
        side = (self._size, self._size)
        if images.shape[1:3] != side:
            resized = np.empty((len(images), *side, *images.shape[3:]), dtype=np.uint8)
            for index, image in enumerate(images):
                resized[index] = Image.fromarray(image).resize(side, Image.Resampling.BILINEAR)
            images = resized
        return images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=3)


class SomeImages:
    """Some rows of a source."""

    def __init__(self, source: ImageSource, rows: Indices) -> None:
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: Indices) -> Pixels:
        return self._source[self._rows[rows]]


@dataclass(frozen=True, kw_only=True, eq=False)
class OtherLabels:
    """Labels of another task than one class for each image.

    `values` is (n, classes): 1 for each class of an image, else 0; of a segmentation the shares of its pixels; of a
    regression (n, 1), its number.
    """

    task: OtherTask
    values: npt.NDArray[np.floating[Any]]
    masks: Sequence[Pixels | Path] = ()  # of a segmentation: the place of each pixel's class, or a file with it

    def choose_strata(self) -> Indices:
        """Return the group of each image, (n,), by which partitions deal: its first class, or tenth of the numbers.

        Of a segmentation it is the class whose share is largest, compared with its share of all images.
        """
        if self.task == "segmentation":
            return np.asarray((self.values / np.maximum(self.values.mean(axis=0), 1e-9)).argmax(axis=1), np.int64)
        if self.task == "multi_label":
            return np.asarray(self.values.argmax(axis=1), np.int64)
        order = np.argsort(np.argsort(self.values[:, 0], kind="stable"), kind="stable")
        return np.asarray(order * STRATA // max(1, len(order)), np.int64)

    def write(self, row: int, classes: Sequence[str], image: Path) -> str:
        """Write a label as a cell of a device's label file; a mask goes into a folder beside the image."""
        if self.task == "segmentation":
            image.parent.joinpath(MASK_FOLDER).mkdir(exist_ok=True)
            mask = self.masks[row]
            with Image.open(mask) if isinstance(mask, Path) else Image.fromarray(mask) as opened:
                opened.save(image.parent / MASK_FOLDER / image.name)
            return f"{image.parent.name}/{MASK_FOLDER}/{image.name}"
        if self.task == "regression":
            return repr(float(self.values[row, 0]))
        return SEPARATOR.join(classes[place] for place in np.flatnonzero(self.values[row]).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Annotations:
    """Labels of every sample, which partitions use.

    `labels` (n,) are indices into a data set's classes. `coarse_labels` (n,), the groups of classes, and `domains`
    (n,), the sources of samples, are None where a data set does not have them.
    """

    labels: Indices
    coarse_labels: Indices | None = None
    domains: Indices | None = None

    def __post_init__(self) -> None:
        for name, others in (("coarse_labels", self.coarse_labels), ("domains", self.domains)):
            if others is not None and len(others) != len(self.labels):
                raise ConfigError(
                    "FV2012", f"{len(self.labels)} labels, but {len(others)} {name}; expected one per sample"
                )

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, rows: Indices) -> "Annotations":
        """Select some samples."""
        return Annotations(
            labels=self.labels[rows],
            coarse_labels=None if self.coarse_labels is None else self.coarse_labels[rows],
            domains=None if self.domains is None else self.domains[rows],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """`images[rows]` is (len(rows), size, size, 3) uint8; `labels` are indices into `classes`.

    Class names become folder names, so each is one. Raises DataError for a name that cannot be one, and
    when images, labels, coarse labels and domains are not equally many.
    """

    dataset: str  # a name for people and records, no path
    size: int
    images: ImageSource
    labels: Indices
    classes: tuple[str, ...]
    coarse_labels: Indices | None = None  # the group that a sample's class belongs to
    domains: Indices | None = None  # where a sample comes from: indices into `domain_names`
    domain_names: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # images that were left out, with the reason
    official_test: npt.NDArray[np.bool_] | None = None  # images of the data set's own test split; None: it has none
    other: OtherLabels | None = None  # None: `labels` are the labels; else they are strata, as partitions deal by them

    def __post_init__(self) -> None:
        for what, values in (
            ("images", self.images),
            ("coarse labels", self.coarse_labels),
            ("domains", self.domains),
            ("marks of test images", self.official_test),
            ("other labels", None if self.other is None else self.other.values),
        ):
            if values is not None and len(values) != len(self.labels):
                raise DataError("FV2012", f"{self.dataset}: {len(values)} {what} for {len(self.labels)} labels")
        if unfit := [name for name in self.classes if not _is_folder_name(name)]:
            raise DataError("FV2012", f"{self.dataset}: class {unfit[0]!r} cannot be the name of a folder")
        if self.other and self.other.task == "multi_label" and any(SEPARATOR in name for name in self.classes):
            raise DataError("FV2012", f"{self.dataset}: a class of an image with several cannot have a {SEPARATOR!r}")
        if len(set(self.classes)) < len(self.classes):
            raise DataError("FV2012", f"{self.dataset}: two of the {len(self.classes)} classes have the same name")

    def __len__(self) -> int:
        return len(self.labels)

    def keep_frequent(self, count: int) -> "Samples":
        """Keep the images of the classes that have most of them, of equally frequent ones the first.

        Raises ConfigError for another task than one class for each image, and for too many classes.
        """
        if self.other or not 0 < count <= len(self.classes):
            of = f"the task of {self.dataset} is {self.other.task}" if self.other else f"it has {len(self.classes)}"
            raise ConfigError("FV2150", f"classes = {count}: {self.dataset} has no such number of classes: {of}")
        frequency = np.bincount(self.labels, minlength=len(self.classes))
        kept = np.sort(np.argsort(-frequency, kind="stable")[:count])
        rows = np.flatnonzero(np.isin(self.labels, kept)).astype(np.int64)
        return replace(
            self,
            images=SomeImages(self.images, rows),
            labels=np.searchsorted(kept, self.labels[rows]).astype(np.int64),
            classes=tuple(self.classes[label] for label in kept),
            coarse_labels=None if self.coarse_labels is None else self.coarse_labels[rows],
            domains=None if self.domains is None else self.domains[rows],
            official_test=None if self.official_test is None else self.official_test[rows],
        )

    @property
    def annotations(self) -> Annotations:
        return Annotations(labels=self.labels, coarse_labels=self.coarse_labels, domains=self.domains)


def mark_tests(flags: Sequence[bool]) -> npt.NDArray[np.bool_] | None:
    """Mark the images of the official test split; None if there is none, or nothing else."""
    return np.array(flags, dtype=np.bool_) if any(flags) and not all(flags) else None


def folder_names(names: Sequence[str]) -> tuple[str, ...]:
    """Change class names of a foreign file to names that folders may have, all different.

    >>> folder_names(["cat", "tank/car", ".", "cat"])
    ('cat', 'tank-car', '_.', 'cat (3)')
    """
    result: list[str] = []
    for label, name in enumerate(names):
        fit = "".join("-" if letter in "/\\" or not letter.isprintable() else letter for letter in name)
        fit = fit if _is_folder_name(fit) else f"_{fit}"
        while fit in result:
            fit = f"{fit} ({label})"
        result.append(fit)
    return tuple(result)


def number_classes(values: npt.NDArray[np.integer]) -> tuple[Indices, tuple[str, ...]]:
    """Labels and names for a data set with numbered classes; a number without samples is not a class.

    All names are equally long, so that they sort as the numbers do.

    >>> number_classes(np.array([10, 2, 10]))
    (array([1, 0, 1]), ('02', '10'))
    """
    present, labels = np.unique(values, return_inverse=True)
    width = len(str(present.max(initial=0)))
    return labels.astype(np.int64), tuple(f"{value:0{width}d}" for value in present.tolist())


def join_batches(
    path: Path, dataset: str, batches: Sequence[tuple[Pixels, Indices]], size: int, are_tests: Sequence[bool] = ()
) -> Samples:
    """Join images in memory with numbered classes; `are_tests` marks batches of the official test split.

    Raises DataError, naming the path, for images of different sizes.
    """
    shapes = {images.shape[1:] for images, _ in batches}
    if len(shapes) > 1:
        raise DataError("FV2008", f"{path}: images of different sizes, {' and '.join(map(str, sorted(shapes)))}")
    labels, classes = number_classes(np.concatenate([labels for _, labels in batches]))
    images = ArrayImages(np.concatenate([images for images, _ in batches]), size)
    counts = [len(labels) for _, labels in batches]
    official_test = mark_tests(np.repeat([*are_tests], counts).tolist()) if are_tests else None
    return Samples(
        dataset=dataset, size=size, images=images, labels=labels, classes=classes, official_test=official_test
    )


def _is_folder_name(name: str) -> bool:
    return bool(name) and name.isprintable() and not set(name) & set("/\\") and not is_hidden(name)
