"""The report of the process that serves, to the agent, the owner and the home: `STATE/models/SERVING.json`.

It also counts the starts with a model that has not proven itself yet, which must survive the process.
"""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from fedvit.files import atomic_write, storage_failed
from fedvit.wire.messages import Count

SERVING = "SERVING.json"
MAX_SERVING_BYTES = 1 << 16


class ServedAnswers(Struct, frozen=True):
    """Sums over the answers of one model."""

    pictures: Count = 0
    confidence: float = 0.0  # sum
    squares: float = 0.0  # sum of squared confidences
    unsure: Count = 0

    @property
    def mean_confidence(self) -> float | None:
        return self.confidence / self.pictures if self.pictures else None

    def add(self, confidence: float, *, is_unsure: bool) -> "ServedAnswers":
        """Return the sums with one more answer."""
        return ServedAnswers(
            self.pictures + 1, self.confidence + confidence, self.squares + confidence**2, self.unsure + is_unsure
        )


class ServingStatus(Struct, frozen=True, kw_only=True):
    """The state of the process that serves."""

    v: Literal[1] = 1
    process: int = 0
    written_s: float = 0.0  # wall clock
    name: str = ""  # the model that answers; "": none
    answered: ServedAnswers = ServedAnswers()  # by this model
    former: ServedAnswers = ServedAnswers()  # by the model before it, whose confidence is the band
    is_proven: bool = False  # this model has answered some pictures
    starting: str = ""  # a model that is opened, or that has not proven itself yet
    starts: Count = 0  # how often that has begun
    label: str = ""  # the last prediction
    confidence: float | None = None
    drift: dict[str, float] = {}  # measure -> wall clock of the alert
    trouble: str = ""  # the last one


def serving_file(state: Path) -> Path:
    """Return the file of the device with this state."""
    return state / "models" / SERVING


def read_serving(state: Path) -> ServingStatus | None:
    """Return the status; None if nothing has served, or the file is damaged. Raises StorageFailed."""
    file = serving_file(state)
    try:
        with file.open("rb") as stream:
            return msgspec.json.decode(stream.read(MAX_SERVING_BYTES), type=ServingStatus)
    except (FileNotFoundError, ValueError):  # the next one is written within seconds
        return None
    except OSError as error:
        raise storage_failed(f"cannot read {file}", error) from error


def write_serving(state: Path, status: ServingStatus, *, durable: bool = False) -> None:
    """Replace the status. Raises StorageFailed."""
    atomic_write(serving_file(state), msgspec.json.encode(status), private=True, durable=durable)


def describe_serving(serving: ServingStatus) -> str:
    """Return one line about the process that serves."""
    mean = serving.answered.mean_confidence
    parts = [f"serving: {serving.name} answered {serving.answered.pictures} pictures"]
    parts += [f"mean confidence {mean:.2f}"] if mean is not None else []
    parts += [f"drift of {', '.join(sorted(serving.drift))}"] if serving.drift else []
    parts += [serving.trouble] if serving.trouble else []
    parts += [] if serving.process else ["stopped"]
    return ", ".join(parts)
