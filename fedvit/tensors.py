"""Named tensors: the one form in which weights, deltas and features are held, checked and moved.

A delta is always `after - start`. Tensors travel as safetensors bytes (names, dtypes, shapes and raw
numbers; never code).
"""

import json
import math
import mmap
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from fedvit.errors import BadPayload

Array = npt.NDArray[np.generic]
Tensors = dict[str, Array]

_DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I32": np.int32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip

_BLOCK = 1 << 20
"""Numbers that are checked at a time."""


def pack(tensors: Mapping[str, Array]) -> bytes:
    """Serialise named tensors; the same names and numbers always give the same bytes."""
    return b"".join(pack_in_pieces(tensors))


def pack_in_pieces(tensors: Mapping[str, Array]) -> list[bytes | memoryview]:
    """The bytes of `pack` in pieces that share the tensors' memory, so that writing them needs no copy."""
    return list(stream_tensors({name: (t.shape, str(t.dtype)) for name, t in tensors.items()}, tensors.__getitem__))


def stream_tensors(
    expected: Mapping[str, tuple[tuple[int, ...], str]], value: Callable[[str], Array]
) -> Iterator[bytes | memoryview]:
    """The bytes of `pack`, piece by piece, for tensors that `value` makes one after another."""
    head, ordered = _head({name: (shape, np.dtype(dtype)) for name, (shape, dtype) in expected.items()})
    yield head
    for name in ordered:
        tensor = value(name)
        little: Any = tensor.astype(tensor.dtype.newbyteorder("<"), order="C", copy=False)
        yield memoryview(little.reshape(-1).view(np.uint8))


def compute_packed_bytes(expected: Mapping[str, tuple[tuple[int, ...], str]]) -> int:
    """Bytes of `pack` for tensors of these shapes and dtypes.

    >>> compute_packed_bytes({"w": ((2, 3), "float32")}) == len(pack({"w": np.zeros((2, 3), np.float32)}))
    True
    """
    specs = {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in expected.items()}
    return len(_head(specs)[0]) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())


def _head(specs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[bytes, list[str]]:
    """The header of the file, and the order of the tensors."""
    names = {np.dtype(kind).name: name for name, kind in _DTYPES.items()}
    # the widest first, so that every tensor is aligned
    ordered = sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))
    header: dict[str, object] = {}
    first = 0
    for name in ordered:
        shape, dtype = specs[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype.name], "shape": list(shape), "data_offsets": [first, first + size]}
        first += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def unpack(raw: bytes) -> Tensors:
    """Undo `pack`. Raises BadPayload when `raw` is not safetensors."""
    try:
        return dict(safetensors.numpy.load(raw))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BadPayload("FV2308", f"{len(raw)} bytes are not safetensors: {error}") from error


def map_tensors(file: Path) -> Tensors:
    """The tensors of a file of `pack`ed ones, read-only; a page is read when it is accessed.

    Under memory pressure the system drops such pages and reads them again, which it cannot do with allocated
    memory. While the tensors are referenced, the file stays open. Raises BadPayload when the file is not safetensors.
    """
    places = _places_in(file)
    if not places:
        return {}
    raw = np.memmap(file, np.uint8, "r")
    tensors: Tensors = {}
    for name, place in places.items():
        numbers: Array = raw[place.first : place.first + place.nbytes].view(place.dtype)
        tensors[name] = numbers.reshape(place.shape)
    return tensors


class _Place(NamedTuple):
    """The position of a tensor's numbers in a file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int  # byte

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _places_in(file: Path) -> Mapping[str, _Place]:
    """By name, in the order of the names. Raises BadPayload when the file is not safetensors."""
    try:
        with _safely_opened(file):
            pass  # it has checked names, dtypes, shapes and offsets
        with open(file, "rb") as opened:
            return _places_of(opened.read(int.from_bytes(opened.read(8), "little")))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BadPayload("FV2308", f"{file.stat().st_size} bytes are not safetensors: {error}") from error


@lru_cache(maxsize=64)
def _places_of(header: bytes) -> Mapping[str, _Place]:
    """Cached, because all updates of a cohort have the same header."""
    begin = 8 + len(header)
    entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
    return {
        name: _Place(
            np.dtype(_DTYPES[entries[name]["dtype"]]),
            tuple(entries[name]["shape"]),
            begin + entries[name]["data_offsets"][0],
        )
        for name in sorted(entries)
    }


class TensorReader(Mapping[str, Array]):
    """Named tensors that are read in parts, so that no whole tensor has to be in memory.

    Used as a mapping it reads a whole tensor at each access.
    """

    @property
    @abstractmethod
    def names(self) -> Collection[str]: ...

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Their size as stored, coded if they are coded."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Raises KeyError for a name that is not here."""

    @abstractmethod
    def part(self, name: str, first: int, last: int) -> Array:
        """Numbers `first` to `last` (exclusive) of the flattened tensor; both lie within it."""

    def __getitem__(self, name: str) -> Array:
        shape = self.shape(name)
        return self.part(name, 0, math.prod(shape)).reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class TensorFile(TensorReader):
    """The tensors of a packed file, which is open only while numbers are read.

    Unlike pages of a `mapped` file, these numbers do not stay in this process's resident memory.
    """

    def __init__(self, file: Path) -> None:
        """Raises BadPayload when the file is not safetensors."""
        self._file = file
        self._places = _places_in(file)

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    @property
    def stored_bytes(self) -> int:
        return self._file.stat().st_size

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def part(self, name: str, first: int, last: int) -> Array:
        """Raises BadPayload when the file has become shorter since it was checked."""
        place = self._places[name]
        numbers: Any = np.empty(last - first, place.dtype)
        with open(self._file, "rb") as file:
            file.seek(place.first + first * place.dtype.itemsize)
            got = file.readinto(numbers.view(np.uint8))
        if got != numbers.nbytes:
            raise BadPayload(
                "FV2308", f"{self._file.name}: {name!r} ends early: {got} bytes where {numbers.nbytes} were"
            )
        read: Array = numbers
        return read


