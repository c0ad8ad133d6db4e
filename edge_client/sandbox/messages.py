"""Messages between the device and the process that runs its graphs.

Requests are pickled, since the process trusts the device. Replies are not: a hostile graph may have made them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from edge_client.work.answer_tally import ErrorSum, LabelSum
from edge_client.work.frozen_features import CutGraph
from edge_client.work.runtime import Challenge, ModelTest, Seeds
from fedvit.comparison import Comparison
from fedvit.data.folder import Split
from fedvit.errors import BadPayload
from fedvit.program import MAX_PHASES, Program
from fedvit.tensors import Tensors
from fedvit.wire.messages import ClassCount

MAX_REPLY_BYTES = 16 << 20
"""The largest reply: counts of 1,000 classes with what was confused, or the failures of 100,000 images."""

ErrorKind = Literal["stopped", "memory", "payload", "data", "engine"]
Text = Annotated[str, Meta(max_length=4096)]


@dataclass(frozen=True)
class TrainRequest:
    """The training of one task."""

    program: Program
    graphs: dict[str, Path]  # digest -> file
    values: Tensors
    images: Split
    seeds: Seeds
    lr_scale: float
    cuts: dict[str, CutGraph]  # by digest


@dataclass(frozen=True)
class EvaluateRequest:
    """The evaluation of one task."""

    graphs: dict[str, Path]
    test: ModelTest


@dataclass(frozen=True)
class CompareRequest:
    """The comparison of one task."""

    graphs: dict[str, Path]
    test: ModelTest
    challenge: Challenge


class Ready(Struct, frozen=True, tag="ready"):
    """The process is confined, and waits for requests."""

    missing: tuple[Text, ...]  # protections that this system does not offer


class StepsDone(Struct, frozen=True, tag="steps"):
    """The steps since the last report."""

    done: Annotated[int, Meta(ge=0)]
    total: int
    loss: float | None
    flops: int
    seconds: Annotated[tuple[tuple[float, ...], ...], Meta(max_length=MAX_PHASES)]  # of each new step, phase by phase


class Unreadable(Struct, frozen=True):
    """An image that could not be decoded."""

    files: Text  # "train" or "test"
    row: Annotated[int, Meta(ge=0)]
    reason: Text


class TrainingDone(Struct, frozen=True, tag="trained"):
    """The outcome of a training; its tensors lie in the shared memory."""

    samples: int
    collected: Annotated[dict[Text, Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_PHASES)]  # output -> rows
    loss: float
    steps: int
    step_s: float | None
    flops: int
    unreadable: tuple[Unreadable, ...]


class EvaluationDone(Struct, frozen=True, tag="evaluated"):
    """The outcome of an evaluation."""

    correct: float
    samples: int
    flops: int
    by_class: tuple[ClassCount, ...]
    unreadable: tuple[Unreadable, ...]
    errors: dict[ErrorSum, float] = {}
    labels: dict[LabelSum, float] = {}


class ComparisonDone(Struct, frozen=True, tag="compared"):
    """The outcome of a comparison; the files of the bundle lie in the shared memory."""

    comparison: Comparison
    with_champion: bool
    files: Annotated[dict[Text, Annotated[int, Meta(ge=0)]], Meta(max_length=16)]  # name -> bytes
    flops: int
    unreadable: tuple[Unreadable, ...]


class WorkFailed(Struct, frozen=True, tag="failed"):
    """The error that ended a request."""

    kind: ErrorKind
    code: Annotated[str, Meta(max_length=16)]
    reason: Text
    unreadable: tuple[Unreadable, ...]


Request = TrainRequest | EvaluateRequest | CompareRequest
Done = TrainingDone | EvaluationDone | ComparisonDone
Reply = Ready | StepsDone | Done | WorkFailed

_REPLIES = msgspec.msgpack.Decoder(Reply)


def decode_reply(raw: bytes) -> Reply:
    """Raises BadPayload for bytes that are no reply."""
    try:
        reply: Reply = _REPLIES.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the latter two through
        raise BadPayload(
            "FV1481", f"the process that runs graphs sent {len(raw)} bytes that are no reply: {error}"
        ) from error
    return reply
