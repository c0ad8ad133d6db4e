"""Clients' data that PFLlib or a program like it dealt out: `train/0.npz`, `train/1.npz`, ... and `test/0.npz`, ...

Each file has an array `data`, a pickled dictionary with images `x` and labels `y`. It is read without executing code.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import DataError
from fleet.datasets.arrays import Array, check_archive, check_memory, to_labels, to_pixels
from fleet.datasets.pickles import unpickle_array
from fleet.datasets.samples import ArrayImages, Samples, number_classes


def is_pfllib(path: Path) -> bool:
    """Return True for a folder with numbered .npz files in train/."""
    return bool(_files(path, TRAIN))


def read_pfllib(path: Path, size: int = 32) -> Samples:
    """All clients' images; a client is a domain, so that the partition `natural` deals them out as they were.

    Files in test/ are the official test split. Raises DataError naming the file.
    """
    files = [(file, split) for split in (TRAIN, TEST) for file in _files(path, split)]
    check_memory(path, sum(file.stat().st_size for file, _ in files))
    batches = [_read_client(file) for file, _ in files]
    if len({images.shape[1:] for images, _ in batches}) > 1:
        raise DataError("FV2008", f"{path}: images of different sizes")
    pixels = to_pixels(np.concatenate([images for images, _ in batches]), f"{path}: x")  # all have one scale
    labels, classes = number_classes(np.concatenate([labels for _, labels in batches]))
    counts = [len(images) for images, _ in batches]
    names = sorted({file.stem for file, _ in files}, key=int)
    clients = [names.index(file.stem) for file, _ in files]
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=ArrayImages(pixels, size),
        labels=labels,
        classes=classes,
        domains=np.repeat(np.array(clients, dtype=np.int64), counts),
        domain_names=tuple(names),
        official_test=np.repeat([split == TEST for _, split in files], counts) if _files(path, TEST) else None,
    )


def _files(path: Path, split: str) -> list[Path]:
    if not (path / split).is_dir():
        return []
    files = [file for file in (path / split).glob("*.npz") if file.stem.isascii() and file.stem.isdigit()]
    return sorted(files, key=lambda file: int(file.stem))


def _read_client(file: Path) -> tuple[Array, Array]:
    if "data" not in check_archive(file):
        raise DataError("FV2010", f"{file}: no array data")
    try:
        with zipfile.ZipFile(file) as archive, archive.open("data.npy") as content:
            data = unpickle_array(content)
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, DataError) as error:
        code = error.code if isinstance(error, DataError) else "FV2010"
        raise DataError(code, f"{file}: {error}") from error
    images, labels = data.get("x"), data.get("y")
    if not isinstance(images, np.ndarray) or not isinstance(labels, np.ndarray) or not images.ndim:
        raise DataError("FV2010", f"{file}: data has {', '.join(data) or 'nothing'}, expected arrays x and y")
    return images, to_labels(labels, len(images), f"{file}: y")
