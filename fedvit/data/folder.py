"""A device's own data: a folder with one folder of images per class, one of text (`fedvit.data.text`), or images with
other labels (`fedvit.data.label_file`)."""

import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.data.frigate import is_frigate_folder, read_frigate
from fedvit.data.images import DECODED_BYTES, Indices, header_problem, is_image_name
from fedvit.data.label_file import LABEL_FILE, LabelFile, check_count, has_label_file, make_sets, read_label_file
from fedvit.data.layout import PARTITION_FILE, TEST, TRAIN, Found, Layout, read_class_folders
from fedvit.data.split import DEFAULT_SPLIT, KeptSplit, RandomSplit
from fedvit.data.splits import CheckedFile as CheckedFile
from fedvit.data.splits import Files as Files
from fedvit.data.splits import LabelledSplit as LabelledSplit
from fedvit.data.splits import MaskedSplit as MaskedSplit
from fedvit.data.splits import Split as Split
from fedvit.data.splits import Stamp as Stamp
from fedvit.data.splits import TextSplit as TextSplit
from fedvit.data.text import SETTINGS, is_text_folder, read_texts, text_file
from fedvit.errors import DataError
from fedvit.program import Batch
from fedvit.resources import IMAGE_CACHE_BYTES
from fedvit.tensors import Array

_Labelled = tuple[list[Path], Indices]

NEW_CLASS = "of a class that the run does not have"
UNKNOWN_TYPE = "of an unknown type"
MISPLACED = "not directly in a class folder"


READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Found]], ...] = ((is_frigate_folder, read_frigate),)
"""Readers of folders that have no class folders: whether one is for a folder, and what it finds there."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceData:
    """The class folders of a device, or its text; labels are indices into `classes`."""

    folder: Path
    classes: tuple[str, ...]  # those with at least one readable image
    train: Split
    test: Split
    empty: tuple[str, ...] = ()  # class folders without a readable image: no classes yet
    unusable: tuple[tuple[Path, str], ...] = ()  # (image, reason)
    passed_over: tuple[Path, ...] = ()  # files that are not in a class folder, or have an unknown format
    has_test_folder: bool = False
    checked: Mapping[Path, CheckedFile]
    found: Found | None = None  # None: text

    @property
    def counts(self) -> tuple[tuple[str, ...], int, int]:
        """Count the training and test images of each class, for a device's hello."""
        return self.classes, len(self.train), len(self.test)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        split: RandomSplit | KeptSplit = DEFAULT_SPLIT,
        cache_bytes: int = IMAGE_CACHE_BYTES,
        decoded_bytes: int = DECODED_BYTES,
        classes: Collection[str] | None = None,
        before: "DeviceData | None" = None,
    ) -> "DeviceData":
        """Index `folder`, without decoding any image.

        Without a test folder, `split` chooses the images that test. Images with an unknown header and images of other
        than the given `classes` are skipped and listed in `unusable`. A class folder without a readable image is not a
        class: it is listed in `empty`.

        `before` is an earlier index of the same folder: of files that are the same since, nothing is read again, and
        `before` itself is returned if nothing has changed.

        Raises DataError when the folder does not exist, holds no class folders, or no readable image to
        train with.
        """
        if not folder.is_dir():
            raise DataError(
                "FV1402", f"{folder}: {'is not a folder' if folder.exists() else 'there is no such folder'}"
            )
        if is_text_folder(folder):
            return cls._open_text(folder, before)
        if has_label_file(folder):
            return cls._open_labelled(folder, split, (cache_bytes, decoded_bytes), classes, before)
        found = next((read for is_its, read in READERS if is_its(folder)), read_class_folders)(folder)
        layout = found.layout
        images = [*layout.train, *(layout.test or ())]
        checked = _check_files([path for path, _ in images], decoded_bytes, before.checked if before else {})
        held = {layout.classes[label] for path, label in images if checked[path].problem is None}
        known = tuple(name for name in layout.classes if name in held and (classes is None or name in classes))
        empty = tuple(name for name in layout.classes if name not in held)
        if before and (before.checked, before.classes, before.empty, before.found) == (checked, known, empty, found):
            return before
        unusable = list(found.unusable)
        parts = _divide(folder, layout, known, checked, split, unusable)
        train, test = (Split(labels, Files(paths, cache_bytes, decoded_bytes)) for paths, labels in parts)
        if before:
            same = {path for path, now in checked.items() if before.checked.get(path) == now}
            train.files.take_over(before.train.files, same)
            test.files.take_over(before.test.files, same)
        return cls(
            folder=folder,
            classes=known,
            train=train,
            test=test,
            empty=empty,
            unusable=tuple(unusable),
            passed_over=found.passed_over,
            found=found,
            has_test_folder=layout.test is not None,
            checked=checked,
        )

    @classmethod
    def _open_labelled(
        cls,
        folder: Path,
        split: RandomSplit | KeptSplit,
        limits: tuple[int, int],  # cache, decoded
        classes: Collection[str] | None,
        before: "DeviceData | None",
    ) -> "DeviceData":
        table = read_label_file(folder)
        status = os.stat(folder / LABEL_FILE)
        masks = [row.label for row in table.rows if isinstance(row.label, Path)]
        paths = [*(row.path for row in table.rows), *masks]
        checked = _check_files(paths, limits[1], before.checked if before else {})
        checked[folder / LABEL_FILE] = CheckedFile(Stamp(status.st_size, status.st_mtime_ns), None)
        usable, unusable = _choose_labelled(table, checked, classes)
        if not usable:
            raise DataError("FV1403", f"{folder}: none of the {len(table.rows)} images of {LABEL_FILE} can be used")
        known = table.classes
        if table.task == "multi_label":
            held = {name for place in usable for name in _list_names(table.rows[place].label)}
            known = tuple(name for name in table.classes if name in held)
            check_count(len(usable), len(known))
        if before and (before.checked, before.classes) == (checked, known):
            return before
        has_tests = any(table.rows[place].part for place in usable)
        tests = np.array([table.rows[place].part == TEST for place in usable], np.bool_)
        if not has_tests:
            names = [str(table.rows[place].path.relative_to(folder)) for place in usable]
            tests = split.choose_tests(names, np.zeros(len(usable), np.int64))
        if tests.all():
            raise DataError("FV1403", f"{folder}: all {len(usable)} images are for testing, none is for training")

        def make(mine: list[int], old: Split | None) -> Split:
            rows = [table.rows[place] for place in mine]
            labels, files = [row.label for row in rows], Files([row.path for row in rows], *limits)
            same: set[Path] = set()
            if before and old:
                unchanged = {path for path, now in checked.items() if before.checked.get(path) == now}
                same = {row.path for row in rows if row.files <= unchanged}
                files.take_over(old.files, same)
            if table.task == "segmentation":
                masked = MaskedSplit.of(files, [label for label in labels if isinstance(label, Path)], len(known))
                if isinstance(old, MaskedSplit):
                    masked.take_over(old, same)
                return masked
            numbers = make_sets(labels, known) if table.task == "multi_label" else _make_numbers(labels)
            return LabelledSplit(numbers, files, table.task)

        return cls(
            folder=folder,
            classes=known,
            train=make(list(compress(usable, ~tests)), before.train if before else None),
            test=make(list(compress(usable, tests)), before.test if before else None),
            unusable=tuple(unusable),
            has_test_folder=has_tests,
            checked=checked,
        )

    @classmethod
    def _open_text(cls, folder: Path, before: "DeviceData | None") -> "DeviceData":
        files = [file for part in (TRAIN, TEST) if (file := text_file(folder, part)).exists()]
        stamps = {file: os.stat(file) for file in (folder / SETTINGS, *files)}
        checked = {file: CheckedFile(Stamp(now.st_size, now.st_mtime_ns), None) for file, now in stamps.items()}
        if before and before.checked == checked:
            return before
        texts = read_texts(folder)
        return cls(
            folder=folder,
            classes=texts.classes,
            train=TextSplit.of(texts.train, [text_file(folder, TRAIN)]),
            test=TextSplit.of(texts.test, files[1:]),
            has_test_folder=True,  # a text is never split here
            checked=checked,
        )

    def relabel(self, classes: Sequence[str]) -> "DeviceData":
        """The same images with labels that are indices into a run's `classes`.

        Raises DataError when there are images of a class that the run does not know.
        """
        position = {name: label for label, name in enumerate(classes)}
        both = self.train.count_classes(len(self.classes)) + self.test.count_classes(len(self.classes))
        held = np.flatnonzero(both)
        if unknown := [self.classes[label] for label in held if self.classes[label] not in position]:
            more = ", ..." if len(classes) > 10 else ""
            what = "characters" if isinstance(self.train, TextSplit) else "images in class folders"
            what = f"labels in {LABEL_FILE}" if isinstance(self.train, LabelledSplit) else what
            raise DataError(
                "FV1404",
                f"{self.folder}: {what} that the run does not know: {', '.join(unknown)};"
                f" the run's {len(classes)} classes: {', '.join(classes[:10])}{more}",
            )
        table = np.array([position.get(name, -1) for name in self.classes], dtype=np.int64)
        train, test = (part.relabel(table, len(classes)) for part in (self.train, self.test))
        return replace(self, classes=tuple(classes), train=train, test=test)

    def check_fits(self, batch: Batch) -> None:
        """Raises DataError when the batches of a run's Program cannot be made of this folder."""
        if why := self.train.unfit(batch):
            raise DataError("FV1402", f"{self.folder}: {why}")

    def fit_to(self, batch: Batch) -> "DeviceData":
        """The same images with the labels that a model of a run's task learns. Raises DataError as `check_fits`."""
        self.check_fits(batch)
        if batch.labels is None:
            return self
        train, test = (part.fit_labels(batch) for part in (self.train, self.test))
        return replace(self, train=train, test=test)

    def forget(self) -> None:
        """Free the memory of decoded images, also for copies made by `relabelled`."""
        for split in (self.train, self.test):
            split.files.forget()

    def problems(self) -> list[tuple[Path, str]]:
        """Every file that is not used, with the reason: also images that could not be decoded so far."""
        # copied in one step, since a task in another thread may add to it
        failed = self.train.files.failed.copy() | self.test.files.failed.copy()
        return [*self.unusable, *failed.items(), *((path, why_passed_over(path)) for path in self.passed_over)]


