"""The read model of a run: the content of the record, as data.

`coordinator show`, `runs`, `report` and `status`, experiments and the demo only read this, and present it in their own
way.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from coordinator.config import RunConfig
from coordinator.record.liveness import current_status
from coordinator.record.privacy import DEVICE_EPSILON, EPSILON, ROW_EPSILON, UPLOAD_EPSILON
from coordinator.record.record import Record
from coordinator.record.tables import DeviceTotals, RefusalRecord, ResultRecord, RoundTotals, RunRecord
from coordinator.record.totals import evaluated, trained, with_result
from fedvit.errors import ConfigError
from fedvit.files import folder_bytes
from fedvit.resources import BudgetKind
from profiles.report.document import AttentionEntropy, DeviceRound, FeatureRound, GeneratorRound


class RoundSummary(RoundTotals, frozen=True, kw_only=True):
    """One round."""

    round: int
    accuracy: dict[str, float]  # by device; empty if not evaluated, or thinned
    figures: dict[str, float]

    @property
    def devices_s(self) -> float | None:
        """From the first task to the last result."""
        return self.figures.get("devices_s")

    @property
    def server_s(self) -> float | None:
        return self.figures.get("server_s")

    @property
    def late(self) -> int:
        """Results of earlier rounds that the round used."""
        return int(self.figures.get("late", 0))

    @property
    def declined(self) -> int:
        return int(self.figures.get("declined", 0))

    @property
    def epsilon(self) -> float | None:
        """Epsilon of devices' updates, over all rounds up to this one. All epsilons are None without the noise."""
        return self.figures.get(EPSILON)

    @property
    def row_epsilon(self) -> float | None:
        """Epsilon of one row of features in one upload."""
        return self.figures.get(ROW_EPSILON)

    @property
    def upload_epsilon(self) -> float | None:
        """Epsilon of all rows of the round's largest upload."""
        return self.figures.get(UPLOAD_EPSILON)

    @property
    def device_epsilon(self) -> float | None:
        """Epsilon of all features of one device, over all rounds up to this one."""
        return self.figures.get(DEVICE_EPSILON)

    @property
    def generator(self) -> GeneratorRound | None:
        """State of the method's generator; None without one, and of a round with one device."""
        if "generated_difference" not in self.figures:
            return None
        attention = None
        if "attention_entropy" in self.figures:
            attention = AttentionEntropy(
                mean=self.figures["attention_entropy"],
                lowest=self.figures["attention_entropy_lowest"],
                highest=self.figures["attention_entropy_highest"],
            )
        return GeneratorRound(difference=self.figures["generated_difference"], attention=attention)

    @property
    def features(self) -> FeatureRound | None:
        """Features that devices sent in the round; None for a method that sends none."""
        if "uploaded_features" not in self.figures:
            return None
        return FeatureRound(
            uploads=self.accepted,
            features=int(self.figures["uploaded_features"]),
            unequal=int(self.figures["unequal_uploads"]),
        )


class DeviceSummary(Struct, frozen=True, kw_only=True):
    """One device over the whole run. What was not measured is None."""

    device: str
    train_samples: int
    test_samples: int
    rounds: int  # trained and accepted
    accuracy: float | None  # in its last evaluation
    bytes_down: int
    bytes_up: int
    step_s: float | None  # mean over rounds
    peak_rss_bytes: int | None
    flops_per_round: int | None
    budget_kept: int  # tasks that ended within the device's budgets
    budget_broken: int  # tasks that did not, whether the device stopped them or not
    broke: dict[BudgetKind, int]  # how often each budget was broken
    energy_j: float | None = None  # sum over the rounds that measured it
    temperature_c: float | None = None  # highest of its last training
    throttled: bool | None = None  # in its last training
    battery_percent: int | None = None  # at the end of its newest task
    charging: bool | None = None


class RunHead(Struct, frozen=True, kw_only=True):
    """Identifies a run, and distinguishes it from others."""

    run: str
    created_at: str  # ISO 8601, UTC
    status: str
    reason: str | None  # why it failed or was interrupted
    method: str
    model: str
    seed: int
    rounds_planned: int
    settings: dict[str, Any]  # values that differ from the defaults; keys of tables as "privacy.clip"


class RunProgress(RunHead, frozen=True, kw_only=True):
    """How far a run is."""

    rounds: int
    mean_accuracy: float | None  # of its newest evaluation


