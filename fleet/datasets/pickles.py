"""Dictionaries of arrays and lists in pickle files, read without trusting the file.

An ordinary unpickler imports and calls any name in a file. This one accepts only the names with which arrays are
written, and replaces them by classes of this module, so that a file cannot call anything else.
"""

import math
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedvit.errors import DataError


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


def unpickle(file: BinaryIO) -> dict[str, Any]:
    """Read an open file as `read_pickle` does. Raises OSError, and DataError without the file's name."""
    try:
        content = _Unpickler(file, encoding="latin1").load()
    except (OSError, DataError):
        raise
    except Exception as error:
        # broad, because the unpickler raises nearly anything on damaged files (EOFError, KeyError, ...)
        raise DataError("FV2009", f"no readable pickle: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise DataError("FV2009", f"holds a {type(content).__name__}, expected a dictionary")
    return {str(key): value.array if isinstance(value, _Array) else value for key, value in content.items()}


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


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "ndarray",
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) not in _KNOWN:
            raise DataError(
                "FV2009", f"refused, the pickle names {module}.{name}, expected nothing but arrays of numbers"
            )
        return _KNOWN[module, name]
