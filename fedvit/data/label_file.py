"""A device's own images with labels of other tasks than one class each: `labels.csv` beside the images.

The first line names the columns: `path`, relative to the file, and either `labels`, the classes of an image with ";"
between them (empty: none), or `mask`, an image whose pixels are places in `classes.txt`, or a column of any other name,
with a number. With a column `split`, images marked "test" test. This module uses numpy only, as it runs on devices.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedvit.data.images import Floats
from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import DataError
from fedvit.label_forms import LARGEST_NUMBER, OtherTask

LABEL_FILE = "labels.csv"
"""The file that makes a folder one of these."""
CLASS_FILE = "classes.txt"
"""Names of the classes of masks, one in a line: the first is that of pixels with value 0."""
SETS = "labels"
MASKS = "mask"
SEPARATOR = ";"
MOST_FILE_BYTES = 64 << 20
MOST_ROWS = 1_000_000
MOST_CLASSES = 1000
MOST_MASKED_CLASSES = 255
_KNOWN = ("path", "split")


class LabelledPath(NamedTuple):
    """One line of a label file."""

    path: Path
    label: tuple[str, ...] | float | Path  # of a segmentation its mask
    part: Literal["train", "test"] | None  # None: the file has no column `split`

    @property
    def files(self) -> set[Path]:
        """The image, and its mask if it has one."""
        return {self.path, self.label} if isinstance(self.label, Path) else {self.path}


class LabelFile(NamedTuple):
    """A label file as it was read."""

    task: OtherTask
    classes: tuple[str, ...]  # of a regression the name of its column
    rows: tuple[LabelledPath, ...]  # sorted by path


def has_label_file(folder: Path) -> bool:
    """Return whether a folder has labels of another task than one class for each image."""
    return (folder / LABEL_FILE).is_file()


def read_label_file(folder: Path) -> LabelFile:
    """Read a folder's labels. Raises DataError, naming file and line, for one that cannot be used."""
    file = folder / LABEL_FILE
    names, lines = _read_lines(file)
    columns = [name for name in names if name not in _KNOWN]
    if "path" not in names or len(columns) != 1:
        raise DataError(
            "FV2491",
            f"{file}: its columns are {', '.join(names)[:200]}; expected path, and labels, mask or one of numbers",
        )
    [column] = columns
    rows, seen = [], set[Path]()
    for line, cells in lines:
        where, row = f"{file}, line {line}", dict(zip(names, cells, strict=False))
        path = row.get("path", "")
        place = Path(path)
        if not is_inside(path) or place in seen:
            raise DataError("FV2491", f"{where}: path {path[:200]!r} is empty, named twice, or outside of the folder")
        seen.add(place)
        part: Literal["train", "test"] | None = None
        if "split" in names:
            part = TEST if row.get("split") == TEST else TRAIN  # type: ignore[assignment]
        label = _read_label(row.get(column, ""), column, where)
        rows.append(LabelledPath(folder / path, folder / label if isinstance(label, Path) else label, part))
    if not rows:
        raise DataError("FV2491", f"{file}: it lists no image")
    rows.sort()
    if column == MASKS:
        return LabelFile("segmentation", read_class_names(folder / CLASS_FILE), tuple(rows))
    if column != SETS:
        return LabelFile("regression", (column,), tuple(rows))
    classes = tuple(sorted({name for row in rows if isinstance(row.label, tuple) for name in row.label}))
    if len(classes) > MOST_CLASSES:
        raise DataError("FV2491", f"{file}: {len(classes)} classes, at most {MOST_CLASSES} can be")
    return LabelFile("multi_label", classes, tuple(rows))


def read_class_names(file: Path) -> tuple[str, ...]:
    """Read the names of the classes of masks. Raises DataError for a file that cannot be used."""
    try:
        with file.open(encoding="utf-8-sig") as opened:
            names = tuple(line.strip() for line in opened.read(MOST_MASKED_CLASSES * 300).splitlines())
    except OSError as error:
        raise DataError("FV1702", f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError("FV2491", f"{file}: no readable text: {error}") from error
    if odd := [name for name in names if not name or not name.isprintable() or len(name) > 255]:
        raise DataError("FV2491", f"{file}: class {odd[0][:200]!r} is empty, not printable or too long")
    if not 1 < len(set(names)) == len(names) <= MOST_MASKED_CLASSES:
        raise DataError("FV2491", f"{file}: {len(names)} classes; expected 2 to {MOST_MASKED_CLASSES} different ones")
    return names


def is_inside(path: str) -> bool:
    """Return whether a path names something below the folder that it is relative to."""
    place = Path(path)
    return bool(place.parts) and "\0" not in path and not place.is_absolute() and ".." not in place.parts


def make_sets(labels: Sequence[Any], classes: Sequence[str]) -> Floats:
    """Return labels as a model of a multi-label task learns them, (n, classes): 1 for each class of an image."""
    place = {name: index for index, name in enumerate(classes)}
    made = np.zeros((len(labels), len(classes)), np.float32)
    for row, label in enumerate(labels):
        made[row, [place[name] for name in label]] = 1.0
    return made


def write_label_file(folder: Path, column: str, rows: Iterable[tuple[str, str, str]]) -> None:
    """Write a label file: path, part and label of each image."""
    with (folder / LABEL_FILE).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("path", "split", column))
        writer.writerows(rows)


def _read_label(cell: str, column: str, where: str) -> tuple[str, ...] | float | Path:
    if column == MASKS:
        if not is_inside(cell):
            raise DataError("FV2491", f"{where}: mask {cell[:200]!r} is empty, or outside of the folder")
        return Path(cell)
    if column == SETS:
        names = tuple(sorted({name.strip() for name in cell.split(SEPARATOR)} - {""}))
        if odd := [name for name in names if not name.isprintable() or len(name) > 255]:
            raise DataError(
                "FV2491", f"{where}: class {odd[0][:200]!r} is not printable, or longer than 255 characters"
            )
        return names
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        raise DataError(
            "FV2491", f"{where}: {column} is {cell[:200]!r}, expected a number of at most {LARGEST_NUMBER:g}"
        )
    return number


def _read_lines(file: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        if file.stat().st_size > MOST_FILE_BYTES:
            raise DataError("FV2491", f"{file}: more than {MOST_FILE_BYTES} bytes")
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened, strict=True)
            names = next(reader, [])
            lines = [(reader.line_num, cells) for cells in islice(reader, MOST_ROWS + 1) if cells]
    except OSError as error:
        raise DataError("FV1702", f"cannot read {file}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("FV2491", f"{file}: no readable CSV file: {error}") from error
    if len(lines) > MOST_ROWS:
        raise DataError("FV2491", f"{file}: more than {MOST_ROWS} images")
    if len(set(names)) < len(names):
        raise DataError("FV2491", f"{file}: two columns have the same name")
    return names, lines