def why_passed_over(path: Path) -> str:
    """Reason why a file, or a folder inside a class folder, is not used.

    >>> why_passed_over(Path("cat/IMG_1.HEIC")), why_passed_over(Path("0.png"))
    ('of an unknown type: .heic', 'not directly in a class folder')
    """
    if is_image_name(path.name) or path.is_dir():
        return MISPLACED
    return f"{UNKNOWN_TYPE}: {path.suffix.lower() or 'without an extension'}"


def _check_files(
    paths: Sequence[Path], decoded_bytes: int, before: Mapping[Path, CheckedFile]
) -> dict[Path, CheckedFile]:
    """The files with their stamps; headers are read of those only that have another stamp than `before`."""
    checked = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError as error:
            checked[path] = CheckedFile(None, error.strerror or str(error))
            continue
        stamp = Stamp(status.st_size, status.st_mtime_ns)
        known = before.get(path)
        if known and known.stamp == stamp:
            checked[path] = known
        elif not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            checked[path] = CheckedFile(stamp, "not a regular file")
        elif not status.st_size:
            checked[path] = CheckedFile(stamp, "an empty file")
        else:
            checked[path] = CheckedFile(stamp, header_problem(path, decoded_bytes=decoded_bytes))
    return checked


def _choose_labelled(
    table: LabelFile, checked: Mapping[Path, CheckedFile], classes: Collection[str] | None
) -> tuple[list[int], list[tuple[Path, str]]]:
    """Choose the rows of a label file with a good header and known classes; list the others with the reason."""
    usable: list[int] = []
    unusable: list[tuple[Path, str]] = []
    for place, row in enumerate(table.rows):
        names = table.classes if table.task == "regression" else _list_names(row.label)
        is_new = classes is not None and any(name not in classes for name in names)
        problem = checked[row.path].problem
        if isinstance(row.label, Path) and (unread := checked[row.label].problem):
            problem = f"its mask {row.label.name}: {unread}"
        if reason := problem or (NEW_CLASS if is_new else None):
            unusable.append((row.path, reason))
        else:
            usable.append(place)
    return usable, unusable


def _list_names(label: tuple[str, ...] | float | Path) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else ()


def _make_numbers(labels: Sequence[Any]) -> Array:
    return np.array(labels, np.float64).reshape(-1, 1)  # float32 only once they are scaled to the run's range


def _divide(
    folder: Path,
    layout: Layout[Path],
    classes: Sequence[str],
    checked: Mapping[Path, CheckedFile],
    split: RandomSplit | KeptSplit,
    unusable: list[tuple[Path, str]],
) -> tuple[_Labelled, _Labelled]:
    """Divide the usable files into those to train and to test with; the others are added to `unusable`."""
    labels = {layout.classes.index(name): label for label, name in enumerate(classes)}
    paths, known = train = _list_usable(layout.train, labels, checked, unusable)
    if not paths:
        raise DataError("FV1403", _nothing_to_train(folder, layout.classes, unusable))
    if layout.test is not None:
        return train, _list_usable(layout.test, labels, checked, unusable)
    tests = split.choose_tests([str(path.relative_to(folder)) for path in paths], known)
    if tests.all():
        raise DataError("FV1403", f"{folder}: all {len(paths)} images are for testing, none is for training")
    return (list(compress(paths, ~tests)), known[~tests]), (list(compress(paths, tests)), known[tests])


def _list_usable(
    files: Sequence[tuple[Path, int]],
    labels: Mapping[int, int],
    checked: Mapping[Path, CheckedFile],
    unusable: list[tuple[Path, str]],
) -> _Labelled:
    """Paths and new labels of the files with a good header and a known label; the others are added to `unusable`."""
    paths, kept = [], []
    for path, label in files:
        if reason := checked[path].problem or (None if label in labels else NEW_CLASS):
            unusable.append((path, reason))
        else:
            paths.append(path)
            kept.append(labels[label])
    return paths, np.array(kept, dtype=np.int64)


def _nothing_to_train(folder: Path, classes: tuple[str, ...], unusable: list[tuple[Path, str]]) -> str:
    if unusable:
        path, reason = unusable[0]
        return f"{folder}: none of the {len(unusable)} images for training can be read; {path}: {reason}"
    for place in (folder, *(folder / name for name in classes)):
        if (place / PARTITION_FILE).is_file() and (device := place / "device-0").is_dir():
            return f"{folder}: holds the folders of several devices; choose one of them, for instance {device}"
    more = ", ..." if len(classes) > 10 else ""
    return f"{folder}: no images for training in the {len(classes)} class folders ({', '.join(classes[:10])}{more})"
