"""The figures of a round, and the settings of a run, as writers receive them; from the read model."""

import json
import math
from datetime import datetime

import msgspec

from coordinator.config import TABLES, RunConfig
from coordinator.record.record import Record
from coordinator.record.tables import ENDED
from coordinator.run_view import RoundView, read_round
from coordinator.views.trackers.writer import Setting, TaggedRound

LAST_OF_ROUND = "devices/accepted"
"""The tag that every round has; it is written last."""
_IN_PARTS = ("options", "model_options", *TABLES)
_ELSEWHERE = ("trackers", "alerts")
"""Tables that have no influence on training."""


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
        if due and not record.evaluated and not over:
            break
        closed_at = datetime.fromisoformat(record.closed_at)
        rounds.append(TaggedRound(number, closed_at, tag_figures(read_round(store, run, number))))
    return rounds


def settings_of(config: RunConfig) -> dict[str, Setting]:
    """Return the configuration as a flat mapping: keys of tables as "privacy.clip", lists and tables as JSON."""
    settings: dict[str, Setting] = {}
    for key, value in msgspec.to_builtins(config).items():
        if key in _ELSEWHERE:
            continue
        inside = {f"{key}.{name}": inner for name, inner in value.items()} if key in _IN_PARTS else {key: value}
        for name, inner in inside.items():
            if inner is not None:
                settings[name] = inner if isinstance(inner, str | int | float) else json.dumps(inner)
    return settings
