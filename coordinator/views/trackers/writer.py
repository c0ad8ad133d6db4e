"""The interface of metrics writers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

from coordinator.config import TrackersConfig
from coordinator.record.tables import RunStatus

Setting = str | int | float | bool


class RunInfo(NamedTuple):
    """The run, as a writer sees it."""

    name: str
    folder: Path  # of the run; a writer keeps its own files here
    settings: dict[str, Setting]  # the run's configuration; keys of tables as "privacy.clip"


class TaggedRound(NamedTuple):
    """The figures of one round as a tracker receives them."""

    round: int
    closed_at: datetime
    figures: dict[str, float]  # by tag, as "accuracy/mean"; all are finite


class Writer(ABC):
    """Writes the rounds of one run. Its library is imported when it is first needed. Every method may raise errors of
    that library; after an error `begin` is called again."""

    library: ClassVar[str]
    """The required package; the extra of fedvit with the writer's name installs it."""
    remedy: ClassVar[str]
    """What the operator can do if it cannot write: a sentence."""

    def __init__(self, run: RunInfo, config: TrackersConfig) -> None:
        self._run = run
        self._config = config

    @property
    @abstractmethod
    def where(self) -> str:
        """The target, as text for messages."""

    @abstractmethod
    def begin(self) -> int:
        """Create the target unless it exists; returns the newest round that it has, 0 for none."""

    @abstractmethod
    def write(self, rounds: Sequence[TaggedRound]) -> None:
        """Write rounds, in order; they must survive the end of this process."""

    @abstractmethod
    def end(self, status: RunStatus) -> None:
        """Finish; the run may be resumed later."""
