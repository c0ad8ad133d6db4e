"""LEAF's JSON of images, as of FEMNIST: for each writer a list of flat images of 0..1, and labels.

Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097. A file, a folder of files, or a
folder with `train/` and `test/`, as LEAF's scripts write it.
"""

import math
import re
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import DataError
from fleet.datasets.arrays import Array, check_memory, to_labels, to_pixels
from fleet.datasets.samples import ArrayImages, Samples, folder_names, number_classes

_PEEK = 1 << 20
"""Bytes of a file's beginning in which the first image or text is looked for."""
_FIRST_X = re.compile(rb'"x"\s*:\s*\[\s*(.)', re.DOTALL)
_MEMORY = 8
"""Bytes of memory while a byte of JSON is read: a number of four letters is one of Python's."""


class _LeafWriter(Struct):
    x: list[list[float]]
    y: list[int]


class _LeafImages(Struct):
    users: list[str]
    user_data: dict[str, _LeafWriter]


def is_leafimages(path: Path) -> bool:
    """Return True for LEAF's JSON whose samples are lists of numbers."""
    files = _files(path)
    return bool(files) and _holds_lists(files[0][0])


def read_leafimages(path: Path, size: int = 32) -> Samples:
    """All writers' images; a writer is a domain, and files in test/ are the official test split.

    Raises DataError, naming the file and the user, when one is damaged or its images differ in size.
    """
    pixels: list[Array] = []
    labels: list[Array] = []
    users: list[str] = []
    tests: list[bool] = []
    for file, is_test in _files(path):
        for user, images, numbers in _read_file(file):
            pixels.append(images)
            labels.append(numbers)
            users += [user] * len(images)
            tests += [is_test] * len(images)
    if not users or len({images.shape[1:] for images in pixels}) > 1:
        raise DataError("FV2008", f"{path}: no images, or images of different sizes")
    classes, names = number_classes(np.concatenate(labels))
    domain_names, domains = np.unique(np.array(users), return_inverse=True)
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=ArrayImages(np.concatenate(pixels), size),
        labels=classes,
        classes=names,
        domains=domains.astype(np.int64),
        domain_names=folder_names(domain_names.tolist()),
        official_test=np.array(tests) if any(tests) and not all(tests) else None,
    )


def _files(path: Path) -> list[tuple[Path, bool]]:
    """Files, and whether they are of the official test split."""
    if path.is_file():
        return [(path, False)] if path.suffix == ".json" else []
    folders = [(path / TRAIN, False), (path / TEST, True)] if (path / TRAIN).is_dir() else [(path, False)]
    return [(file, is_test) for folder, is_test in folders for file in sorted(folder.glob("*.json"))]


def _holds_lists(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            first = _FIRST_X.search(content.read(_PEEK))
    except OSError:
        return False  # the reader reports the reason
    return first is not None and first[1] == b"["


def _read_file(file: Path) -> list[tuple[str, Array, Array]]:
    try:
        check_memory(file, _MEMORY * file.stat().st_size)
        content = msgspec.json.decode(file.read_bytes(), type=_LeafImages)
    except (OSError, UnicodeDecodeError, RecursionError, msgspec.MsgspecError) as error:
        raise DataError("FV2005", f"{file}: not LEAF's JSON with 'users' and 'user_data': {error}") from error
    read = []
    for user in content.users:
        data = content.user_data.get(user)
        if data is None or len(data.x) != len(data.y):
            raise DataError("FV2005", f"{file}: user {user!r} has no images x with one label y for each")
        if not data.x:
            continue
        where = f"{file}: x of user {user!r}"
        read.append((user, _shape(data.x, where), to_labels(np.array(data.y), len(data.x), f"{file}: y of {user!r}")))
    return read


def _shape(images: list[list[float]], where: str) -> Array:
    """Flat images as pixels: gray, or of three colours, the last of three dimensions."""
    lengths = {len(image) for image in images}
    length = lengths.pop()
    side, colours = math.isqrt(length), 1
    if side * side != length and length % 3 == 0:
        side, colours = math.isqrt(length // 3), 3
    if lengths or not length or side * side * colours != length:
        raise DataError("FV2005", f"{where} has images of {length} numbers, expected squares of one size")
    return to_pixels(np.array(images, dtype=np.float32).reshape(-1, side, side, colours), where)
