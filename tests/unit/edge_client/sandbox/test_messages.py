"""Replies of a process that a hostile graph may have taken over."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.sandbox.messages import Ready, StepsDone, WorkFailed, decode_reply
from fedvit.errors import BadPayload
from tests.support.codes import has_code


@pytest.mark.parametrize(
    "reply", [Ready(("Landlock",)), StepsDone(1, 2, 0.5, 10, ((0.1,),)), WorkFailed("data", "FV1403", "no image", ())]
)
def test_replies_are_read_as_they_were_written(reply: Ready | StepsDone | WorkFailed) -> None:
    assert decode_reply(msgspec.msgpack.encode(reply)) == reply


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "steps", "done": -1, "total": 1, "loss": None, "flops": 0, "seconds": []},
        {"type": "failed", "kind": "other", "code": "", "reason": "", "unreadable": []},
        {"type": "failed", "kind": "data", "code": "", "reason": "x" * 5000, "unreadable": []},
        {"type": "failed", "kind": "data", "code": "", "reason": "", "unreadable": [{"files": "train", "row": -1}]},
        {"type": "another"},
    ],
)
def test_what_is_no_reply_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadPayload, check=has_code("FV1481")):
        decode_reply(msgspec.msgpack.encode(wrong))


@given(st.binary(max_size=200))
def test_bytes_are_a_reply_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadPayload):
        decode_reply(raw)