class TensorsInMemory(TensorReader):
    """Tensors that are in memory, or mapped, already."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    @property
    def stored_bytes(self) -> int:
        return total_bytes(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def part(self, name: str, first: int, last: int) -> Array:
        return self._tensors[name].reshape(-1)[first:last]


def reader_of(tensors: Mapping[str, Array]) -> TensorReader:
    """The tensors themselves if they can be read in parts, else a reader of the tensors in memory."""
    return tensors if isinstance(tensors, TensorReader) else TensorsInMemory(tensors)


def _safely_opened(file: Path) -> Any:
    try:
        return safetensors.safe_open(file, framework="numpy")
    except FileNotFoundError:  # it says so of every file that it cannot open, whatever the reason
        with open(file, "rb"):
            raise


def release_pages(tensors: Iterable[Array]) -> None:
    """Free the pages of `mapped` tensors that will hardly be read again; a later access reads the file."""
    files: dict[int, mmap.mmap] = {}
    for array in tensors:
        owner: object = array
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, mmap.mmap):
            files[id(owner)] = owner
    for file in files.values():
        file.madvise(mmap.MADV_DONTNEED)


def delta(after: Mapping[str, Array], start: Mapping[str, Array]) -> Tensors:
    """Subtract `start` from `after`, name by name.

    >>> delta({"w": np.float32([3.0])}, {"w": np.float32([1.0])})
    {'w': array([2.], dtype=float32)}
    """
    return {name: np.subtract(after[name], start[name]) for name in start}


def total_bytes(tensors: Mapping[str, Array]) -> int:
    """Bytes of the numbers alone, without names and shapes."""
    return sum(array.nbytes for array in tensors.values())


def check_tensors(
    tensors: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int | None, ...], str]], what: str
) -> None:
    """Refuse tensors that are not exactly the expected ones.

    `expected` maps a name to (shape, dtype); None in a shape allows any length there. All floating
    tensors must be finite. Raises BadPayload whose message begins with `what` and names the tensor.
    """
    if missing := sorted(expected.keys() - tensors.keys()):
        raise BadPayload("FV2308", f"{what}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if extra := sorted(tensors.keys() - expected.keys()):
        raise BadPayload("FV2308", f"{what}: {len(extra)} tensors were not asked for, the first is {extra[0]!r}")
    for name, (shape, dtype) in expected.items():
        array = tensors[name]
        if array.dtype != dtype:
            raise BadPayload("FV2308", f"{what}: {name!r} has dtype {array.dtype}, expected {dtype}")
        fits = len(array.shape) == len(shape) and all(
            want is None or got == want for got, want in zip(array.shape, shape, strict=True)
        )
        if not fits:
            raise BadPayload("FV2308", f"{what}: {name!r} has shape {tuple(array.shape)}, expected {_dots(shape)}")
    check_finite(tensors, what)


def check_finite(tensors: Mapping[str, Array], what: str) -> None:
    """Raises BadPayload, naming the tensor, when a floating one holds a NaN or an infinity."""
    for name, array in tensors.items():
        if array.dtype.kind == "f" and (bad := _not_finite(array)):
            raise BadPayload("FV2308", f"{what}: {name!r} holds {bad} values that are NaN or infinite")


def _not_finite(array: Array) -> int:
    """Counted a block at a time: the tensor may be mapped, and larger than the memory."""
    flat = array.reshape(-1)
    blocks = (flat[first : first + _BLOCK] for first in range(0, flat.size, _BLOCK))
    return sum(len(block) - int(np.count_nonzero(np.isfinite(block))) for block in blocks)


def _dots(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if length is None else str(length) for length in shape) + ")"
