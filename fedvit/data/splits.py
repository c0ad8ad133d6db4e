"""The samples of a device, for training or for tests: images in files, text, and images with other labels."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from fedvit.answers import scale_labels
from fedvit.data.images import DECODED_BYTES, Flags, Indices, Pixels, read_image, read_mask
from fedvit.data.label_file import LABEL_FILE, check_count
from fedvit.data.text import SETTINGS
from fedvit.errors import DataError
from fedvit.label_forms import OtherTask
from fedvit.program import Batch
from fedvit.resources import IMAGE_CACHE_BYTES


class Stamp(NamedTuple):
    """By this a changed file is recognised without reading it."""

    size_bytes: int
    modified_ns: int


class CheckedFile(NamedTuple):
    """An image file whose header was read."""

    stamp: Stamp | None  # None: the file has no size
    problem: str | None


class Files:
    """Images in files, decoded when asked for.

    If all of them fit into `cache_bytes`, they are decoded once and kept in memory; else they are decoded each time.
    An image that takes more than `decoded_bytes` while it is decoded fails. Not thread-safe.
    """

    def __init__(
        self, paths: Sequence[Path], cache_bytes: int = IMAGE_CACHE_BYTES, decoded_bytes: int = DECODED_BYTES
    ) -> None:
        self.paths = tuple(paths)
        self.failed: dict[Path, str] = {}  # with the reason
        self._cache_bytes = cache_bytes
        self._decoded_bytes = decoded_bytes
        self._size = 0
        self._cache: Pixels | None = None
        self._cached = np.zeros(len(self.paths), dtype=np.bool_)

    def load(self, rows: Indices, size: int) -> tuple[Pixels, Flags]:
        if size != self._size:
            self._start_cache(size)
        if self._cache is None:
            images = np.zeros((len(rows), size, size, 3), dtype=np.uint8)
            for place, row in enumerate(rows):
                self._decode(row, images[place])
        else:
            for row in rows[~self._cached[rows]]:
                self._decode(row, self._cache[row])
                self._cached[row] = True
            images = self._cache[rows]
        return images, np.array([self.paths[row] not in self.failed for row in rows], dtype=np.bool_)

    def forget(self) -> None:
        """Free the memory of the decoded images; they are decoded again when they are needed."""
        self._size = 0
        self._cache = None

    def take_over(self, before: "Files", same: Collection[Path]) -> None:
        """Take what `before` knows of the files that are the `same` since: decoded images, and failures."""
        self.failed = {path: reason for path, reason in before.failed.items() if path in same}
        self.take_pictures(before, same)

    def take_pictures(self, before: "Files", same: Collection[Path]) -> None:
        """Take the decoded images of files that are the `same` since; those that failed may be good now."""
        if before._cache is None:
            return
        self._start_cache(before._size)
        if self._cache is None:
            return
        good = set(same) - before.failed.keys()
        places = {path: row for row, path in enumerate(before.paths) if before._cached[row] and path in good}
        for row, path in enumerate(self.paths):
            if path in places:
                self._cache[row] = before._cache[places[path]]
                self._cached[row] = True

    def _start_cache(self, size: int) -> None:
        shape = (len(self.paths), size, size, 3)
        # zeros take no memory before they are written to
        self._cache = np.zeros(shape, dtype=np.uint8) if math.prod(shape) <= self._cache_bytes else None
        self._cached[:] = False
        self._size = size

    def _decode(self, row: int, into: Pixels) -> None:
        path = self.paths[row]
        if path in self.failed:
            return
        try:
            into[:] = read_image(path, self._size, decoded_bytes=self._decoded_bytes)
        except DataError as error:
            self.failed[path] = str(error).removeprefix(f"cannot read image {path}: ")


def _name_task(batch: Batch) -> str:
    return f"the run's task is {batch.labels.task if batch.labels else 'one class for each image'}"


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test images of a device."""

    labels: Any  # (n,) int64; (n, ...) of a text, and of other tasks (float32)
    files: Files

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.files.paths

    @property
    def failed(self) -> Mapping[Path, str]:
        """Images with a valid header that could not be decoded, with the reason."""
        return self.files.failed

    def load(self, indices: Indices, size: int) -> tuple[Pixels, Flags]:
        """(images (n, size, size, 3), readable (n,)); an unreadable image is all zeros.

        The caller may change both arrays. An image that failed once is not tried again.
        """
        return self.files.load(indices, size)

    def relabel(self, table: Indices, classes: int) -> Self:
        """With label `table[label]` for each one, of so many classes."""
        return replace(self, labels=table[self.labels])

    def count_classes(self, classes: int) -> Indices:
        """Count the images, or characters, of each class, (classes,)."""
        return np.bincount(self.labels.ravel(), minlength=classes)

    def unfit(self, batch: Batch) -> str | None:
        """Reason why these samples cannot form a Program's batches, or None."""
        if batch.labels:
            return f"the run's task is {batch.labels.task}, which needs a file {LABEL_FILE}"
        return "the run trains on text, this folder holds images" if batch.text else None

    def fit_labels(self, batch: Batch) -> Self:
        """With the labels that a model of the run's task learns."""
        return self


