"""A data set that lies as class folders, in a folder or in a .zip, to be dealt out to devices."""

import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar, cast

import numpy as np

from fedvit.data.images import Indices, Pixels, header_problem, is_image_name, read_image
from fedvit.data.layout import Layout, Tree, find_layout, is_hidden, read_tree
from fedvit.data.samples import Samples
from fedvit.errors import DataError

File = TypeVar("File")

_LEVELS = 3  # a single top folder, train/, <class>/
# RuntimeError: a member of an archive is locked by a password; NotImplementedError: packed in a way unknown here
_CANNOT_OPEN = (OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile)


def read_imagefolder(path: Path, size: int = 32) -> Samples:
    """Open `train/<class>/*` with `test/<class>/*`, or `<class>/*`; all inside one top folder is fine too.

    Train and test images are put together: every device gets a test share of its own later. Images are
    decoded when asked for; those without a good header are left out and listed in `unreadable`.

    Raises DataError, naming `path`, when it is neither a folder nor a .zip, holds no class folders or no
    readable image, or when a .zip has members that point outside of it.
    """
    if path.is_dir():
        return _samples(path, size, _layout(read_tree(path, _LEVELS), path), _file_in_folder)
    if not path.is_file():
        raise DataError(f"{path}: there is no such folder or file")
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{path}: neither a folder nor a readable .zip: {error}") from error
    return _samples(path, size, _layout(_archive_tree(archive, path), path), partial(_file_in_archive, archive))


@dataclass(frozen=True)
class _ImageFile:
    path: Path  # a name only, where the image is a member of an archive
    open: Callable[[], BinaryIO]


class _ImageFiles:
    """Images that are decoded when asked for."""

    def __init__(self, files: Sequence[_ImageFile], size: int) -> None:
        self._files = files
        self._size = size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, rows: Indices, /) -> Pixels:
        images = np.empty((len(rows), self._size, self._size, 3), dtype=np.uint8)
        for place, row in enumerate(rows):
            file = self._files[row]
            try:
                with file.open() as content:
                    images[place] = read_image(file.path, self._size, content)
            except _CANNOT_OPEN as error:
                raise DataError(f"cannot read image {file.path}: {error}") from error
        return images


def _samples(path: Path, size: int, layout: Layout[File], as_image_file: Callable[[File], _ImageFile]) -> Samples:
    files: list[_ImageFile] = []
    labels: list[int] = []
    unreadable: list[str] = []
    for entry, label in layout.train + (layout.test or []):
        file = as_image_file(entry)
        if problem := _problem(file):
            unreadable.append(f"cannot read image {file.path}: {problem}")
        else:
            files.append(file)
            labels.append(label)
    if not files:
        left_out = f"; {unreadable[0]}" if unreadable else ""
        raise DataError(f"{path}: no readable image in the {len(layout.classes)} class folders{left_out}")
    return Samples(
        dataset=path.resolve().name,
        size=size,
        images=_ImageFiles(files, size),
        labels=np.array(labels, dtype=np.int64),
        classes=layout.classes,
        unreadable=tuple(unreadable),
    )


def _problem(file: _ImageFile) -> str | None:
    try:
        with file.open() as content:
            return header_problem(file.path, content)
    except _CANNOT_OPEN as error:
        return str(error)


def _layout(tree: Tree[File], path: Path) -> Layout[File]:
    """The layout at the top, or below a single folder that only wraps the data set."""
    if len(tree.folders) == 1:
        (top,) = tree.folders.values()
        if top.folders and not top.images and not tree.folders.keys() & {"train", "test"}:
            tree = top
    return find_layout(tree, str(path))


def _file_in_folder(path: Path) -> _ImageFile:
    def open_file() -> BinaryIO:
        return path.open("rb")

    return _ImageFile(path, open_file)


def _file_in_archive(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _ImageFile:
    def open_member() -> BinaryIO:
        return cast(BinaryIO, archive.open(member))

    return _ImageFile(Path(member.filename), open_member)


def _archive_tree(archive: zipfile.ZipFile, path: Path) -> Tree[zipfile.ZipInfo]:
    root: Tree[zipfile.ZipInfo] = Tree()
    for member in archive.infolist():
        parts = _inside(member.filename, path)
        if any(is_hidden(part) for part in parts):
            continue
        tree = root
        for part in parts if member.is_dir() else parts[:-1]:
            tree = tree.folders.setdefault(part, Tree())
        if not member.is_dir() and is_image_name(parts[-1]):
            tree.images[parts[-1]] = member
    return root


def _inside(name: str, path: Path) -> tuple[str, ...]:
    """The parts of a member's name. Class folders are made from them, so none may lead elsewhere."""
    member = PurePosixPath(name.replace("\\", "/"))
    if member.is_absolute() or ".." in member.parts or re.match("[A-Za-z]:", name):
        raise DataError(f"{path}: refused, its member {name!r} points outside of the archive")
    return member.parts
