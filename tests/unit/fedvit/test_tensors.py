import contextlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedvit.errors import BadPayload
from fedvit.tensors import TensorFile, Tensors, check_finite, check_tensors, delta, pack, reader_of, total_bytes, unpack
from tests.support.codes import has_code

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")
NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0)))


def bits(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What must survive a journey: NaNs and negative zeros compare by their bits."""
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in tensors.items()}


def raw_tensor(dtype: str, shape: list[int], content: bytes) -> bytes:
    """A safetensors file written by hand: length of the header, header, numbers."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(content)]}}).encode()
    return struct.pack("<Q", len(header)) + header + content


# --- packing ------------------------------------------------------------------------------------------


@given(st.dictionaries(NAMES, ARRAYS, max_size=4))
def test_unpack_undoes_pack(tensors: Tensors) -> None:
    """Every bit, shape (also of scalars and of empty arrays) and dtype."""
    assert bits(unpack(pack(tensors))) == bits(tensors)


def test_layout_and_order_do_not_matter() -> None:
    # a scalar stays a scalar: AdamW's step count is one, and the server's memory travels to disk and back between
    # rounds
    assert unpack(pack({"step": np.array(3.0, np.float32)}))["step"].shape == ()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert pack({"x": np.asfortranarray(array)}) == pack({"x": array})
    np.testing.assert_array_equal(unpack(pack({"x": array.T}))["x"], array.T)
    np.testing.assert_array_equal(unpack(pack({"x": array[:, ::2]}))["x"], array[:, ::2])
    np.testing.assert_array_equal(unpack(pack({"x": array.astype(">f4")}))["x"], array)
    a, b = np.array([1], np.float32), np.array([2], np.int64)
    assert pack({"a": a, "b": b}) == pack({"b": b, "a": a})


def test_the_bytes_are_safetensors() -> None:
    """Read by the library's own reader, and written by hand: 8 bytes of length, the header, then 1.5 as float32."""
    packed = pack({"x": np.array([1.5], np.float32)})
    np.testing.assert_array_equal(safetensors.numpy.load(packed)["x"], np.array([1.5], np.float32))
    by_hand = raw_tensor("F32", [1], struct.pack("<f", 1.5))
    np.testing.assert_array_equal(unpack(by_hand)["x"], np.array([1.5], np.float32))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 8,
        b"x" * 100,
        struct.pack("<Q", 2**40) + b"{}",  # a header longer than the file
        raw_tensor("F32", [3], b"\0" * 4),  # numbers are missing
        raw_tensor("F32", [1], b"\0" * 4) + b"more",
        raw_tensor("F32", [2**62, 4], b"\0" * 4),
        raw_tensor("F32", [0, 2**62], b""),
        raw_tensor("BF16", [1], b"\0" * 2),  # numpy has no such numbers
        raw_tensor("F8_E4M3", [1], b"\0"),
        raw_tensor("NOPE", [1], b"\0"),
    ],
)
def test_what_is_no_tensors_is_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload):
        unpack(raw)


def test_every_truncation_is_refused() -> None:
    packed = pack({"a": np.arange(5, dtype=np.float32), "b": np.ones((2, 2))})
    for length in range(len(packed)):
        with pytest.raises(BadPayload):
            unpack(packed[:length])


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: struct.pack("<Q", len(tail)) + tail))
def test_any_bytes_are_tensors_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadPayload):
        assert all(isinstance(array, np.ndarray) for array in unpack(raw).values())


# --- read in parts ------------------------------------------------------------------------------------


