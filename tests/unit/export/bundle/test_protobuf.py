"""Our bytes are protobuf's: what the library writes is read, and what is written the library reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, StringStringEntryProto, TensorProto

from export.bundle.protobuf import bytes_field, fields, integers, number_field
from fedvit.errors import BadPayload

WHOLE = st.integers(-(2**63), 2**63 - 1)


@given(WHOLE, st.text())
def test_the_library_reads_what_is_written(number: int, text: str) -> None:
    read = AttributeProto.FromString(number_field(3, number) + bytes_field(1, text))
    assert (read.i, read.name) == (number, text)


@given(st.lists(WHOLE), st.floats(width=32, allow_nan=False), st.text())
def test_what_the_library_writes_is_read_and_put_back(numbers: list[int], height: float, text: str) -> None:
    """Numbers each by itself, and a fixed-width field, which is only passed on."""
    written = AttributeProto(name=text, ints=numbers, f=height).SerializeToString()
    read = [*fields(written)]
    assert integers(field for field in read if field.number == 8) == tuple(numbers)
    assert b"".join(field.encoded() for field in read) == written


@given(st.lists(WHOLE))
def test_packed_numbers_are_read(numbers: list[int]) -> None:
    """TensorProto packs int64_data."""
    written = TensorProto(int64_data=numbers).SerializeToString()
    assert integers(fields(written)) == tuple(numbers)


@given(st.text(min_size=1), st.text(min_size=1), st.data())
def test_a_message_cut_short_is_refused(key: str, value: str, data: st.DataObject) -> None:
    """Wherever it is cut, but between two fields."""
    written = StringStringEntryProto(key=key, value=value).SerializeToString()
    first = len(StringStringEntryProto(key=key).SerializeToString())
    cut = data.draw(st.integers(1, len(written) - 1).filter(lambda place: place != first))
    with pytest.raises(BadPayload, match="not protobuf"):
        [*fields(written[:cut])]


def test_a_number_without_end_is_refused() -> None:
    with pytest.raises(BadPayload, match="does not end"):
        [*fields(b"\x08" + b"\xff" * 12)]


def test_a_group_is_refused() -> None:
    """Kind 3 begins a group, which onnx never writes: 1 << 3 | 3."""
    with pytest.raises(BadPayload, match="kind 3"):
        [*fields(b"\x0b")]
