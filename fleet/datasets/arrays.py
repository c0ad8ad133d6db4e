"""Arrays of images and labels from foreign files, as pixels."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from fedvit.data.images import Indices, Pixels
from fedvit.errors import DataError

Array = np.ndarray[Any, np.dtype[Any]]


def check_memory(path: Path, needed: int) -> None:
    """Check that what a file unpacks to fits into memory. Raises DataError naming the file."""
    free = psutil.virtual_memory().available
    if needed > free:
        raise DataError("FV2008", f"{path}: needs {needed} bytes of memory, {free} are free")


def check_archive(path: Path) -> list[str]:
    """Names of the arrays in a .npz file, whose declared sizes fit into memory. Raises DataError."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError("FV2010", f"{path}: no readable .npz file: {error}") from error
    check_memory(path, sum(member.file_size for member in members))
    return [member.filename.removesuffix(".npy") for member in members]


@contextmanager
def open_archive(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open a .npz file whose arrays fit into memory. Raises DataError, also when an array cannot be read."""
    check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    _check_header(path, archive, member)
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError("FV2010", f"{path}: no readable .npz file: {error}") from error


def _check_header(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Check that a header says no more bytes than the array has, as numpy allocates them before it reads."""
    with archive.open(member) as file:
        shape, dtype = parse_header(file)
    declared, name = prod(shape) * dtype.itemsize, member.filename.removesuffix(".npy")
    if declared > member.file_size:
        raise DataError("FV2010", f"{path}: {name} has {member.file_size} bytes, but its header says {declared}")


def parse_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Parse shape and type of an array of numpy. Raises ValueError."""
    form = np.lib.format
    try:
        read = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:
        # broad, because numpy's parser raises nearly anything on damaged headers (TokenError, TypeError, ...)
        raise ValueError(f"no header of an array: {type(error).__name__}: {error}") from error
    return shape, dtype


def to_pixels(images: Array, where: str) -> Pixels:
    """Images as uint8 (n, h, w) or (n, h, w, 3).

    Accepts (n, h, w), and one or three colours before or after height and width; values of 0..255, or numbers of 0..1
    or -1..1. Raises DataError that begins with `where`.
    """
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3) or 0 in images.shape[1:]:
        raise DataError("FV2010", f"{where} has shape {images.shape}, expected (n, h, w) with one or three colours")
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind not in "iuf":
        raise DataError("FV2010", f"{where} is {images.dtype}, expected numbers")
    low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
    if not (low >= -1.001 and high <= (1.001 if low < 0 else 255)):  # also false for a value that is not a number
        raise DataError("FV2010", f"{where} has values of {low:g} to {high:g}, expected 0..255, 0..1 or -1..1")
    if images.dtype.kind in "iu" or high > 1.001:
        return images.astype(np.uint8)
    scaled = (images + 1) * 127.5 if low < 0 else images * 255.0
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)


def to_labels(labels: Array, count: int, where: str) -> Indices:
    """Labels (n,) of whole numbers. Raises DataError that begins with `where`."""
    if labels.dtype.kind not in "iu" or labels.shape not in ((count,), (count, 1)):
        raise DataError(
            "FV2010", f"{where} is {labels.dtype} of shape {labels.shape}, expected whole numbers of shape ({count},)"
        )
    return labels.reshape(-1).astype(np.int64)
