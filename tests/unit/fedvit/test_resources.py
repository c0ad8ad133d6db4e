"""Figures that come from outside must be figures that something can be computed with."""

import math
from typing import Any

import msgspec
import pytest

from fedvit.resources import ProductRate, Speed

GOOD: dict[str, Any] = {
    "threads": 2,
    "products": (ProductRate("weights", 1, 64, 192, 768, 1e10),),
    "bytes_per_s": {"Add": 1e9},
    "node_s": 0.0,
}


def test_a_speed_survives_the_wire() -> None:
    speed = Speed(**GOOD)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(speed), type=Speed) == speed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"products": ()}, "'weights'"),
        ({"products": (ProductRate("attention", 1, 64, 192, 768, 1e10),)}, "'weights'"),
        ({"products": (ProductRate("weights", 1, 64, 192, 768, 0.0),)}, "the lowest is 0.0"),
        ({"bytes_per_s": {}}, "'Add'"),
        ({"bytes_per_s": {"Add": -1.0}}, "the lowest is -1.0"),
        ({"bytes_per_s": {"Add": math.inf}}, "finite"),
        ({"node_s": -1e-6}, "node_s"),
        ({"node_s": math.nan}, "node_s"),
    ],
)
def test_what_nothing_can_be_predicted_from_is_refused(wrong: dict[str, Any], said: str) -> None:
    """Also when a message brings it."""
    with pytest.raises(ValueError, match=said):
        Speed(**{**GOOD, **wrong})
    raw = msgspec.msgpack.encode({**GOOD, **wrong})
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.msgpack.decode(raw, type=Speed)
