"""A CSV file that lists images and their labels, with a line of names first.

Columns: `path` (or `file`, `file_name`, `filename`, `image`), relative to the CSV file; `label` (or `class`); and, if
there are such, `coarse_label`, `domain`, and `split`, in which "test" marks the official test images. In place of
`label`, `labels` holds several classes with ";" between them, `number` a number, and `mask` an image whose pixels are
places among the names in `classes.txt` beside the file: labels of other tasks.
"""

import csv
import math
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedvit.data.images import read_mask
from fedvit.data.label_file import CLASS_FILE, RESERVED, SEPARATOR, make_sets, read_class_names
from fedvit.errors import DataError
from fedvit.label_forms import LARGEST_NUMBER
from fleet.datasets.cifar100 import coarse_labels
from fleet.datasets.columns import Columns
from fleet.datasets.imagefiles import ImageFile, keep_readable
from fleet.datasets.samples import OtherLabels, Samples, folder_names, mark_tests
from fleet.datasets.tables import number_labels

MOST_ROWS = 20_000_000
_SHARE_SIDE = 64
"""Side to which masks are resized, to see how much of an image each class has."""

_USUAL = {
    "image": ("path", "file", "file_name", "filename", "image"), "label": ("label", "class"),
    "coarse_label": ("coarse_label",), "domain": ("domain",), "split": ("split",), "labels": ("labels",),
    "number": ("number",), "mask": ("mask",),
}  # fmt: skip


_LABELS = ("label", "labels", "number", "mask")
"""Columns that can hold the label: the one that is named, else the first of these in the file."""


def is_manifest(path: Path) -> bool:
    """Return True for a .csv file."""
    return path.is_file() and path.suffix == ".csv"


def read_manifest(path: Path, size: int = 32, columns: Columns | None = None) -> Samples:
    """Open the images that a CSV file lists; those without a good header or label are left out and listed.

    Raises DataError, naming the file and the line, for a path outside of the file's folder, a missing column, or a file
    without a readable image.
    """
    rows = _read_rows(path)
    chosen = _choose_columns(path, [*rows[0]] if rows else [], columns or Columns())
    purpose = next(one for one in _LABELS if one in chosen)
    is_set = purpose == "labels"  # an empty one says that an image has no class
    labelled = [(line, row) for line, row in enumerate(rows, start=2) if is_set or row[chosen[purpose]]]
    unlabelled = tuple(
        f"no label: {path}, line {line}" for line, row in enumerate(rows, 2) if not (is_set or row[chosen[purpose]])
    )
    folder = path.parent.resolve()
    files = [_open_image(path, folder, line, row[chosen["image"]]) for line, row in labelled]
    images, good, unreadable = keep_readable(files, size, f"{path}: no readable image with a label")
    readable = [entry for entry, is_good in zip(labelled, good, strict=True) if is_good]
    kept = [row for _, row in readable]

    def read(purpose: str) -> list[str]:
        return [row[chosen[purpose]] for row in kept] if purpose in chosen else []

    other = _read_other(path, purpose, chosen[purpose], readable)
    if other:
        classes, values = other
        labels = values.choose_strata()
    else:
        labels, classes = number_labels(read("label"), (), str(path))
    coarse, domains = read("coarse_label"), read("domain")
    domain_labels, domain_names = number_labels([*domains], (), str(path))
    return Samples(
        dataset=path.resolve().parent.name,
        size=size,
        images=images,
        labels=labels,
        classes=classes,
        coarse_labels=number_labels([*coarse], (), str(path))[0]
        if coarse
        else None
        if other
        else coarse_labels(classes, labels),
        domains=domain_labels if domains else None,
        domain_names=domain_names if domains else (),
        official_test=mark_tests([split == "test" for split in read("split")]),
        unreadable=unlabelled + unreadable,
        other=other[1] if other else None,
    )


