"""The interface of trackers: writers, and the figures and settings that they receive from the read model."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec

from coordinator.config import TABLES, RunConfig, TrackersConfig
from coordinator.record.record import Record
from coordinator.record.tables import ENDED, RunStatus
from coordinator.run_view import RoundView, read_round

LAST_OF_ROUND = "devices/accepted"
"""The tag that every round has; it is written last."""
_IN_PARTS = ("options", "model_options", *TABLES)
_ELSEWHERE = ("trackers", "alerts")
"""Tables that have no influence on training."""

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
    """Advice for the operator if it cannot write: a sentence."""

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


def tag_figures(view: RoundView) -> dict[str, float]:
    """Return the known, finite figures of a round, by tag."""
    generator = view.generator
    figures = {
        "accuracy/mean": view.accuracy_mean,
        "accuracy/lowest": view.accuracy_lowest,
        "accuracy/highest": view.accuracy_highest,
        "loss/train": view.train_loss,
        "bytes/down": view.bytes_down,
        "bytes/up": view.bytes_up,
        "flops/devices": view.flops or None,  # 0: no device counted them
        "seconds/devices": view.devices_s,
        "seconds/server": view.server_s,
        "epsilon/updates": view.epsilon,
        "epsilon/row": view.row_epsilon,
        "epsilon/upload": view.upload_epsilon,
        "epsilon/device": view.device_epsilon,
        "generator/difference": generator.difference if generator else None,
        "generator/attention_entropy": view.figures.get("attention_entropy"),
        "devices/asked": view.cohort,
        LAST_OF_ROUND: view.accepted,
    }
    return {tag: float(value) for tag, value in figures.items() if value is not None and math.isfinite(value)}


def read_rounds(store: Record, run: str, config: RunConfig, after: int, most: int) -> list[TaggedRound]:
    """Read the next complete rounds after `after`, in order: closed, and evaluated if an evaluation is due."""
    over = store.runs.read(run).status in ENDED
    rounds: list[TaggedRound] = []
    for number in range(after + 1, after + 1 + most):
        record = store.rounds.read(run, number)
        if record is None or record.closed_at is None:
            break
        due = number % config.evaluate_every == 0 or number == config.rounds
        if config.stop.seconds is not None or config.stop.epsilon is not None:
            due = due or store.rounds.read(run, number + 1) is None  # the run may stop here, and is evaluated then
        if due and not record.evaluated and not over:
            break
        closed_at = datetime.fromisoformat(record.closed_at)
        rounds.append(TaggedRound(number, closed_at, tag_figures(read_round(store, run, number))))
    return rounds


def flatten_settings(config: RunConfig) -> dict[str, Setting]:
    """Return the configuration as a flat mapping: keys of tables as "privacy.clip", lists and tables as JSON."""
    settings: dict[str, Setting] = {}
    for key, value in msgspec.to_builtins(config).items():
        if key in _ELSEWHERE:
            continue
        if value is None:
            continue
        inside = {f"{key}.{name}": inner for name, inner in value.items()} if key in _IN_PARTS else {key: value}
        for name, inner in inside.items():
            if inner is not None:
                settings[name] = inner if isinstance(inner, str | int | float) else json.dumps(inner)
    return settings