class RunLine(RunProgress, frozen=True, kw_only=True):
    """One run in the list of runs."""

    bytes: int  # of its folder; the record is one file of all runs


class RunSummary(RunHead, frozen=True, kw_only=True):
    """One run from the totals of its rounds and devices."""

    protocol: str | None  # how accuracy is measured: papers differ
    classes: tuple[str, ...]
    rounds: list[RoundSummary]
    devices: list[DeviceSummary]
    refusals: list[RefusalRecord]
    strikes: dict[str, int] = {}  # by device, over the whole run
    quarantined: dict[str, str] = {}  # devices that are in quarantine -> why
    epsilon: float | None = None  # differential privacy of devices' updates after the last round; None: none
    feature_epsilon: float | None = None  # of all features of one device over the run
    mean_accuracy: float | None
    bytes_down: int
    bytes_up: int
    max_edge_rss_bytes: int | None


def summarise(store: Record, run: str, accuracy_of: int | None = None, refusals_of: int | None = None) -> RunSummary:
    """Summarise one run from its totals, with accuracies by device of the newest `accuracy_of` rounds (default: all),
    and the newest `refusals_of` refusals (default: all). Raises ConfigError if there is no such run."""
    record = store.runs.read(run)
    last = store.rounds.find_last(run)
    accuracy = store.rounds.read_accuracy(run, 0 if accuracy_of is None else last - accuracy_of + 1)
    rounds = {
        entry.round: _round(entry.round, entry.totals, entry.figures, accuracy.get(entry.round, {}))
        for entry in store.rounds.read_totals(run)
    }
    known = {entry.device: entry.totals for entry in store.devices.read_all(run)}
    for number, totals, results in _under_way(store, run, last, rounds.get(last)):
        before = rounds.get(number)
        rounds[number] = _round(number, totals, before.figures if before else {}, _accuracies(results))
        for result in results:
            known[result.device] = with_result(known.get(result.device, DeviceTotals()), result)
    listed = [rounds[number] for number in sorted(rounds)]
    active = (name for name, totals in known.items() if totals.results or totals.budget_broken)
    devices = [_device(name, known[name]) for name in sorted(active, key=natural_order)]
    strikes = store.devices.count_strikes(run)
    peaks = [device.peak_rss_bytes for device in devices if device.peak_rss_bytes is not None]
    return RunSummary(
        **_head(store, record),
        protocol=record.protocol,
        classes=record.classes,
        rounds=listed,
        devices=devices,
        refusals=store.devices.read_refusals(run, refusals_of),
        strikes={name: strikes[name].ever for name in sorted(strikes, key=natural_order)},
        quarantined={
            record.device: record.reason for record in store.devices.read_quarantines(run) if record.holds(last or 1)
        },
        epsilon=_newest(entry.epsilon for entry in reversed(listed)),
        feature_epsilon=_newest(entry.device_epsilon for entry in reversed(listed)),
        mean_accuracy=_newest(entry.accuracy_mean for entry in reversed(listed)),
        bytes_down=sum(device.bytes_down for device in devices),
        bytes_up=sum(device.bytes_up for device in devices),
        max_edge_rss_bytes=max(peaks, default=None),
    )


def overview(store: Record, folder: Path) -> list[RunLine]:
    """All runs, newest first; `folder` is that of the runs."""
    return [
        RunLine(**msgspec.structs.asdict(entry), bytes=folder_bytes(folder / entry.run)) for entry in progress(store)
    ]


def progress(store: Record) -> list[RunProgress]:
    """How far all runs are, newest first."""
    return [
        RunProgress(
            **_head(store, record),
            rounds=store.rounds.find_last(record.id),
            mean_accuracy=store.rounds.read_mean_accuracy(record.id),
        )
        for record in store.runs.read_all()
    ]


def run_head(store: Record, record: RunRecord) -> RunHead:
    """Identify a run."""
    return RunHead(**_head(store, record))


def _head(store: Record, record: RunRecord) -> dict[str, Any]:
    config = record.config
    return {
        "run": record.id,
        "created_at": record.created_at,
        "status": current_status(store, record),
        "reason": record.reason,
        "method": str(config.get("method")),
        "model": str(config.get("model")),
        "seed": int(config.get("seed", 0)),
        "rounds_planned": int(config.get("rounds", 0)),
        "settings": _settings(config),
    }


