"""Every codec: the stated error, the bytes that are known beforehand, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvit.errors import BadPayload, ConfigError
from fedvit.tensors import check_tensors, compute_packed_bytes, pack, unpack
from fedvit.updates import CODECS, Codec, Decoded, decode, decode_one, list_coded_forms, make_codec
from fedvit.updates.fp16 import Fp16
from fedvit.updates.int8 import Int8
from fedvit.updates.top_k import BLOCK, TopK
from tests.support.codes import has_code

EACH = [*(kind() for kind in CODECS.values()), TopK(share=0.5), TopK(share=0.001)]
each_codec = pytest.mark.parametrize("codec", EACH, ids=lambda codec: codec.text)

SHAPES = [(), (1,), (300,), (16, 16), (20, 15), (20, 16), (3, 200), (2, 3, 50), (1, 5, 64), (0, 4)]


@st.composite
def tensors(draw: st.DrawFn) -> np.ndarray:
    """Numbers of very different size, zeros and rows of zeros among them; all within float16's range."""
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest = draw(st.sampled_from([0.0, 1e-45, 1e-42, 1e-38, 1e-9, 1e-3, 1.0, 6e4]))
    value = rng.uniform(-1, 1, shape) * 10.0 ** rng.uniform(-6, 0, shape) * largest
    value = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.5])), 0, value).astype(np.float32)
    if value.ndim and draw(st.booleans()):
        value[: len(value) // 2] = 0
    return value


@each_codec
@given(value=tensors())
def test_what_is_decoded_is_within_the_stated_error(codec: Codec, value: np.ndarray) -> None:
    got = decode_one("w", codec.encode({"w": value}), value.shape)
    assert (got.shape, got.dtype) == (value.shape, np.dtype(np.float32))
    apart = np.abs(got.astype(np.float64) - value.astype(np.float64))
    assert (apart <= np.broadcast_to(codec.error_bound("w", value), value.shape)).all()


@each_codec
@given(value=tensors())
def test_bytes_are_known_beforehand_and_the_same_every_time(codec: Codec, value: np.ndarray) -> None:
    given = {"w": value, "b": np.ones(3, np.float32)}
    coded = codec.encode(given)
    expected: Any = {part: form for name in given for part, form in codec.form(name, given[name].shape).items()}
    check_tensors(coded, expected, "coded")
    content = pack(coded)
    assert len(content) == compute_packed_bytes(
        list_coded_forms(codec, {name: each.shape for name, each in given.items()})
    )
    assert pack(codec.encode(given)) == content
    again = decode(unpack(content), {name: each.shape for name, each in given.items()})
    assert again.keys() == given.keys()
    assert again["b"].tobytes() == given["b"].tobytes(), "what is small travels as it is"


@each_codec
@given(value=tensors() | st.just(np.random.default_rng(0).normal(size=(3, BLOCK)).astype(np.float32)), data=st.data())
def test_any_part_is_decoded_by_itself(codec: Codec, value: np.ndarray, data: st.DataObject) -> None:
    """Bit by bit as of the whole, also of a tensor that spans several blocks of top_k's places."""
    coded = codec.encode({"w": value})
    reader = Decoded(coded, {"w": value.shape})
    whole = decode(coded, {"w": value.shape})["w"]
    assert reader.shape("w") == value.shape
    first = data.draw(st.integers(0, value.size))
    last = data.draw(st.integers(first, value.size))
    got = reader.part("w", first, last)
    assert got.dtype == np.float32
    assert got.tobytes() == whole.reshape(-1)[first:last].tobytes()


def test_a_sparse_tensor_of_unknown_shape_is_refused() -> None:
    reader = Decoded(TopK().encode({"w": np.ones((20, 20), np.float32)}), {})
    for look in (reader.shape, reader.__getitem__):
        with pytest.raises(BadPayload, check=has_code("FV2309", "'w'")):
            look("w")


@each_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(codec: Codec, bad: float) -> None:
    value = np.ones((20, 20), np.float32)
    value[3, 4] = bad
    with pytest.raises(BadPayload, check=has_code("FV2309", "'w'")):
        codec.encode({"w": value})


@pytest.mark.parametrize("codec", [Fp16(), TopK()])
def test_what_float16_cannot_hold_is_refused(codec: Codec) -> None:
    value = np.full((20, 20), 65504.0, np.float32)
    codec.encode({"w": value})
    value[3, 4] = 65520.0
    with pytest.raises(BadPayload, check=has_code("FV2309", "'w'")):
        codec.encode({"w": value})


def test_int8_has_a_scale_for_every_row_and_a_quarter_of_the_bytes() -> None:
    value = np.full((20, 20), np.finfo(np.float32).max, np.float32)
    got = decode_one("w", Int8().encode({"w": value}), None)
    np.testing.assert_allclose(got, value, rtol=0.005)
    # int8 has a scale for every row: The row of small numbers keeps two digits beside one of large ones: 127 steps
    # each
    value = np.stack([np.linspace(-1, 1, 128), np.linspace(-1000, 1000, 128)]).astype(np.float32)
    coded = Int8().encode({"w": value})
    np.testing.assert_allclose(coded["w#scale"], [1 / 127, 1000 / 127], rtol=1e-6)
    assert coded["w"].min() == -127
    assert coded["w"].max() == 127
    # int8 takes a quarter of a vit: 768 numbers of one byte share four bytes of scale
    shapes = {f"blocks.{n}.mlp.fc1.weight": (3072, 768) for n in range(12)}
    plain, coded = (compute_packed_bytes(list_coded_forms(make_codec(text), shapes)) for text in ("none", "int8"))
    assert 0.25 < coded / plain < 0.252


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(BadPayload, check=has_code("FV2309", "'w'")):
        Fp16().encode({"w": np.arange(3)})


def test_top_k_keeps_the_largest_also_beyond_two_bytes() -> None:
    value = np.zeros(300, np.float32)
    value[[7, 250]] = [-5.0, 3.0]
    value[[20, 100, 200]] = 1.0
    coded = TopK(share=0.013).encode({"w": value})  # 3.9 entries, so 4
    assert coded["w#index"].tolist() == [7, 20, 100, 250]
    assert coded["w"].tolist() == [-5.0, 1.0, 1.0, 3.0]
    # top k finds places beyond two bytes: An empty block of 65536 entries lies between two that are not
    value = np.zeros(3 * BLOCK + 5, np.float32)
    places = [1, BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 4]
    value[places] = [1, 2, 3, 4]
    codec = TopK(share=4 / value.size)
    coded = codec.encode({"w": value})
    assert coded["w#count"].tolist() == [2, 0, 1, 1]
    assert decode_one("w", coded, value.shape).tobytes() == value.tobytes()


def _sparse() -> dict[str, np.ndarray]:
    return TopK(share=0.01).encode({"w": np.linspace(0, 1, 2 * BLOCK, dtype=np.float32)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda coded: coded["w#index"].__setitem__(slice(0, 2), 5),  # twice the same
        lambda coded: coded["w#index"].__setitem__(0, 65535),  # not ascending
        lambda coded: coded["w#count"].__setitem__(0, -1),
        lambda coded: coded["w#count"].__setitem__(0, 7),
    ],
)
def test_places_that_cannot_be_are_refused(damage: Callable[[dict[str, np.ndarray]], None]) -> None:
    coded = _sparse()
    damage(coded)
    with pytest.raises(BadPayload, check=has_code("FV2309", "'w'")):
        decode_one("w", coded, (2 * BLOCK,))


def test_sparse_tensors_that_do_not_fit_are_refused() -> None:
    coded = TopK(share=0.01).encode({"w": np.ones(300, np.float32)})
    coded["w#index"][-1] = 300
    with pytest.raises(BadPayload):
        decode_one("w", coded, (300,))
    with pytest.raises(BadPayload, check=has_code("FV2309")):
        decode(_sparse(), {})


@each_codec
def test_a_codec_is_written_as_text(codec: Codec) -> None:
    assert make_codec(codec.text) == codec
    assert codec.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4", "unknown codec 'int4'; known are none, fp16, int8, top_k"),
        ("int8:share=0.5", "codec 'int8:share=0.5': 'share=0.5' is not one of its options (it has none)"),
        ("top_k:k=5", "codec 'top_k:k=5': 'k=5' is not one of its options (share)"),
        ("top_k:share=much", "codec 'top_k:share=much': share = 'much' is not a number"),
        ("top_k:share=0.6", "top_k: share = 0.6 must be above 0 and at most 0.5"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_codec(text)
    assert str(refused.value) == message


@pytest.mark.parametrize("codec", [kind() for kind in CODECS.values()], ids=lambda codec: codec.text)
def test_with_error_feedback_the_sum_of_what_arrives_is_the_sum_of_what_was_meant(codec: Codec) -> None:
    """After any number of rounds what is still owed is all that is missing; and it does not grow."""
    rng = np.random.default_rng(0)
    meant, arrived = np.zeros((40, 40)), np.zeros((40, 40))
    residual, largest = np.zeros((40, 40), np.float32), []
    for _ in range(60):
        delta = rng.normal(0.1, 1.0, (40, 40)).astype(np.float32)
        total = delta + residual
        got = decode_one("w", codec.encode({"w": total}), total.shape)
        residual = total - got
        meant += delta
        arrived += got
        largest.append(float(np.abs(residual).max()))
    np.testing.assert_allclose(arrived + residual, meant, atol=1e-3)
    assert max(largest[40:]) <= 2.5 * max(largest[20:40]) + 1e-6
    if codec.name != "top_k":
        np.testing.assert_allclose(arrived, meant, atol=0.05)
