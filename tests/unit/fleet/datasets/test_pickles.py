"""Pickles of arrays, and hostile ones, which never run anything."""

import io
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvit.errors import DataError
from fleet.datasets.pickles import read_pickle
from tests.support.codes import has_code


class Calls:
    """Pickled, it has the reader call what it is given."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call[0], self.call[1:]


def write_pickle(where: Path, content: object, protocol: int | None = None) -> Path:
    path = where / "batch"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, ">i4", np.float32, np.bool_])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_come_back(tmp_path: Path, dtype: Any, order: Any, protocol: int) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4), dtype=dtype, order=order)
    content = read_pickle(write_pickle(tmp_path, {"data": array, "labels": [1, 2], "name": "x"}, protocol))
    np.testing.assert_array_equal(content["data"], array)
    assert content["data"].dtype == array.dtype
    assert content["labels"] == [1, 2]
    assert content["name"] == "x"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_that_runs_a_command_is_refused(tmp_path: Path, protocol: int, depth: int) -> None:
    mark = tmp_path / "mark"
    attack: Any = Calls(os.system, f"touch {mark}")
    path = write_pickle(tmp_path, {"data": attack} if depth else attack, protocol)
    with pytest.raises(DataError, check=has_code("FV2009")):
        read_pickle(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())  # noqa: S301 - the same bytes do harm, so the test tests something
    assert mark.exists()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((eval, "1"), "builtins.eval"),
        ((getattr, "x", "upper"), "builtins.getattr"),
        ((np.load, "x"), "numpy.load"),
        ((np.fromfile, "x"), "fromfile"),
        ((bytearray, 10), "builtins.bytearray"),
        ((Path, "x"), "pathlib"),
    ],
)
def test_nothing_else_is_called_either(tmp_path: Path, call: tuple[Any, ...], name: str) -> None:
    with pytest.raises(DataError, check=has_code("FV2009", name)):
        read_pickle(write_pickle(tmp_path, {"data": Calls(*call)}))


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, check=has_code("FV2009", "O8")):
        read_pickle(write_pickle(tmp_path, {"data": np.array([{}, None])}))


def test_a_size_that_is_not_there_takes_no_memory(tmp_path: Path) -> None:
    """The array says 2^40 values and brings 3."""
    raw = pickle.dumps({"data": np.zeros(3, dtype=np.uint8)}, protocol=4)
    short, large = b"K\x03\x85", b"\x8a\x06\0\0\0\0\0\1\x85"  # the tuples (3,) and (2^40,)
    assert raw.count(short) == 1
    path = tmp_path / "batch"
    path.write_bytes(raw.replace(short, large).replace(raw[2:11], b""))  # without the length of the whole
    with pytest.raises(DataError, check=has_code("FV2009", "1099511627776")):
        read_pickle(path)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", b"\x80\x04}", pickle.dumps({"a": 1})[:-3], b"\x80\x02X", pickle.dumps([1, 2]), None]
)
def test_error_names_the_damaged_or_missing_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, check=has_code("FV2008" if content is None else "FV2009", "batch: ")):
        read_pickle(tmp_path / "batch")


def test_a_number_of_an_object_takes_no_memory(tmp_path: Path) -> None:
    """The file gives None the number 2^24, for which the unpickler in C takes 256 MB."""
    (tmp_path / "batch").write_bytes(b"\x80\x02Nr\0\0\0\x010}.")
    tracemalloc.start()
    try:
        assert read_pickle(tmp_path / "batch") == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_our_records_cannot_be_changed_by_a_file(tmp_path: Path) -> None:
    """BUILD with a pair as its state sets attributes of an object; here of what stands in for numpy's."""
    for module, name in (("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")):
        file = io.BytesIO()
        file.write(b"\x80\x02c" + f"{module}\n{name}\n".encode())
        file.write(b"N}X\x05\x00\x00\x00orderX\x01\x00\x00\x00!s\x86b.")  # (None, {"order": "!"}), BUILD
        (tmp_path / "batch").write_bytes(file.getvalue())
        with pytest.raises(DataError):
            read_pickle(tmp_path / "batch")
