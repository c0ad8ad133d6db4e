"""Dictionaries of arrays and lists in pickle files, read without trusting the file.

An ordinary unpickler imports and calls any name in a file. This one accepts only the names with which arrays are
written, and replaces them by classes of this module, so that a file cannot call anything else.
"""

import math
import pickle
import re
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedvit.errors import DataError
from fleet.datasets.arrays import parse_header


def read_pickle(path: Path) -> dict[str, Any]:
    """A dictionary of containers, numbers, texts and, as values, numpy arrays of numbers.

    Reads what Python 2 wrote, too; its byte strings come as texts (latin-1). Raises DataError, naming the
    file, when it cannot be read, is no such dictionary, or names anything to be imported.
    """
    try:
        with path.open("rb") as file:
            return unpickle(file)
    except OSError as error:
        raise DataError("FV2008", f"{path}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(error.code, f"{path}: {error}") from error


def unpickle(file: IO[bytes], reader: "type[_Unpickler] | None" = None) -> dict[str, Any]:
    """Read an open file as `read_pickle` does. Raises OSError, and DataError without the file's name."""
    try:
        content = (reader or _Unpickler)(file, encoding="latin1").load()
    except (OSError, DataError):
        raise
    except Exception as error:
        # broad, because the unpickler raises nearly anything on damaged files (EOFError, KeyError, ...)
        raise DataError("FV2009", f"no readable pickle: {type(error).__name__}: {error}") from error
    if isinstance(content, _ObjectArray) and len(content.objects) == 1:
        [content] = content.objects
    if not isinstance(content, dict):
        raise DataError("FV2009", f"holds a {type(content).__name__}, expected a dictionary")
    return {str(key): value.array if isinstance(value, _Array) else value for key, value in content.items()}


def unpickle_array(file: IO[bytes]) -> dict[str, Any]:
    """Read a dictionary that numpy saved as an array with one object. Raises OSError, and DataError."""
    try:
        shape, dtype = parse_header(file)
    except ValueError as error:
        raise DataError("FV2009", f"no array of numpy: {error}") from error
    if dtype != np.dtype(object) or shape != ():
        raise DataError("FV2009", f"holds {dtype} of shape {shape}, expected one dictionary")
    return unpickle(file, _ArrayUnpickler)


class _Dtype:
    """Replaces numpy.dtype; keeps its arguments."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code
        self.order = "|"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]  # (version, byte order, ...)

    def resolve(self) -> np.dtype[Any]:
        is_number = isinstance(self.code, str) and re.fullmatch("[biuf][1248]", self.code)
        if not is_number or self.order not in ("<", ">", "|"):
            raise DataError("FV2009", f"refused an array of type {self.code!r}, expected numbers")
        return np.dtype(f"{self.order}{self.code}")


class _Array:
    """Replaces numpy's `_reconstruct(ndarray, (0,), "b")`, which is followed by the array's state."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        dtype = kind.resolve()
        raw = data.encode("latin1") if isinstance(data, str) else data  # a text where Python 2 wrote it
        if len(raw) != math.prod(shape) * dtype.itemsize:
            raise DataError("FV2009", f"an array of shape {shape} and type {dtype} has {len(raw)} bytes")
        self.array = np.frombuffer(raw, dtype).reshape(shape, order="F" if by_columns else "C")


class _ObjectArray(_Array):
    """Replaces an array of objects, which were read by the same rules, or of numbers."""

    objects: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if state[2].code == "O8" and isinstance(state[4], list):
            self.objects = tuple(state[4])
        else:
            super().__setstate__(state)


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "ndarray",
}


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler: that in C takes memory for each number of an object that a file names, up to 64 GB."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _KNOWN:
            raise DataError(
                "FV2009", f"refused, the pickle names {module}.{name}, expected nothing but arrays of numbers"
            )
        return _KNOWN[module, name]


class _ArrayUnpickler(_Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        known = super().find_class(module, name)
        return _ObjectArray if known is _Array else known
