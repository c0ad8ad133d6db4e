"""Find the images of each class in a tree, on disk or in an archive.

Two layouts are supported: `train/<class>/*` with `test/<class>/*`, and plain `<class>/*`. Hidden files and
folders are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from fedvit.data.images import is_image_name
from fedvit.errors import DataError
from fedvit.files import name_failure

File = TypeVar("File")

TRAIN, TEST = "train", "test"
_CLASS_LEVELS = 2  # train/<class>/ below the folder
PARTITION_FILE = "partition.json"
"""Lies beside the devices' folders that `fleet partition` made."""
UNLABELLED = "unlabelled"
"""In a device's folder: images that wait for a label. It is no class."""


SYSTEM_FOLDERS = ("__MACOSX", "lost+found", "System Volume Information", "$RECYCLE.BIN")


@dataclass
class Tree(Generic[File]):
    """Folders by name, and images by name."""

    folders: dict[str, "Tree[File]"] = field(default_factory=dict)
    images: dict[str, File] = field(default_factory=dict)
    others: list[File] = field(default_factory=list)  # per folder: its other files, and folders that were not listed

    def everything(self) -> Iterator[File]:
        """All files that were found, of any kind."""
        yield from self.images.values()
        yield from self.others
        for folder in self.folders.values():
            yield from folder.everything()


@dataclass(frozen=True)
class Layout(Generic[File]):
    """The images and their labels (indices into `classes`), sorted by class and name."""

    classes: tuple[str, ...]
    train: list[tuple[File, int]]
    test: list[tuple[File, int]] | None  # None: there is no test folder
    divided: bool  # class folders are in train/ and test/


@dataclass(frozen=True)
class Found:
    """A device's folder as a reader found it: the layout, and the files that are not used."""

    layout: Layout[Path]
    unusable: tuple[tuple[Path, str], ...] = ()  # images without a class, with the reason
    passed_over: tuple[Path, ...] = ()  # files that are no images in a class folder


def read_class_folders(folder: Path) -> Found:
    """Find the images in class folders. Raises DataError."""
    tree = read_tree(folder, _CLASS_LEVELS)
    tree.folders.pop(UNLABELLED, None)
    layout = find_layout(tree, str(folder))
    used = {path for path, _ in (*layout.train, *(layout.test or ()))}
    return Found(layout, passed_over=tuple(sorted(path for path in tree.everything() if path not in used)))


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or a system's own: of an archive, a disk, or a stick."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def read_tree(folder: Path, depth: int) -> Tree[Path]:
    """The content of `folder`, down to `depth` levels; deeper folders are never listed.

    Raises DataError, naming the folder, when one cannot be listed.
    """
    tree: Tree[Path] = Tree()
    with name_failure(f"cannot list folder {folder}", DataError, "FV1402"):
        for path in folder.iterdir():
            if is_hidden(path.name):
                continue
            if path.is_dir():
                tree.folders[path.name] = read_tree(path, depth - 1) if depth else Tree(others=[path])
            elif is_image_name(path.name):
                tree.images[path.name] = path
            else:
                tree.others.append(path)
    return tree


def find_layout(tree: Tree[File], where: str) -> Layout[File]:
    """Find the layout. Classes are the sorted names of class folders of train and test, also of empty ones.

    Raises DataError that begins with `where` when there is no class folder.
    """
    # a class may itself be named "train": then that folder holds images, not folders
    parts = {name: tree.folders[name] for name in (TRAIN, TEST) if name in tree.folders}
    divided = any(part.folders for part in parts.values()) or (bool(parts) and len(parts) == len(tree.folders))
    train = parts.get(TRAIN, Tree()) if divided else tree
    test = parts.get(TEST) if divided else None
    classes = tuple(sorted(train.folders.keys() | (test.folders.keys() if test else ())))
    if not classes:
        beside = " (images lie beside where class folders should be)" if train.images else ""
        raise DataError(
            "FV1402",
            f"{where}: no class folders{beside}; images belong in train/<class>/ and test/<class>/, or in <class>/",
        )
    return Layout(classes, _label(train, classes), _label(test, classes) if test else None, divided)


def _label(part: Tree[File], classes: tuple[str, ...]) -> list[tuple[File, int]]:
    return [
        (file, label)
        for label, name in enumerate(classes)
        if name in part.folders
        for _, file in sorted(part.folders[name].images.items())
    ]