def run_settings(config: RunConfig) -> dict[str, Any]:
    """Values that differ from the defaults; keys of tables as "privacy.clip"."""
    return _settings(json.loads(msgspec.json.encode(config)))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_differing(config, json.loads(msgspec.json.encode(RunConfig()))))


def _differing(settings: Mapping[str, Any], usual: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        default = usual.get(name)
        if isinstance(value, dict):
            yield from _differing(value, default if isinstance(default, dict) else {}, f"{table}{name}.")
        elif name not in usual or value != default:
            yield f"{table}{name}", value


def read_round(store: Record, run: str, number: int) -> RoundSummary:
    """A closed round from its totals, without accuracies by device. Raises ConfigError if there is none."""
    entry = store.rounds.read(run, number)
    if entry is None or entry.totals is None:
        raise ConfigError(f"run {run!r} has no round {number} that is closed")
    return _round(number, entry.totals, entry.figures, {})


def device_rounds(store: Record, summary: RunSummary) -> dict[str, list[DeviceRound]]:
    """The outcome of every ended training task, by device, of rounds that still have details."""
    run = summary.run
    expected, accuracy = store.tasks.read_expected(run), {entry.round: entry.accuracy for entry in summary.rounds}
    results = {(entry.round, entry.device): entry for entry in store.tasks.read_results(run) if entry.kind == "train"}
    missing = {(entry.round, entry.device): entry for entry in summary.refusals if entry.kind != "evaluate"}
    found: dict[str, list[DeviceRound]] = defaultdict(list)
    for record in store.rounds.read_all(run):
        for device in record.cohort:
            task, of_device = (record.round, device), found[device]
            result, refusal = results.get(task), missing.get(task)
            if result is None and record.closed_at is None:
                continue
            of_device.append(
                DeviceRound(
                    round=record.round,
                    status="accepted" if result else "refused" if refusal and not refusal.lost else "dropped out",
                    expected=expected.get(task),
                    measured=result.use if result else None,
                    accuracy=accuracy.get(record.round, {}).get(device),
                    reason=refusal.reason if refusal and not result else None,
                )
            )
    return found


def natural_order(name: str) -> list[str | int]:
    """Sort key for names that compares the numbers in them as numbers.

    >>> sorted(["device-10", "device-2", "pi"], key=natural_order)
    ['device-2', 'device-10', 'pi']
    """
    return [int(part) if position % 2 else part for position, part in enumerate(re.split(r"([0-9]+)", name))]


def _under_way(
    store: Record, run: str, last: int, newest: RoundSummary | None
) -> Iterator[tuple[int, RoundTotals, list[ResultRecord]]]:
    """Rounds whose totals do not include all results yet: open rounds, and the last one while it is evaluated."""
    for entry in store.rounds.read_open(run):
        results = store.tasks.read_used_in(run, entry.round)
        yield entry.round, trained(RoundTotals(cohort=len(entry.cohort)), results), results
    record = store.rounds.read(run, last)
    if (
        record
        and record.totals
        and not record.evaluated
        and (results := store.tasks.read_used_in(run, last, "evaluate"))
    ):
        yield last, evaluated(record.totals, results).totals, results


def _accuracies(results: list[ResultRecord]) -> dict[str, float]:
    return evaluated(RoundTotals(cohort=0), [result for result in results if result.kind == "evaluate"]).accuracy


def _newest(values: Iterator[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _round(number: int, totals: RoundTotals, figures: dict[str, float], accuracy: dict[str, float]) -> RoundSummary:
    return RoundSummary(round=number, accuracy=accuracy, figures=figures, **msgspec.structs.asdict(totals))


def _device(name: str, totals: DeviceTotals) -> DeviceSummary:
    return DeviceSummary(
        device=name,
        train_samples=totals.train_samples,
        test_samples=totals.test_samples,
        rounds=totals.rounds,
        accuracy=totals.accuracy,
        bytes_down=totals.bytes_down,
        bytes_up=totals.bytes_up,
        step_s=totals.step_s / totals.step_rounds if totals.step_rounds else None,
        peak_rss_bytes=totals.peak_rss_bytes,
        flops_per_round=round(totals.flops / totals.flops_rounds) if totals.flops_rounds else None,
        budget_kept=totals.budget_kept,
        budget_broken=totals.budget_broken,
        broke=totals.broke,
        energy_j=totals.energy_j,
        temperature_c=totals.temperature_c,
        throttled=totals.throttled,
        battery_percent=totals.battery_percent,
        charging=totals.charging,
    )
