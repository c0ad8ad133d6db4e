"""Images in the columns of Arrow tables, which Parquet files and saved data sets of the Hugging Face library hold.

An image is encoded, as bytes or as a struct with a field `bytes`. Labels are numbers or texts.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import DataError
from fleet.datasets.cifar100 import coarse_labels
from fleet.datasets.columns import Columns
from fleet.datasets.imagefiles import ImageFile, keep_readable
from fleet.datasets.samples import Samples, folder_names, mark_tests, number_classes

_USUAL = {
    "image": ("image", "img"), "label": ("label", "fine_label"), "coarse_label": ("coarse_label",),
    "domain": ("domain",),
}  # fmt: skip
"""Names of columns, where the user names none."""
_NOTED = {"image": "Image", "label": "ClassLabel"}
"""Kinds of columns that the Hugging Face library notes, with which a column of another name is found."""
_NO_LABEL = (None, -1)  # the hub writes -1 where labels are kept secret


@dataclass(frozen=True)
class ImageTable:
    """One file's columns; a list is empty where the file has no such column."""

    file: Path
    images: Any  # a pyarrow column of bytes
    labels: list[Any]
    coarse_labels: list[Any]
    domains: list[Any]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    is_test: bool  # the official test split

    def name(self, row: int) -> str:
        """Name of a row, for messages."""
        return f"{self.file}, row {row}"

    def image(self, row: int) -> ImageFile:
        """An image that is decoded when asked for."""

        def open_row() -> BinaryIO:
            return io.BytesIO(self.images[row].as_py() or b"")

        return ImageFile(Path(self.name(row)), open_row)


def join_tables(path: Path, tables: Sequence[ImageTable], size: int) -> Samples:
    """All rows of all tables together. Classes have the names that the hub notes in a file.

    Rows without a readable image or without a label (empty, or -1) are left out and listed in `unreadable`. Raises
    DataError, naming the file, when no row can be used.
    """
    rows = [(table, row) for table in tables for row in range(len(table.labels))]
    labelled = [(table, row) for table, row in rows if table.labels[row] not in _NO_LABEL]
    unlabelled = tuple(f"no label: {table.name(row)}" for table, row in rows if table.labels[row] in _NO_LABEL)
    files_in_rows = [table.image(row) for table, row in labelled]
    images, good, unreadable = keep_readable(files_in_rows, size, f"{path}: no readable image with a label")
    readable = [entry for entry, is_good in zip(labelled, good, strict=True) if is_good]
    labels, classes = number_labels([table.labels[row] for table, row in readable], tables[0].class_names, str(path))
    coarse = [table.coarse_labels[row] for table, row in readable if table.coarse_labels]
    domains = [table.domains[row] for table, row in readable if table.domains]
    domain_labels, domain_names = number_labels(domains, tables[0].domain_names, str(path))
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=images,
        labels=labels,
        classes=classes,
        coarse_labels=number_labels(coarse, (), str(path))[0] if coarse else coarse_labels(classes, labels),
        domains=domain_labels if domains else None,
        domain_names=domain_names if domains else (),
        official_test=mark_tests([table.is_test for table, _ in readable]),
        unreadable=unlabelled + unreadable,
    )


def choose_columns(file: Path, schema: Any, columns: Columns) -> dict[str, str]:
    """Choose the columns of a file that are read, by purpose. Raises DataError naming one that is missing."""
    noted = _read_features(schema.metadata)
    chosen: dict[str, str] = {}
    for purpose, usual in _USUAL.items():
        asked = getattr(columns, purpose)
        if asked is not None and asked not in schema.names:
            raise DataError("FV2011", f"{file}: no column {asked!r} for {purpose}; it has {', '.join(schema.names)}")
        name = asked or next((name for name in usual if name in schema.names), None)
        of_kind = [name for name, feature in noted.items() if feature == _NOTED.get(purpose, "")]
        if name is None and len(of_kind) == 1 and of_kind[0] in schema.names:
            [name] = of_kind
        if name is None and purpose in ("image", "label"):
            raise DataError(
                "FV2011",
                f"{file}: no column {' or '.join(usual)}; it has {', '.join(schema.names)}; name it with"
                f" {purpose}=COLUMN",
            )
        if name is not None:
            chosen[purpose] = name
    return chosen


def make_table(file: Path, table: Any, chosen: dict[str, str], *, is_test: bool) -> ImageTable:
    """Take the chosen columns of a pyarrow table. Raises DataError when the images are not bytes."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import compute

    images = table[chosen["image"]]
    if pyarrow.types.is_struct(images.type) and images.type.get_field_index("bytes") >= 0:
        images = compute.struct_field(images, "bytes")
    if not (pyarrow.types.is_binary(images.type) or pyarrow.types.is_large_binary(images.type)):
        raise DataError(
            "FV2011", f"{file}: column {chosen['image']} is {images.type}, expected bytes of encoded images"
        )
    values = {
        purpose: table[chosen[purpose]].to_pylist() if purpose in chosen else [] for purpose in _USUAL
        if purpose != "image"
    }  # fmt: skip
    metadata = table.schema.metadata
    return ImageTable(
        file=file,
        images=images,
        labels=values["label"],
        coarse_labels=values["coarse_label"],
        domains=values["domain"],
        class_names=_read_names(metadata, chosen["label"]),
        domain_names=_read_names(metadata, chosen.get("domain")),
        is_test=is_test,
    )


def number_labels(values: list[Any], names: tuple[str, ...], where: str) -> tuple[Indices, tuple[str, ...]]:
    """Numbers or texts as labels 0..C-1, and their names. Raises DataError for other values."""
    kinds = {type(value) for value in values}
    if kinds <= {str}:
        present = sorted(set(values))
        position = {name: label for label, name in enumerate(present)}
        return np.array([position[value] for value in values], dtype=np.int64), folder_names(present)
    if kinds != {int}:
        types = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise DataError("FV2011", f"{where}: labels of type {types}, expected whole numbers, or texts")
    labels = np.array(values, dtype=np.int64)
    if not names:
        return number_classes(labels)
    if len(bad := labels[(labels < 0) | (labels >= len(names))]):
        raise DataError("FV2008", f"{where}: label {bad[0]}, expected 0..{len(names) - 1}")
    return labels, folder_names(names)


def _read_features(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    """Kind of each column, as the hub's `datasets` library notes it in a file; empty where it did not."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        return {str(name): str(feature["_type"]) for name, feature in features.items() if "_type" in feature}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _read_names(metadata: dict[bytes, bytes] | None, column: str | None) -> tuple[str, ...]:
    """The names of a column's numbers, as the library notes them; () where it did not."""
    try:
        note = json.loads((metadata or {})[b"huggingface"])
        return tuple(map(str, note["info"]["features"][column]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()
