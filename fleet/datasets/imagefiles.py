"""Image files in a folder or in a .zip, as one tree, whichever of the two it is."""

import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from fedvit.data.images import Indices, Pixels, header_problem, is_image_name, read_image
from fedvit.data.layout import TEST, TRAIN, Tree, is_hidden, read_tree
from fedvit.errors import DataError

_LEVELS = 3  # a single top folder, train/ or a domain, <class>/
# RuntimeError: a member of an archive is locked by a password; NotImplementedError: packed in a way unknown here
_CANNOT_OPEN = (OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile)


@dataclass(frozen=True)
class ImageFile:
    """A file that may be an image."""

    path: Path  # a name only, where the image is a member of an archive or a row of a table
    open: Callable[[], BinaryIO]

    def problem(self) -> str | None:
        """Reason why it is not an image, or None; only the header is read."""
        try:
            with self.open() as content:
                return header_problem(self.path, content)
        except _CANNOT_OPEN as error:
            return str(error)

    def read(self, size: int) -> Pixels:
        """The image as `read_image` gives it. Raises DataError that names the file."""
        try:
            with self.open() as content:
                return read_image(self.path, size, content)
        except _CANNOT_OPEN as error:
            raise DataError("FV1403", f"cannot read image {self.path}: {error}") from error


class ImageFiles:
    """Images that are decoded when asked for."""

    def __init__(self, files: Sequence[ImageFile], size: int) -> None:
        self._files = files
        self._size = size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, rows: Indices, /) -> Pixels:
        images = np.empty((len(rows), self._size, self._size, 3), dtype=np.uint8)
        for index, row in enumerate(rows):
            images[index] = self._files[row].read(self._size)
        return images


def keep_readable(
    files: Sequence[ImageFile], size: int, where: str
) -> tuple[ImageFiles, npt.NDArray[np.bool_], tuple[str, ...]]:
    """(the files with a good header, which of `files` these are, a line for each of the others).

    Raises DataError that begins with `where` when there is none.
    """
    problems = [file.problem() for file in files]
    unreadable = tuple(
        f"cannot read image {file.path}: {problem}" for file, problem in zip(files, problems, strict=True) if problem
    )
    if len(unreadable) == len(files):
        raise DataError("FV2008", f"{where}{f'; {unreadable[0]}' if unreadable else ''}")
    good = np.array([problem is None for problem in problems])
    return ImageFiles([file for file, is_good in zip(files, good, strict=True) if is_good], size), good, unreadable


def open_tree(path: Path) -> Tree[ImageFile]:
    """The folders and images of a folder or .zip, from below a single top folder that only wraps them.

    Raises DataError, naming `path`, when it is neither a folder nor a .zip, or a .zip has members that point
    outside of it.
    """
    if path.is_dir():
        return _unwrap(_files(read_tree(path, _LEVELS)))
    if not path.is_file():
        raise DataError("FV2001", f"{path}: there is no such folder or file")
    try:
        archive = zipfile.ZipFile(path)
    except (*_CANNOT_OPEN, ValueError) as error:  # ValueError: a name is not the text that the archive says
        raise DataError("FV2001", f"{path}: neither a folder nor a readable .zip: {error}") from error
    return _unwrap(_archive_tree(archive, path))


def _unwrap(tree: Tree[ImageFile]) -> Tree[ImageFile]:
    if len(tree.folders) == 1:
        (top,) = tree.folders.values()
        if top.folders and not top.images and not tree.folders.keys() & {TRAIN, TEST}:
            return top
    return tree


def _files(tree: Tree[Path]) -> Tree[ImageFile]:
    return Tree(
        folders={name: _files(folder) for name, folder in tree.folders.items()},
        images={name: _file_in_folder(path) for name, path in tree.images.items()},
    )


def _file_in_folder(path: Path) -> ImageFile:
    def open_file() -> BinaryIO:
        return path.open("rb")

    return ImageFile(path, open_file)


def _file_in_archive(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> ImageFile:
    def open_member() -> BinaryIO:
        return cast(BinaryIO, archive.open(member))

    return ImageFile(Path(member.filename), open_member)


def _archive_tree(archive: zipfile.ZipFile, path: Path) -> Tree[ImageFile]:
    root: Tree[ImageFile] = Tree()
    for member in archive.infolist():
        parts = _inside(member.filename, path)
        if not parts or any(is_hidden(part) for part in parts):
            continue
        tree = root
        for part in parts if member.is_dir() else parts[:-1]:
            tree = tree.folders.setdefault(part, Tree())
        if not member.is_dir() and is_image_name(parts[-1]):
            tree.images[parts[-1]] = _file_in_archive(archive, member)
    return root


def _inside(name: str, path: Path) -> tuple[str, ...]:
    """The parts of a member's name. Class folders are made from them, so none may lead elsewhere."""
    member = PurePosixPath(name.replace("\\", "/"))
    if member.is_absolute() or ".." in member.parts or re.match("[A-Za-z]:", name):
        raise DataError("FV2009", f"{path}: refused, its member {name!r} points outside of the archive")
    return member.parts
