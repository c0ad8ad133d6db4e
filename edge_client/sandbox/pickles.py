"""Pickles of requests, in which tensors of a mapped file and images that the process knows travel as references."""

import functools
import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.data.folder import Files
from fedvit.tensors import Array


class RequestPickler(pickle.Pickler):
    """Writes the place of a mapped tensor instead of its numbers, and the name of images that were sent before.

    Tensors of files that the process cannot read, as those in the vault, travel themselves.
    """

    def __init__(self, file: io.BytesIO, known: Mapping[Files, str], can_read: Callable[[Path], bool]) -> None:
        super().__init__(file, protocol=5)
        self._known = known
        self._can_read = functools.cache(can_read)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Files) and value in self._known:
            return "files", self._known[value]
        if isinstance(value, np.ndarray) and (place := find_in_file(value)) and self._can_read(Path(place[0])):
            return "mapped", place
        return None


class RequestUnpickler(pickle.Unpickler):
    """Maps the tensors of files, and finds images by their name."""

    def __init__(self, file: io.BytesIO, known: Mapping[str, Files]) -> None:
        super().__init__(file)
        self._known = known
        self._opened: dict[str, np.memmap[Any, Any]] = {}

    def persistent_load(self, place: Any) -> Any:
        kind, where = place
        if kind == "files":
            return self._known[where]
        file, first, dtype, shape = where
        if file not in self._opened:
            self._opened[file] = np.memmap(file, np.uint8, "r")
        last = first + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self._opened[file][first:last].view(dtype).reshape(shape)


def find_in_file(array: Array) -> tuple[str, int, str, tuple[int, ...]] | None:
    """Return the file of a mapped array, its first byte there, its dtype and shape; None if it lies in memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and not (isinstance(base, np.memmap) and not isinstance(base.base, np.memmap)):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or not array.flags.c_contiguous:
        return None
    first = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return str(base.filename), first + base.offset, array.dtype.str, array.shape
