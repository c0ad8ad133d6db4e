"""A device's own images: a folder with one folder per class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedvit.data.images import Indices, Pixels, header_problem, read_image
from fedvit.data.layout import find_layout, read_tree
from fedvit.data.split import split_train_test
from fedvit.errors import DataError
from fedvit.resources import IMAGE_CACHE_BYTES

Flags = npt.NDArray[np.bool_]

_CLASS_LEVELS = 2  # train/<class>/ below the folder


class Files:
    """Images in files, decoded when asked for.

    If all of them fit into `cache_bytes`, they are decoded once and kept in memory; else they are decoded each time.
    Not thread-safe.
    """

    def __init__(self, paths: Sequence[Path], cache_bytes: int = IMAGE_CACHE_BYTES) -> None:
        self.paths = tuple(paths)
        self.failed: set[Path] = set()
        self._cache_bytes = cache_bytes
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
            into[:] = read_image(path, self._size)
        except DataError:
            self.failed.add(path)


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test images of a device."""

    labels: Indices
    files: Files

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def paths(self) -> tuple[Path, ...]:
        return self.files.paths

    @property
    def failed(self) -> set[Path]:
        """Images with a valid header that could not be decoded."""
        return self.files.failed

    def load(self, indices: Indices, size: int) -> tuple[Pixels, Flags]:
        """(images (n, size, size, 3), readable (n,)); an unreadable image is all zeros.

        The caller may change both arrays. An image that failed once is not tried again.
        """
        return self.files.load(indices, size)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceData:
    """The class folders of a device; labels are indices into `classes`."""

    folder: Path
    classes: tuple[str, ...]
    train: Split
    test: Split
    unreadable: tuple[tuple[Path, str], ...] = ()  # (image, reason)
    passed_over: tuple[Path, ...] = ()  # files that are not in a class folder, or have an unknown format

    def without_images(self) -> list[str]:
        """Classes whose folders hold no readable image; they are classes of a run nevertheless."""
        held = set(np.union1d(self.train.labels, self.test.labels).tolist())
        return [name for label, name in enumerate(self.classes) if label not in held]

    @classmethod
    def open(
        cls, folder: Path, *, test_share: float = 0.2, seed: int = 0, cache_bytes: int = IMAGE_CACHE_BYTES
    ) -> "DeviceData":
        """Index `folder`, without decoding any image.

        Without a test folder, `test_share` of each class becomes the test split, chosen by `seed`: the same folder is
        always split in the same way. Images with an unknown header are skipped and listed in `unreadable`.

        Raises DataError when the folder does not exist, holds no class folders, or no readable image to
        train with.
        """
        if not folder.is_dir():
            raise DataError(f"{folder}: {'is not a folder' if folder.exists() else 'there is no such folder'}")
        tree = read_tree(folder, _CLASS_LEVELS)
        layout = find_layout(tree, str(folder))
        used = {path for path, _ in (*layout.train, *(layout.test or ()))}
        unreadable: list[tuple[Path, str]] = []
        train_paths, train_labels = _readable(layout.train, unreadable)
        if not train_paths:
            raise DataError(_nothing_to_train(folder, layout.classes, unreadable))
        if layout.test is None:
            everything = np.arange(len(train_paths), dtype=np.int64)
            rows, test_rows = split_train_test(everything, train_labels, test_share, np.random.default_rng(seed))
            test_paths, test_labels = [train_paths[row] for row in test_rows], train_labels[test_rows]
            train_paths, train_labels = [train_paths[row] for row in rows], train_labels[rows]
        else:
            test_paths, test_labels = _readable(layout.test, unreadable)
        return cls(
            folder=folder,
            classes=layout.classes,
            train=Split(train_labels, Files(train_paths, cache_bytes)),
            test=Split(test_labels, Files(test_paths, cache_bytes)),
            unreadable=tuple(unreadable),
            passed_over=tuple(sorted(path for path in tree.everything() if path not in used)),
        )

    def relabelled(self, classes: Sequence[str]) -> "DeviceData":
        """The same images with labels that are indices into a run's `classes`.

        Raises DataError when there are images of a class that the run does not know; an empty folder of an unknown
        class is allowed.
        """
        position = {name: label for label, name in enumerate(classes)}
        held = np.union1d(self.train.labels, self.test.labels)
        if unknown := [self.classes[label] for label in held if self.classes[label] not in position]:
            more = ", ..." if len(classes) > 10 else ""
            raise DataError(
                f"{self.folder}: images in class folders that the run does not know: {', '.join(unknown)};"
                f" the run's {len(classes)} classes: {', '.join(classes[:10])}{more}"
            )
        table = np.array([position.get(name, -1) for name in self.classes], dtype=np.int64)
        return replace(
            self,
            classes=tuple(classes),
            train=Split(table[self.train.labels], self.train.files),
            test=Split(table[self.test.labels], self.test.files),
        )

    def forget(self) -> None:
        """Free the memory of decoded images, also for copies made by `relabelled`."""
        for split in (self.train, self.test):
            split.files.forget()


def _readable(files: list[tuple[Path, int]], unreadable: list[tuple[Path, str]]) -> tuple[list[Path], Indices]:
    """Paths and labels of the files with a good header; the others are added to `unreadable`."""
    paths, labels = [], []
    for path, label in files:
        if problem := header_problem(path):
            unreadable.append((path, problem))
        else:
            paths.append(path)
            labels.append(label)
    return paths, np.array(labels, dtype=np.int64)


def _nothing_to_train(folder: Path, classes: tuple[str, ...], unreadable: list[tuple[Path, str]]) -> str:
    if unreadable:
        path, reason = unreadable[0]
        return f"{folder}: none of the {len(unreadable)} images for training can be read; {path}: {reason}"
    more = ", ..." if len(classes) > 10 else ""
    return f"{folder}: no images for training in the {len(classes)} class folders ({', '.join(classes[:10])}{more})"
