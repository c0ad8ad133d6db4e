"""Names of tasks in logs and traces, the same at the coordinator and on the device: RUN.ROUND.DEVICE.KIND.ATTEMPT."""

from typing import Any, NamedTuple, Protocol

from fedvit.wire.topics import is_name

KINDS = ("train", "evaluate", "compare")


class Attempt(Protocol):
    """A message about one attempt at a task."""

    @property
    def run(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def kind(self) -> Any: ...
    @property
    def attempt(self) -> int: ...


class TaskName(NamedTuple):
    """The name of one attempt at a task."""

    run: str
    round: int
    device: str
    kind: str  # one of KINDS
    attempt: int = 0  # from 1; 0: not known, as in messages of older software

    @classmethod
    def of(cls, message: Attempt, device: str) -> "TaskName":
        """Name the task of a message."""
        return cls(message.run, message.round, device, message.kind, message.attempt)

    @classmethod
    def parse(cls, text: str) -> "TaskName | None":
        """Read the name of a task; None for another text.

        >>> TaskName.parse("first.3.pi-1.train.2")
        TaskName(run='first', round=3, device='pi-1', kind='train', attempt=2)
        """
        match text.split("."):
            case [run, number, device, kind, attempt] if (
                is_name(run) and is_name(device) and kind in KINDS and number.isdecimal() and attempt.isdecimal()
            ):
                return cls(run, int(number), device, kind, int(attempt))
        return None

    def __str__(self) -> str:
        return ".".join(map(str, self))

    def fields(self) -> dict[str, Any]:
        """Return the fields of a log line about the task."""
        return {**self._asdict(), "task": str(self)}


def describe_attempt(message: Attempt) -> dict[str, object]:
    """Return the fields of a device's log line about the task of a message."""
    return {"run": message.run, "round": message.round, "kind": message.kind, "attempt": message.attempt}
