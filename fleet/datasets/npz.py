"""Arrays of images in a .npz file: `x_train`, `y_train`, `x_test`, `y_test`, as Keras keeps them, or `x`, `y`."""

from pathlib import Path

from fedvit.errors import DataError
from fleet.datasets.arrays import Array, check_archive, open_archive, to_labels, to_pixels
from fleet.datasets.samples import Samples, join_batches

_PAIRS = (("x_train", "y_train"), ("x_test", "y_test"), ("x", "y"), ("images", "labels"))


def is_npz(path: Path) -> bool:
    """Return True for a .npz file with an array of images that these names tell."""
    if not (path.is_file() and path.suffix == ".npz"):
        return False
    try:
        return bool({images for images, _ in _PAIRS} & {*check_archive(path)})
    except DataError:
        return False  # the reader of other .npz files reports the reason


def read_npz(path: Path, size: int = 32) -> Samples:
    """Images of all arrays together; `x_test` is the official test split, and classes are numbers.

    Raises DataError, naming file and array, when labels are missing or an array is not one of images.
    """
    names = check_archive(path)
    pairs = [(images, labels) for images, labels in _PAIRS if images in names]
    if missing := [(images, labels) for images, labels in pairs if labels not in names]:
        raise DataError("FV2010", f"{path}: there is {missing[0][0]}, but no {missing[0][1]}")
    with open_archive(path) as arrays:
        batches: list[tuple[Array, Array]] = [(arrays[images], arrays[labels]) for images, labels in pairs]
    read = []
    for (images, labels), (pixels, numbers) in zip(pairs, batches, strict=True):
        read.append((to_pixels(pixels, f"{path}: {images}"), to_labels(numbers, len(pixels), f"{path}: {labels}")))
    return join_batches(path, path.stem, read, size, [images == "x_test" for images, _ in pairs])
