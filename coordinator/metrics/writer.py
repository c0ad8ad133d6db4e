"""What every writer of metrics does, and what it is given."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

from coordinator.config import MetricsConfig
from coordinator.record.tables import RunStatus

Setting = str | int | float | bool


class RunInfo(NamedTuple):
    """What a writer knows of the run."""

    name: str
    folder: Path  # of the run: what a writer must remember lies here, and is removed with the run
    settings: dict[str, Setting]  # the run's configuration; keys of tables as "privacy.clip"


class RoundFigures(NamedTuple):
    """One round, as it is written."""

    round: int
    closed_at: datetime
    figures: dict[str, float]  # by tag, as "accuracy/mean"; all are finite


class Writer(ABC):
    """Writes the rounds of one run. Its library is imported when it is first needed. Every method may raise whatever
    that library raises; after an error `begin` is called again."""

    library: ClassVar[str]
    """The package that it needs; the extra of fedvit that installs it has the name of the writer."""
    remedy: ClassVar[str]
    """What an operator can do when it cannot write: a sentence."""

    def __init__(self, run: RunInfo, config: MetricsConfig) -> None:
        self._run = run
        self._config = config

    @property
    @abstractmethod
    def where(self) -> str:
        """What it writes to, for people."""

    @abstractmethod
    def begin(self) -> int:
        """Make what is written to, unless it is there: the newest round that it holds already, 0 for none."""

    @abstractmethod
    def write(self, rounds: Sequence[RoundFigures]) -> None:
        """Write rounds, in order, so that they survive the end of this process."""

    @abstractmethod
    def end(self, status: RunStatus) -> None:
        """Nothing more is written; the run may be resumed later."""
