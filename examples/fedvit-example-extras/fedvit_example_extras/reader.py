"""A reader of data sets: gray images in one file, one row of bytes each, the label first."""

from pathlib import Path

import numpy as np

from fedvit.errors import DataError
from fleet.datasets import DatasetReader
from fleet.datasets.samples import ArrayImages, Samples, number_classes

SIDE = 12


def is_raw(path: Path) -> bool:
    return path.is_file() and path.suffix == ".raw12"


def read_raw(path: Path, size: int) -> Samples:
    """Read a file. Raises DataError when it does not have whole rows."""
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % (1 + SIDE**2):
        raise DataError("FV2010", f"{path}: {len(content)} bytes, expected rows of {1 + SIDE**2}")
    rows = content.reshape(-1, 1 + SIDE**2)
    labels, classes = number_classes(rows[:, 0])
    images = ArrayImages(rows[:, 1:].reshape(-1, SIDE, SIDE), size)
    return Samples(dataset=path.stem, size=size, images=images, labels=labels, classes=classes)


def write_example(folder: Path) -> Path:
    """Write a small data set, for the contract."""
    path = folder / "example.raw12"
    labels = np.arange(41, dtype=np.uint8)[:, None] % 4
    pixels = np.random.default_rng(0).integers(0, 256, (41, SIDE**2), dtype=np.uint8)
    np.hstack([labels, pixels]).tofile(path)
    return path


READER = DatasetReader(is_raw, read_raw, write_example=write_example)