@given(st.dictionaries(NAMES, ARRAYS, max_size=4), st.data())
def test_a_file_of_tensors_gives_every_part(tensors: Tensors, data: st.DataObject) -> None:
    """Names, shapes, whole tensors and any part of them, as if all were in memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tensors")
        file.write_bytes(pack(tensors))
        reader = TensorFile(file)
        assert (set(reader), len(reader)) == (set(tensors), len(tensors))
        assert reader.stored_bytes == file.stat().st_size
        assert bits(dict(reader)) == bits(tensors)
        for name, array in tensors.items():
            assert reader.shape(name) == array.shape
            first = data.draw(st.integers(0, array.size))
            last = data.draw(st.integers(first, array.size))
            for each in (reader, reader_of(tensors)):
                got = each.part(name, first, last)
                assert got.dtype == array.dtype
                assert got.tobytes() == array.reshape(-1)[first:last].tobytes()


def test_a_name_that_is_not_in_a_file() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tensors")
        file.write_bytes(pack({"w": np.zeros(3)}))
        reader = TensorFile(file)
        assert "v" not in reader
        assert reader.get("v") is None


def test_a_file_that_has_become_shorter_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "tensors"
    file.write_bytes(pack({"w": np.zeros(10, np.float32)}))
    reader = TensorFile(file)
    os.truncate(file, file.stat().st_size - 8)
    assert reader.part("w", 0, 8).tolist() == [0] * 8
    with pytest.raises(BadPayload, check=has_code("FV2308", "'w'")):
        reader.part("w", 7, 10)


def test_a_file_that_holds_no_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    with pytest.raises(BadPayload):
        TensorFile(tmp_path / "file")


# --- arithmetic ---------------------------------------------------------------------------------------


def test_delta_is_after_minus_start() -> None:
    """5 - 3 = 2, whatever else training holds; start + delta gives back what came out."""
    after = {"w": np.array([5.0], np.float32), "other": np.array([9.0], np.float32)}
    start = {"w": np.array([3.0], np.float32)}
    change = delta(after, start)
    assert bits(change) == bits({"w": np.array([2.0], np.float32)})
    np.testing.assert_array_equal(start["w"] + change["w"], after["w"])


def test_total_bytes() -> None:
    """2*3 float32 are 24 bytes, 2 int64 are 16, an empty array is none: 40."""
    tensors: Tensors = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int64), "c": np.zeros((0, 4))}
    assert total_bytes(tensors) == 40


# --- checking -----------------------------------------------------------------------------------------

EXPECTED: dict[str, tuple[tuple[int | None, ...], str]] = {
    "w": ((2, 3), "float32"),
    "features": ((None, 4), "float32"),
    "labels": ((None,), "int64"),
}


def good(**changed: Any) -> Tensors:
    tensors: Tensors = {
        "w": np.zeros((2, 3), np.float32),
        "features": np.zeros((5, 4), np.float32),
        "labels": np.zeros(5, np.int64),
    }
    return {name: array for name, array in {**tensors, **changed}.items() if array is not None}


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_an_open_axis_takes_any_length(rows: int) -> None:
    check_tensors(good(features=np.zeros((rows, 4), np.float32)), EXPECTED, "result")


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"w": None}, "'w'"),
        ({"w": None, "features": None}, "'features'"),
        ({"extra": np.zeros(1)}, "'extra'"),
        ({"w": np.zeros((2, 3), np.float64)}, "'w'"),
        ({"labels": np.zeros(5, np.int32)}, "'labels'"),
        ({"w": np.zeros((3, 2), np.float32)}, "'w'"),
        ({"w": np.zeros(6, np.float32)}, "'w'"),
        ({"w": np.zeros((2, 3, 1), np.float32)}, "'w'"),
        ({"features": np.zeros((5, 3), np.float32)}, "'features'"),
        ({"w": np.full((2, 3), np.nan, np.float32)}, "'w'"),
        ({"features": np.array([[0, np.inf, 0, -np.inf]], np.float32)}, "'features'"),
    ],
)
def test_what_was_not_expected_is_refused(changed: dict[str, Any], name: str) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2308", name)):
        check_tensors(good(**changed), EXPECTED, "result of device-3")


def test_only_floating_tensors_can_be_infinite() -> None:
    check_finite({"labels": np.array([2**63 - 1]), "mask": np.array([True])}, "result")
    with pytest.raises(BadPayload, check=has_code("FV2308")):
        check_finite({"half": np.array([1.0, np.inf], np.float16)}, "result")
