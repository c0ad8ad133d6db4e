"""CIFAR-10 and CIFAR-100 as their authors publish them, for C programs or for Python.

Source: https://www.cs.toronto.edu/~kriz/cifar.html. A folder `cifar-10-batches-bin`, `cifar-10-batches-py`,
`cifar-100-binary` or `cifar-100-python`, unpacked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedvit.data.images import Indices, Pixels
from fedvit.errors import DataError
from fedvit.files import name_failure
from fleet.datasets.cifar100 import FINE
from fleet.datasets.pickles import read_pickle
from fleet.datasets.samples import ArrayImages, Samples

_CLASSES_10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE

Batch = tuple[Pixels, npt.NDArray[np.int64]]
"""A file's pixels (n, 3072) by colour, row, column, and labels (n, 1), or (n, 2) where they are coarse and fine."""


def is_cifar(path: Path) -> bool:
    """Return True for a folder with at least one of the batch files of CIFAR."""
    return _format(path) is not None


def read_cifar(path: Path, size: int = 32) -> Samples:
    """Train and test images together; CIFAR-100 with coarse labels.

    Raises DataError, naming the file, when one is missing, damaged, or has a label out of range.
    """
    kind = _format(path)
    if kind is None:
        raise DataError("FV2008", f"{path}: no CIFAR batches, expected data_batch_1 or train, with or without .bin")
    if missing := [name for name in kind.files if not (path / name).is_file()]:
        raise DataError("FV2008", f"{path}: {missing[0]} is missing, expected {', '.join(kind.files)}")
    batches = [_check_batch(path / name, kind.read(path / name, kind), kind) for name in kind.files]
    pixels = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, _SIDE, _SIDE)
    labels = np.concatenate([labels for _, labels in batches])
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=ArrayImages(pixels.transpose(0, 2, 3, 1), size),
        labels=labels[:, -1],
        classes=kind.classes,
        coarse_labels=labels[:, 0] if len(kind.label_counts) == 2 else None,
        official_test=np.repeat([name.startswith("test") for name in kind.files], [len(one) for _, one in batches]),
    )


def _check_batch(path: Path, batch: Batch, kind: "_Format") -> Batch:
    pixels, labels = batch
    if len(pixels) != len(labels):
        raise DataError("FV2008", f"{path}: {len(pixels)} images, but {len(labels)} labels")
    for column, count in enumerate(kind.label_counts):
        if len(bad := labels[(labels[:, column] < 0) | (labels[:, column] >= count), column]):
            raise DataError("FV2008", f"{path}: label {bad[0]}, expected 0..{count - 1}")
    return batch


def _read_binary(path: Path, kind: "_Format") -> Batch:
    raw = np.frombuffer(_content(path), dtype=np.uint8)
    columns = len(kind.label_counts)
    record = columns + _PIXELS
    if not len(raw) or len(raw) % record:
        raise DataError("FV2008", f"{path}: {len(raw)} bytes, expected a multiple of {record}")
    rows = raw.reshape(-1, record)
    return rows[:, columns:], rows[:, :columns].astype(np.int64)


def _read_pickled(path: Path, kind: "_Format") -> Batch:
    batch = read_pickle(path)
    if missing := [key for key in ("data", *kind.label_keys) if key not in batch]:
        raise DataError(
            "FV2008", f"{path}: no {missing[0]!r}, expected it among {', '.join(map(repr, batch)) or 'the keys'}"
        )
    pixels = batch["data"]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise DataError("FV2008", f"{path}: 'data' is {_describe(pixels)}, expected uint8 of shape (n, {_PIXELS})")
    columns = [_whole_numbers(path, key, batch[key]) for key in kind.label_keys]
    if len({len(column) for column in columns}) > 1:
        raise DataError("FV2008", f"{path}: {len(columns[0])} coarse labels, but {len(columns[1])} fine labels")
    return pixels, np.stack(columns, axis=1)


def _whole_numbers(path: Path, key: str, value: object) -> Indices:
    """A list or an array of labels, as an array."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    if isinstance(value, list) and all(type(number) is int and 0 <= number < 256 for number in value):
        return np.array(value, dtype=np.int64)
    raise DataError("FV2008", f"{path}: {key!r} is {_describe(value)}, expected a list of whole numbers of 0..255")


def _content(path: Path) -> bytes:
    with name_failure(f"{path}", DataError, "FV2008"):
        return path.read_bytes()


def _describe(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class _Format:
    files: tuple[str, ...]
    read: Callable[[Path, "_Format"], Batch]
    classes: tuple[str, ...]
    label_counts: tuple[int, ...]  # how many labels there are, of the levels in a file, coarse before fine
    label_keys: tuple[str, ...] = ()


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

_FORMATS = (
    _Format((*(f"{name}.bin" for name in _BATCHES), "test_batch.bin"), _read_binary, _CLASSES_10, (10,)),
    _Format((*_BATCHES, "test_batch"), _read_pickled, _CLASSES_10, (10,), ("labels",)),
    _Format(("train.bin", "test.bin"), _read_binary, FINE, (20, 100)),
    _Format(("train", "test"), _read_pickled, FINE, (20, 100), ("coarse_labels", "fine_labels")),
)


def _format(path: Path) -> _Format | None:
    for kind in _FORMATS:
        if any((path / name).is_file() for name in kind.files):
            return kind
    return None
