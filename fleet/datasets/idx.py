"""MNIST, Fashion-MNIST, EMNIST, KMNIST: gray images in the idx format of LeCun, packed with gzip or not.

Source: http://yann.lecun.com/exdb/mnist: big-endian header (type, number of dimensions, sizes), then bytes. torchvision
reads these sets from folders of its own naming only, and unpacks a file of any size.
"""

import gzip
import re
import zlib
from pathlib import Path

import numpy as np

from fedvit.data.images import Indices, Pixels
from fedvit.errors import DataError
from fleet.datasets.arrays import check_memory
from fleet.datasets.samples import Samples, join_batches

_IMAGES = re.compile(r"(?P<set>.*?)(train|t10k|test)-images[-.]idx3-ubyte(\.gz)?")
_GZIP = b"\x1f\x8b"


def is_idx(path: Path) -> bool:
    """Return True for a folder with a file such as train-images-idx3-ubyte.gz, or that file."""
    return bool(_image_files(path))


def read_idx(path: Path, size: int = 32) -> Samples:
    """Train and test images together; classes are numbers. A file stands for all files of its set.

    Raises DataError, naming the file, when one is missing or damaged, or a folder holds several sets.
    """
    files = _image_files(path)
    if not files:
        raise DataError("FV2008", f"{path}: no file such as train-images-idx3-ubyte or train-images-idx3-ubyte.gz")
    sets = sorted({_set_name(file) for file in files})
    if len(sets) > 1:
        raise DataError(
            "FV2008", f"{path}: holds the sets {', '.join(map(repr, sets))}; name an images file of one of them"
        )
    are_tests = [match[2] != "train" for file in files if (match := _IMAGES.fullmatch(file.name))]
    return join_batches(path, path.resolve().name, [_read_batch(file) for file in files], size, are_tests)


def _image_files(path: Path) -> list[Path]:
    """The images files of a folder, or those of the set that a file belongs to; one of each name, packed or not."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir() or not (path.is_dir() or _IMAGES.fullmatch(path.name)):
        return []
    files = {file.name.removesuffix(".gz"): file for file in sorted(folder.iterdir()) if _IMAGES.fullmatch(file.name)}
    return [file for _, file in sorted(files.items()) if path.is_dir() or _set_name(file) == _set_name(path)]


def _set_name(images: Path) -> str:
    """Beginning of the names of a set's files: emnist-letters-, or nothing."""
    match = _IMAGES.fullmatch(images.name)
    return match["set"] if match else ""


def _read_batch(images_file: Path) -> tuple[Pixels, Indices]:
    images = _read_bytes(images_file, dimensions=3)
    name = images_file.name.replace("-images", "-labels").replace("idx3", "idx1").removesuffix(".gz")
    for labels_file in (images_file.with_name(f"{name}.gz"), images_file.with_name(name)):
        if labels_file.is_file():
            labels = _read_bytes(labels_file, dimensions=1)
            if len(labels) != len(images):
                raise DataError(
                    "FV2008", f"{labels_file}: {len(labels)} labels, but {len(images)} images in {images_file.name}"
                )
            return images, labels.astype(np.int64)
    raise DataError("FV2008", f"{images_file}: there is no {name} beside it, packed or not")


def _read_bytes(path: Path, dimensions: int) -> Pixels:
    """Read the array of a file, which must have this many dimensions and hold single bytes."""
    try:
        with path.open("rb") as plain:
            is_packed = plain.read(2) == _GZIP
        with gzip.open(path) if is_packed else path.open("rb") as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) < 4 + 4 * dimensions:
                raise DataError(
                    "FV2008",
                    f"{path}: begins with {header[:4].hex(' ') or 'nothing'}, expected 00 00 08 {dimensions:02d}",
                )
            shape = np.frombuffer(header, dtype=">u4")[1:].tolist()
            expected = int(np.prod(shape, dtype=object))
            check_memory(path, expected)
            content = file.read(expected + 1)  # bounded, however much a small packed file holds
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("FV2008", f"{path}: {error}") from error
    if len(content) != expected:
        less = len(content) if len(content) < expected else f"more than {expected}"
        raise DataError("FV2008", f"{path}: {less} bytes for shape {tuple(shape)}, expected {expected}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