def _read_other(
    path: Path, purpose: str, column: str, rows: list[tuple[int, dict[str, str]]]
) -> tuple[tuple[str, ...], OtherLabels] | None:
    """Read classes and labels of another task; None for a column of one class. Raises DataError, naming the line."""
    if purpose == "label":
        return None
    if purpose == "labels":
        sets = [tuple(sorted({name.strip() for name in row[column].split(SEPARATOR)} - {""})) for _, row in rows]
        classes = tuple(sorted({name for names in sets for name in names}))
        if not classes:
            raise DataError("FV2008", f"{path}: no image has a class in column {column}")
        return classes, OtherLabels(task="multi_label", values=make_sets(sets, classes))
    if purpose == "mask":
        return _read_masks(path, [(line, row[column]) for line, row in rows])
    if column in RESERVED:
        raise DataError("FV2011", f"{path}: devices would not read column {column} as numbers; give it another name")
    values = np.array([_read_number(path, line, column, row[column]) for line, row in rows]).reshape(-1, 1)
    return folder_names([column]), OtherLabels(task="regression", values=values)


def _read_number(path: Path, line: int, column: str, cell: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        raise DataError(
            "FV2008", f"{path}, line {line}: {column} is {cell!r}, expected a number of at most {LARGEST_NUMBER:g}"
        )
    return number


def _read_masks(path: Path, cells: list[tuple[int, str]]) -> tuple[tuple[str, ...], OtherLabels]:
    """Read which classes the masks have. Raises DataError, naming the line, for one that cannot be read."""
    classes = read_class_names(path.parent / CLASS_FILE)
    masks, shares = [], np.zeros((len(cells), len(classes)), np.float32)
    for place, (line, cell) in enumerate(cells):
        masks.append(_find_file(path, path.parent.resolve(), line, cell))
        try:
            labels = read_mask(masks[-1], _SHARE_SIDE, 1, len(classes))
        except DataError as error:
            raise DataError("FV2008", f"{path}, line {line}: {error}") from error
        shares[place] = np.bincount(labels[labels >= 0], minlength=len(classes)) / labels.size
    return classes, OtherLabels(task="segmentation", values=shares, masks=masks)


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            rows = list(islice(reader, MOST_ROWS + 1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError("FV2008", f"{path}: no readable CSV file: {error}") from error
    if len(rows) > MOST_ROWS:
        raise DataError("FV2008", f"{path}: more than {MOST_ROWS} lines")
    long = next((line for line, row in enumerate(rows, start=2) if None in row), None)
    if long is not None:
        raise DataError("FV2008", f"{path}, line {long}: more cells than the first line has names")
    return rows


def _choose_columns(path: Path, names: list[str], columns: Columns) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for purpose, usual in _USUAL.items():
        asked = getattr(columns, purpose, None)
        name = asked or next((name for name in usual if name in names), None)
        if (asked and asked not in names) or (name is None and purpose == "image"):
            wanted = asked or " or ".join(usual)
            raise DataError("FV2011", f"{path}: no column {wanted}; it has {', '.join(names) or 'no line of names'}")
        if name is not None:
            chosen[purpose] = name
    if not any(purpose in chosen for purpose in _LABELS):
        wanted = " or ".join(_USUAL["label"])
        raise DataError("FV2011", f"{path}: no column {wanted}; it has {', '.join(names) or 'no line of names'}")
    named = next((purpose for purpose in _LABELS if getattr(columns, purpose)), None)
    return {purpose: name for purpose, name in chosen.items() if named in (None, purpose) or purpose not in _LABELS}


def _find_file(path: Path, folder: Path, line: int, name: str) -> Path:
    """Raises DataError for a path that leads out of the folder, also through a link."""
    file = folder / name
    if "\0" in name or not file.resolve().is_relative_to(folder):
        raise DataError("FV2009", f"{path}, line {line}: refused, {name!r} is outside of the folder")
    return file


def _open_image(path: Path, folder: Path, line: int, name: str) -> ImageFile:
    file = _find_file(path, folder, line, name)

    def open_file() -> BinaryIO:
        return file.open("rb")

    return ImageFile(file, open_file)
