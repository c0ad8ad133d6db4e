"""Our bytes are protobuf's: what the library writes is read, and what is written the library reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, StringStringEntryProto, TensorProto

from fedvit.errors import BadPayload
from fedvit.protobuf import bytes_field, fields, integers, number_field
from tests.support.codes import has_code

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
    assert b"".join(field.encode() for field in read) == written


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
    with pytest.raises(BadPayload, check=has_code("FV2307")):
        [*fields(written[:cut])]


def test_endless_numbers_and_groups_are_refused() -> None:
    with pytest.raises(BadPayload):
        [*fields(b"\x08" + b"\xff" * 12)]
    # a group is refused: Kind 3 begins a group, which onnx never writes: 1 << 3 | 3
    with pytest.raises(BadPayload, check=has_code("FV2307")):
        [*fields(b"\x0b")]


@pytest.mark.parametrize(
    "written",
    [
        b"\x88\x80\x80\x80\x10\x01",  # bit 32 set: other readers drop it and see field 1
        b"\x88\x80\x80\x80\x80\x80\x01\x01",
        b"\x88\x00\x01",  # a tag with a byte that says nothing
        b"\x0a\x81\x00A",  # a length
        b"\x08\x81\x80\x00",  # a value
        b"\x08" + b"\xff" * 9 + b"\x02",  # 65 bits
        b"\x02\x00",
        b"\x00",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01A",  # other readers take it for -1
        b"\x0c",
        b"\x0e",
        b"\x0d\x00\x00\x00",
    ],
)
def test_a_message_in_another_form_than_the_shortest_is_refused(written: bytes) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2307")):
        [*fields(written)]


@given(WHOLE)
def test_every_number_has_a_shortest_form(number: int) -> None:
    [field] = fields(number_field(2**29 - 1, number))
    assert (field.number, field.signed) == (2**29 - 1, number)


def test_a_part_of_a_message_is_read_where_it_lies() -> None:
    inner = number_field(3, 7)
    [outer] = fields(b"..." + bytes_field(1, inner) + b"...", 3, 5 + len(inner))
    assert outer.content == inner
    assert [field.value for field in fields(outer.message, outer.begin, outer.end)] == [7]
