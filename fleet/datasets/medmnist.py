"""MedMNIST: twelve sets of small medical images, each one .npz file.

Source: Yang et al., "MedMNIST v2", Scientific Data 2023. Arrays train_images (n, s, s) gray or (n, s, s, 3),
train_labels (n, 1), and the same for val and test.
"""

from pathlib import Path

import numpy as np

from fedvit.data.images import Indices, Pixels
from fedvit.errors import DataError
from fleet.datasets.arrays import open_archive
from fleet.datasets.samples import Samples, join_batches

_SPLITS = ("train", "val", "test")


def is_medmnist(path: Path) -> bool:
    """Return True for a .npz file."""
    return path.is_file() and path.suffix == ".npz"


def read_medmnist(path: Path, size: int = 32) -> Samples:
    """Images of train, val and test together; classes are numbers.

    Raises DataError, naming the file and the array, when an array is missing or has another shape: the sets of volumes
    (3D) and ChestMNIST, which has many labels per image, cannot be used.
    """
    with open_archive(path) as arrays:
        splits = [split for split in _SPLITS if f"{split}_images" in arrays]
        batches = [_read_split(arrays, path, split) for split in splits]
    if not batches:
        raise DataError("FV2010", f"{path}: no array train_images, val_images or test_images")
    return join_batches(path, path.stem, batches, size, [split == "test" for split in splits])


def _read_split(arrays: "np.lib.npyio.NpzFile", path: Path, split: str) -> tuple[Pixels, Indices]:
    images = arrays[f"{split}_images"]
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise DataError(
            "FV2010",
            f"{path}: {split}_images is {images.dtype} of shape {images.shape},"
            " expected uint8 of shape (n, s, s) or (n, s, s, 3)",
        )
    if f"{split}_labels" not in arrays:
        raise DataError("FV2010", f"{path}: there is {split}_images, but no {split}_labels")
    labels = arrays[f"{split}_labels"]
    if labels.dtype.kind not in "iu" or labels.shape not in ((len(images),), (len(images), 1)):
        raise DataError(
            "FV2010",
            f"{path}: {split}_labels is {labels.dtype} of shape {labels.shape},"
            f" expected whole numbers of shape ({len(images)}, 1)",
        )
    return images, labels.reshape(-1).astype(np.int64)