@dataclass(frozen=True, eq=False)
class TextSplit(Split):
    """Samples of text: `labels` are (n, context), the character that follows each one of `tokens`.

    Letters: n samples, T characters of context.
    """

    tokens: Indices  # (n, T) indices into the classes

    @classmethod
    def of(cls, windows: Indices, files: Sequence[Path]) -> Self:
        return cls(windows[:, 1:], Files(files), windows[:, :-1])

    def relabel(self, table: Indices, classes: int) -> Self:
        return replace(self, labels=table[self.labels], tokens=table[self.tokens])

    def unfit(self, batch: Batch) -> str | None:
        if batch.text is None:
            return "the run trains on images, this folder holds text"
        if (context := self.tokens.shape[1]) != batch.text.context:
            return f"the run's samples have a context of {batch.text.context} characters, those of {SETTINGS} {context}"
        return None


@dataclass(frozen=True, eq=False)
class LabelledSplit(Split):
    """Images with labels of another task, (n, classes): 1 for each class of an image, or its number.

    Numbers are float64 until `fit_labels` has scaled them.
    """

    task: OtherTask

    def relabel(self, table: Indices, classes: int) -> Self:
        """Raises DataError for a run with so many classes that labels would take too much memory."""
        check_count(len(self.labels), classes)
        updated = np.zeros((len(self.labels), classes), self.labels.dtype)
        held = np.flatnonzero(table >= 0)
        updated[:, table[held]] = self.labels[:, held]
        return replace(self, labels=updated)

    def count_classes(self, classes: int) -> Indices:
        if self.task == "regression":
            return np.array([len(self.labels)])
        return np.asarray(self.labels.sum(axis=0), dtype=np.int64)

    def unfit(self, batch: Batch) -> str | None:
        if batch.labels is None or batch.labels.task != self.task:
            return f"{_name_task(batch)}, {LABEL_FILE} has labels for {self.task}"
        return None

    def fit_labels(self, batch: Batch) -> Self:
        if batch.labels is None or batch.labels.task != "regression":
            return self
        return replace(self, labels=scale_labels(batch.labels, self.labels))


UNREAD = -2


@dataclass(frozen=True, eq=False)
class MaskedSplit(Split):
    """Images with a class for each patch, (n, patches) int64 from `fit_labels` on, -1: none. Before, no label is known.

    `known` are the classes of the patches by (image size, patch size), as places among the folder's classes; UNREAD in
    rows whose mask was not read yet.
    """

    masks: tuple[Path, ...]
    folder_classes: int
    places: Indices  # of a run's class for each of the folder's; -1: the run does not have it
    known: dict[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Files, masks: Sequence[Path], classes: int) -> Self:
        return cls(np.zeros((len(masks), 0), np.int64), files, tuple(masks), classes, np.arange(classes))

    def take_over(self, before: "MaskedSplit", same: Collection[Path]) -> None:
        """Take what `before` has read of the masks of those images that are the `same` since."""
        if before.folder_classes != self.folder_classes:
            return
        rows = {path: row for row, path in enumerate(before.paths) if path in same}
        both = [(new, rows[path]) for new, path in enumerate(self.paths) if path in rows]
        for sides, known in before.known.items():
            self.known[sides] = np.full((len(self.masks), known.shape[1]), UNREAD, np.int16)
            self.known[sides][[new for new, _ in both]] = known[[old for _, old in both]]

    def relabel(self, table: Indices, classes: int) -> Self:
        places = np.where(self.places >= 0, table[self.places], -1)
        return replace(self, places=places)

    def count_classes(self, classes: int) -> Indices:
        return np.bincount(self.labels[self.labels >= 0], minlength=classes)

    def unfit(self, batch: Batch) -> str | None:
        if batch.labels is None or not batch.labels.labels_patches:
            return f"{_name_task(batch)}, {LABEL_FILE} has masks for segmentation"
        return None

    def fit_labels(self, batch: Batch) -> Self:
        """Raises DataError for patches so small that labels would take too much memory."""
        sides = (batch.image_size, batch.patch_size)
        check_count(len(self.masks), batch.patches)
        if sides not in self.known:
            self.known.clear()
            self.known[sides] = np.full((len(self.masks), batch.patches), UNREAD, np.int16)
        found = self.known[sides]
        for row in np.flatnonzero(found[:, 0] == UNREAD).tolist():
            found[row] = self._read_mask(row, batch)
        return replace(self, labels=np.where(found >= 0, self.places[found], -1))

    def _read_mask(self, row: int, batch: Batch) -> Indices:
        """Return the classes of the patches of an image; all -1, and the image fails, if its mask cannot be read."""
        try:
            return read_mask(self.masks[row], batch.image_size, batch.patch_size, self.folder_classes)
        except DataError as error:
            self.files.failed[self.paths[row]] = str(error)
            return np.full(batch.patches, -1, np.int64)
