"""The pictures of a device's folder as the page shows and labels them."""

import io
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from edge_client.owner.labelling import ClassFolders, move_file
from fedvit.data.images import DECODED_BYTES, is_image_name, read_thumbnail
from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import ConfigError, DataError
from fedvit.files import name_failure

SMALL, LARGE = 240, 960
"""Longest side of a picture in the browser, in pixels."""
_CACHED = 64
_CLASSES_S = 5.0
"""Time after which class folders are looked at again while pictures are labelled."""
_MOST_UNDONE = 1000


class Labelled(NamedTuple):
    """A label that can be taken back."""

    name: str  # of the file, before
    label: str
    place: Path  # now


class PictureFolder:
    """The pictures of one folder, for several threads. One is decoded at a time, as that may take much memory."""

    def __init__(self, folder: Path, decoded_bytes: int = DECODED_BYTES) -> None:
        self.folder = folder
        self._decoded_bytes = decoded_bytes
        self._history: list[Labelled] = []
        self._classes: tuple[float, ClassFolders] | None = None  # and when they were looked at, monotonic
        self._lock = threading.Lock()
        self._decoding = threading.Lock()
        self._cache = OrderedDict[tuple[Path, int, int, int], bytes]()

    def open(self) -> ClassFolders:
        """Return the class folders with their pictures. Raises DataError."""
        folders = ClassFolders(self.folder)
        self._classes = (time.monotonic(), folders)
        return folders

    def open_classes(self) -> ClassFolders:
        """Return the class folders as they were seconds ago: many thousand pictures need not be listed for each label.

        Raises DataError.
        """
        known = self._classes
        return known[1] if known and time.monotonic() - known[0] < _CLASSES_S else self.open()

    def find(self, name: str) -> Path:
        """Return a picture by its path in the folder. Raises DataError for anything else."""
        *folders, file = parts = name.split("/")
        known = len(folders) == 1 or (len(folders) == 2 and folders[0] in (TRAIN, TEST))
        if known and is_image_name(file) and "\0" not in name and not any(part[:1] in ("", ".") for part in parts):
            path = self.folder.joinpath(*parts)
            if path.is_file():
                return path
        raise DataError("FV1403", "there is no such picture: it was moved or removed")

    def name_of(self, path: Path) -> str:
        """Return a picture's path in the folder."""
        return str(path.relative_to(self.folder))

    # --- labels ---------------------------------------------------------------------------------------

    @property
    def newest(self) -> Labelled | None:
        """The newest label that can be taken back."""
        history = self._history
        return history[-1] if history else None

    def label(self, file: str, label: str) -> None:
        """Move a waiting picture into a class folder. Raises DataError, ConfigError for an unknown class."""
        with self._lock:
            folders = self.open_classes()
            if label not in folders.classes:
                raise ConfigError("FV1413", f"there is no class folder {label!r}")
            path = self.find(f"{folders.unlabelled.name}/{file}")
            self._history = [*self._history[1 - _MOST_UNDONE :], Labelled(file, label, folders.move(path, label))]

    def undo(self) -> str | None:
        """Take back the newest label; return the file's name, or None if there is none. Raises DataError."""
        with self._lock:
            if not self._history:
                return None
            newest = self._history[-1]
            move_file(newest.place, self.open_classes().unlabelled / newest.name)
            self._history.pop()
            return newest.name

    # --- what a browser gets ---------------------------------------------------------------------------

    def draw(self, path: Path, side: int) -> bytes:
        """Return a picture as JPEG of at most side x side pixels, without its EXIF data. Raises DataError."""
        with name_failure(f"cannot read image {path}", DataError, "FV1403"):
            status = path.stat()
        key = (path, status.st_mtime_ns, status.st_size, side)
        with self._decoding:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return known
            pixels = read_thumbnail(path, side, side, decoded_bytes=self._decoded_bytes)
            drawn = io.BytesIO()
            Image.fromarray(pixels).save(drawn, "JPEG", quality=85)
            self._cache[key] = drawn.getvalue()
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)
            return drawn.getvalue()
