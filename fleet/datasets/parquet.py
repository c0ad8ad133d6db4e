"""Images in the columns of Parquet files, as the Hugging Face hub keeps data sets.

A column `image` or `img` of encoded images (bytes, or a struct with a field `bytes`); `label` or `fine_label`,
numbers or texts; where there are such, `coarse_label` and `domain`.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError, DataError
from fleet.datasets.cifar100 import coarse_labels
from fleet.datasets.imagefiles import ImageFile, keep_readable
from fleet.datasets.samples import Samples, folder_names, number_classes

_IMAGE, _LABEL, _COARSE, _DOMAIN = ("image", "img"), ("label", "fine_label"), ("coarse_label",), ("domain",)
_NO_LABEL = (None, -1)  # the hub writes -1 where labels are kept secret


def is_parquet(path: Path) -> bool:
    """Return True for a .parquet file, and for a folder that has one, also one level below."""
    return bool(_files(path))


def read_parquet(path: Path, size: int = 32) -> Samples:
    """All rows of all files together, train and test. Classes have the names that the hub notes in a file.

    Encoded images are held in memory, and decoded when asked for. Rows without a readable image or without
    a label (empty, or -1) are left out and listed in `unreadable`.

    Raises ConfigError without pyarrow (a server's, not a device's); DataError, naming the file and what it
    has, when a column is missing or of another type, or no row can be used.
    """
    tables = [_read_table(file) for file in _files(path)]
    if not tables:
        raise DataError("FV2011", f"{path}: no .parquet file")
    rows = [(table, row) for table in tables for row in range(len(table.labels))]
    labelled = [(table, row) for table, row in rows if table.labels[row] not in _NO_LABEL]
    unlabelled = tuple(f"no label: {table.name(row)}" for table, row in rows if table.labels[row] in _NO_LABEL)
    files_in_rows = [table.image(row) for table, row in labelled]
    images, good, unreadable = keep_readable(files_in_rows, size, f"{path}: no readable image with a label")
    readable = [entry for entry, is_good in zip(labelled, good, strict=True) if is_good]
    labels, classes = _classes([table.labels[row] for table, row in readable], tables[0].class_names, str(path))
    coarse = [table.coarse_labels[row] for table, row in readable if table.coarse_labels]
    domains = [table.domains[row] for table, row in readable if table.domains]
    domain_labels, domain_names = _classes(domains, tables[0].domain_names, str(path))
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=images,
        labels=labels,
        classes=classes,
        coarse_labels=_classes(coarse, (), str(path))[0] if coarse else coarse_labels(classes, labels),
        domains=domain_labels if domains else None,
        domain_names=domain_names if domains else (),
        unreadable=unlabelled + unreadable,
    )


@dataclass(frozen=True)
class _Table:
    """One file's columns; a list is empty where the file has no such column."""

    file: Path
    images: Any  # a pyarrow column of bytes
    labels: list[Any]
    coarse_labels: list[Any]
    domains: list[Any]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]

    def name(self, row: int) -> str:
        return f"{self.file}, row {row}"

    def image(self, row: int) -> ImageFile:
        def open_row() -> BinaryIO:
            return io.BytesIO(self.images[row].as_py() or b"")

        return ImageFile(Path(self.name(row)), open_row)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".parquet" else []
    return sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])


def _read_table(file: Path) -> _Table:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import compute, parquet
    except ImportError as error:
        raise ConfigError("FV2011", f'{file}: reading Parquet needs pyarrow: pip install "fedvit[server]"') from error
    try:
        schema = parquet.read_schema(file)
        names = {choice: _first(choice, schema.names) for choice in (_IMAGE, _LABEL, _COARSE, _DOMAIN)}
        for needed in (_IMAGE, _LABEL):
            if names[needed] is None:
                raise DataError("FV2011", f"{file}: no column {' or '.join(needed)}; it has {', '.join(schema.names)}")
        table = parquet.read_table(file, columns=[name for name in names.values() if name])
        columns = {
            choice: table[name].to_pylist() if name else [] for choice, name in names.items() if choice != _IMAGE
        }
        images = table[names[_IMAGE]]
        if pyarrow.types.is_struct(images.type):
            images = compute.struct_field(images, "bytes")
        if not (pyarrow.types.is_binary(images.type) or pyarrow.types.is_large_binary(images.type)):
            raise DataError(
                "FV2011", f"{file}: column {names[_IMAGE]} is {images.type}, expected bytes of encoded images"
            )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError("FV2011", f"{file}: no readable Parquet file: {error}") from error
    return _Table(
        file=file,
        images=images,
        labels=columns[_LABEL],
        coarse_labels=columns[_COARSE],
        domains=columns[_DOMAIN],
        class_names=_read_names(schema.metadata, names[_LABEL]),
        domain_names=_read_names(schema.metadata, names[_DOMAIN]),
    )


def _first(choice: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in choice if name in columns), None)


def _read_names(metadata: dict[bytes, bytes] | None, column: str | None) -> tuple[str, ...]:
    """The names of a column's numbers, as the hub's `datasets` library notes them in a file; () where it did not."""
    try:
        note = json.loads((metadata or {})[b"huggingface"])
        return tuple(map(str, note["info"]["features"][column]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _classes(values: list[Any], names: tuple[str, ...], where: str) -> tuple[Indices, tuple[str, ...]]:
    """Numbers or texts as labels 0..C-1, and what these mean."""
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
