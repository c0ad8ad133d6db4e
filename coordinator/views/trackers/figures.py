"""The figures of a round, and the settings of a run, as writers receive them; from the read model."""

import json
import math
from datetime import datetime

import msgspec

from coordinator.config import TABLES, RunConfig
from coordinator.record.record import Record
from coordinator.record.summary import RoundSummary, read_round
from coordinator.record.tables import ENDED
from coordinator.views.trackers.writer import RoundFigures, Setting

LAST_OF_ROUND = "devices/accepted"
"""The tag that every round has; it is written last."""
_IN_PARTS = ("options", "model_options", *TABLES)
_ELSEWHERE = ("metrics", "alerts")
"""Tables that have no influence on training."""


def figures_of(summary: RoundSummary) -> dict[str, float]:
    """The known, finite figures of a round, by tag."""
    found = {
        "accuracy/mean": summary.accuracy_mean,
        "accuracy/lowest": summary.accuracy_lowest,
        "accuracy/highest": summary.accuracy_highest,
        "loss/train": summary.train_loss,
        "bytes/down": summary.bytes_down,
        "bytes/up": summary.bytes_up,
        "flops/devices": summary.flops or None,  # 0: no device counted them
        "seconds/devices": summary.devices_s,
        "seconds/server": summary.server_s,
        "epsilon/updates": summary.epsilon,
        "epsilon/row": summary.row_epsilon,
        "epsilon/upload": summary.upload_epsilon,
        "epsilon/device": summary.device_epsilon,
        "generator/difference": summary.generator.difference if summary.generator else None,
        "generator/attention_entropy": summary.figures.get("attention_entropy"),
        "devices/asked": summary.cohort,
        LAST_OF_ROUND: summary.accepted,
    }
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}


def read_rounds(store: Record, run: str, config: RunConfig, after: int, most: int) -> list[RoundFigures]:
    """The next complete rounds after `after`, in order: closed, and evaluated if an evaluation is due."""
    over = store.runs.read(run).status in ENDED
    found: list[RoundFigures] = []
    for number in range(after + 1, after + 1 + most):
        record = store.rounds.read(run, number)
        if record is None or record.closed_at is None:
            break
        due = number % config.evaluate_every == 0 or number == config.rounds
        if due and not record.evaluated and not over:
            break
        closed_at = datetime.fromisoformat(record.closed_at)
        found.append(RoundFigures(number, closed_at, figures_of(read_round(store, run, number))))
    return found


def settings_of(config: RunConfig) -> dict[str, Setting]:
    """The configuration as a flat mapping: keys of tables as "privacy.clip", lists and tables as JSON."""
    settings: dict[str, Setting] = {}
    for key, value in msgspec.to_builtins(config).items():
        if key in _ELSEWHERE:
            continue
        inside = {f"{key}.{name}": inner for name, inner in value.items()} if key in _IN_PARTS else {key: value}
        for name, inner in inside.items():
            if inner is not None:
                settings[name] = inner if isinstance(inner, str | int | float) else json.dumps(inner)
    return settings
