"""The read model of a run: typed figures of the run, its rounds and its devices, read from the record.

Every view (terminal, report, dashboard, trackers, Prometheus, experiments, the Python API) reads these structs and
nothing else. Units are in the names: `_s` seconds, `_j` joules, `_c` degrees Celsius, `bytes_` and `_bytes` bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from coordinator.config import RunConfig
from coordinator.record.liveness import current_status
from coordinator.record.privacy import DEVICE_EPSILON, EPSILON, ROW_EPSILON, UPLOAD_EPSILON
from coordinator.record.record import Record
from coordinator.record.rounds import RunPosition
from coordinator.record.tables import DeviceTotals, RefusalRecord, ResultRecord, RoundTotals, RunRecord
from coordinator.record.totals import add_evaluation, add_training, with_result
from fedvit.errors import ConfigError
from fedvit.files import folder_bytes
from fedvit.resources import BudgetKind

NOT_BEGUN = RunPosition(0, None)
"""The position of a run without a round."""


class AttentionEntropy(Struct, frozen=True, kw_only=True):
    """Entropy of a generator's attention weights, as a share of the logarithm of the keys: 0 for one key alone."""

    mean: float  # over devices
    lowest: float
    highest: float


class GeneratorRound(Struct, frozen=True, kw_only=True):
    """State of a method's generator at the start of a round, over the devices whose updates it learns from."""

    difference: float  # root mean square over pairs of devices, as a share of the size of generated values
    attention: AttentionEntropy | None = None  # None: the generator has no attention


class FeatureRound(Struct, frozen=True, kw_only=True):
    """Features that devices sent in a round, for a server that trains on them."""

    uploads: int
    features: int  # of all these uploads
    unequal: int  # uploads with more features of one class than of another, which tell the device's class distribution


class SumRound(Struct, frozen=True, kw_only=True):
    """The secure sum of a round's updates. It reveals nothing of a single device."""

    devices: int
    attempt: int  # number of the attempt that succeeded, from 1
    left: dict[str, int]  # devices that left, by step: keys, shares, masked, reveal
    clipped: int  # numbers outside of the range, of all devices together
    error_bound: float  # largest error of a number of the mean
    noise_multiplier: float | None = None  # of the noise that devices added; None: none
    clip: float | None = None  # norm that updates were scaled down to


class RoundView(RoundTotals, frozen=True, kw_only=True):
    """One round. The typed figures below `figures` are None if the round lacks them."""

    round: int
    accuracy: dict[str, float]  # by device; empty if not evaluated, or thinned
    figures: dict[str, float]  # all figures of the server, by name; methods add their own
    devices_s: float | None = None  # from the first task to the last result, while a coordinator served the run
    server_s: float | None = None
    late: int = 0  # results of earlier rounds that the round used
    declined: int = 0
    # differential privacy, for the run's delta
    epsilon: float | None = None  # of devices' updates, over all rounds up to this one
    row_epsilon: float | None = None  # of one row of features in one upload
    upload_epsilon: float | None = None  # of all rows of the round's largest upload
    device_epsilon: float | None = None  # of all features of one device, over all rounds up to this one
    generator: GeneratorRound | None = None  # None: the method has no generator, or one device took part
    features: FeatureRound | None = None  # None: devices send no features
    sum: SumRound | None = None  # None: updates were not added up in secret


_TYPED = tuple(RoundView.__struct_fields__[RoundView.__struct_fields__.index("figures") + 1 :])
"""Fields of a round that repeat `figures`; `show --json` has them there."""


class DeviceView(Struct, frozen=True, kw_only=True):
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
    evaluations: int = 0  # results of tests


class Standing(Struct, frozen=True, kw_only=True):
    """Strikes and quarantine of a device in a run."""

    device: str
    strikes: int  # since its last quarantine
    quarantine: str | None  # the reason, while it lasts
    until_round: int | None  # of a quarantine that ends by itself


class RunHead(Struct, frozen=True, kw_only=True):
    """Identifies a run, and distinguishes it from others."""

    run: str
    created_at: str  # ISO 8601, UTC
    status: str
    reason: str | None  # why it failed, was interrupted or stopped before its last round
    method: str
    model: str
    seed: int
    rounds_planned: int
    settings: dict[str, Any]  # values that differ from the defaults; keys of tables as "privacy.clip"


class RunProgress(RunHead, frozen=True, kw_only=True):
    """Progress of a run."""

    rounds: int
    mean_accuracy: float | None  # of its newest evaluation


class RunLine(RunProgress, frozen=True, kw_only=True):
    """One run in the list of runs."""

    bytes: int  # of its folder; the record is one file of all runs


class RunFilter(NamedTuple):
    """Selects runs; empty values select all."""

    status: tuple[str, ...] = ()
    method: str = ""
    model: str = ""
    name: str = ""  # a part of it


class RunPage(Struct, frozen=True, kw_only=True):
    """Some runs of a list."""

    runs: list[RunProgress]
    total: int  # of the whole list


class RunView(RunHead, frozen=True, kw_only=True):
    """One run from the totals of its rounds and devices."""

    protocol: str | None  # how accuracy is measured: papers differ
    classes: tuple[str, ...]
    rounds: list[RoundView]
    devices: list[DeviceView]
    refusals: list[RefusalRecord]
    strikes: dict[str, int] = {}  # by device, over the whole run
    quarantined: dict[str, str] = {}  # devices that are in quarantine -> why
    epsilon: float | None = None  # differential privacy of devices' updates after the last round; None: none
    feature_epsilon: float | None = None  # of all features of one device over the run
    mean_accuracy: float | None
    bytes_down: int
    bytes_up: int
    max_edge_rss_bytes: int | None
    best: int | None = None  # round with the highest mean accuracy
    tested: str | None = None  # the earlier run whose tensors this run only tests

    @property
    def energy_j(self) -> float | None:
        """Sum over the rounds that measured it."""
        energies = [entry.energy_j for entry in self.rounds if entry.energy_j is not None]
        return sum(energies) if energies else None


def read_run(store: Record, run: str, accuracy_of: int | None = None, refusals_of: int | None = None) -> RunView:
    """Read one run from its totals.

    It has accuracies by device of the newest `accuracy_of` rounds, and the newest `refusals_of` refusals; by default
    all of them. Raises ConfigError if there is no such run."""
    record = store.runs.read(run)
    last = store.rounds.find_last(run)
    accuracy = store.rounds.read_accuracy(run, 0 if accuracy_of is None else last - accuracy_of + 1)
    rounds = {
        entry.round: _round(entry.round, entry.totals, entry.figures, accuracy.get(entry.round, {}))
        for entry in store.rounds.read_totals(run)
    }
    totals_of = {entry.device: entry.totals for entry in store.devices.read_all(run)}
    for number, totals, results in _under_way(store, run, last, rounds.get(last)):
        before = rounds.get(number)
        rounds[number] = _round(number, totals, before.figures if before else {}, _accuracies(results))
        for result in results:
            totals_of[result.device] = with_result(totals_of.get(result.device, DeviceTotals()), result)
    listed = [rounds[number] for number in sorted(rounds)]
    active = (name for name, totals in totals_of.items() if totals.results or totals.budget_broken)
    devices = [view_device(name, totals_of[name]) for name in sorted(active, key=natural_order)]
    strikes = store.strikes.count(run)
    peaks = [device.peak_rss_bytes for device in devices if device.peak_rss_bytes is not None]
    return RunView(
        **_head(store, record),
        protocol=record.protocol,
        classes=record.classes,
        rounds=listed,
        devices=devices,
        refusals=store.devices.read_refusals(run, refusals_of),
        strikes={name: strikes[name].ever for name in sorted(strikes, key=natural_order)},
        quarantined={
            record.device: record.reason for record in store.strikes.read_quarantines(run) if record.holds(last or 1)
        },
        epsilon=_newest(entry.epsilon for entry in reversed(listed)),
        feature_epsilon=_newest(entry.device_epsilon for entry in reversed(listed)),
        mean_accuracy=_newest(entry.accuracy_mean for entry in reversed(listed)),
        bytes_down=sum(device.bytes_down for device in devices),
        bytes_up=sum(device.bytes_up for device in devices),
        max_edge_rss_bytes=max(peaks, default=None),
        best=_find_best(listed),
        tested=record.config.get("start_from") if record.config.get("rounds") == 0 else None,
    )


def list_runs(store: Record, folder: Path) -> list[RunLine]:
    """List all runs, newest first; `folder` is that of the runs."""
    return [
        RunLine(**msgspec.structs.asdict(entry), bytes=folder_bytes(folder / entry.run))
        for entry in list_progress(store)
    ]


def read_sizes(store: Record, folder: Path) -> dict[str, int]:
    """Measure the folders of all runs, in bytes."""
    return {record.id: folder_bytes(folder / record.id) for record in store.runs.read_all()}


def list_progress(store: Record) -> list[RunProgress]:
    """Read the progress of all runs, newest first."""
    positions = store.rounds.read_positions()
    return [_make_progress(store, record, positions.get(record.id, NOT_BEGUN)) for record in store.runs.read_all()]


def read_progress(store: Record, record: RunRecord) -> RunProgress:
    """Read the progress of one run."""
    rounds = store.rounds
    return _make_progress(store, record, RunPosition(rounds.find_last(record.id), rounds.read_mean_accuracy(record.id)))


def _make_progress(store: Record, record: RunRecord, position: RunPosition) -> RunProgress:
    return RunProgress(**_head(store, record), rounds=position.last, mean_accuracy=position.accuracy)


def list_page(store: Record, where: RunFilter, offset: int, limit: int) -> RunPage:
    """Read the progress of some of the runs that a filter selects, newest first."""
    found = [record for record in store.runs.read_all() if _is_selected(store, record, where)]
    page = found[offset : offset + limit]
    positions = store.rounds.read_positions([record.id for record in page])
    runs = [_make_progress(store, record, positions.get(record.id, NOT_BEGUN)) for record in page]
    return RunPage(runs=runs, total=len(found))


def _is_selected(store: Record, record: RunRecord, where: RunFilter) -> bool:
    return (
        where.name in record.id
        and where.method in ("", record.config.get("method"))
        and where.model in ("", record.config.get("model"))
        and (not where.status or current_status(store, record) in where.status)
    )


def read_head(store: Record, record: RunRecord) -> RunHead:
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
    """Return the values that differ from the defaults; keys of tables are written as "privacy.clip"."""
    return _settings(json.loads(msgspec.json.encode(config)))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_differing(config, _defaults()))


@cache
def _defaults() -> Mapping[str, Any]:
    defaults: dict[str, Any] = json.loads(msgspec.json.encode(RunConfig()))
    return defaults


def _differing(settings: Mapping[str, Any], usual: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        default = usual.get(name)
        if isinstance(value, dict):
            yield from _differing(value, default if isinstance(default, dict) else {}, f"{table}{name}.")
        elif name not in usual or value != default:
            yield f"{table}{name}", value


def read_round(store: Record, run: str, number: int) -> RoundView:
    """Read a closed round from its totals, without accuracies by device. Raises ConfigError if there is none."""
    entry = store.rounds.read(run, number)
    if entry is None or entry.totals is None:
        raise ConfigError("FV1623", f"run {run!r} has no round {number} that is closed")
    return _round(number, entry.totals, entry.figures, {})


def read_rounds(store: Record, run: str) -> list[RoundView]:
    """Read all closed rounds, without accuracies by device. Raises ConfigError if there is no such run."""
    store.runs.read(run)
    return [_round(entry.round, entry.totals, entry.figures, {}) for entry in store.rounds.read_totals(run)]


def read_newest_round(store: Record, run: str, *, evaluated: bool = False) -> RoundView | None:
    """Read the newest closed round, or the newest evaluated one, without accuracies by device."""
    entry = store.rounds.read_newest_totals(run, evaluated=evaluated)
    return _round(entry.round, entry.totals, entry.figures, {}) if entry else None


def read_devices(store: Record, run: str) -> list[DeviceView]:
    """Read all devices by name, from closed rounds, without a check of the rows' seals."""
    return [view_device(name, totals) for name, totals in store.devices.read_totals(run).items()]


def read_standings(store: Record, run: str) -> list[Standing]:
    """Read the standing of every device that ever had a strike. Raises ConfigError if there is no such run."""
    store.runs.read(run)
    quarantined = store.strikes.read_current_quarantines(run, store.rounds.find_last(run) or 1)
    return [
        Standing(
            device=device,
            strikes=count.unspent,
            quarantine=quarantined[device].reason if device in quarantined else None,
            until_round=quarantined[device].until_round if device in quarantined else None,
        )
        for device, count in sorted(store.strikes.count(run).items())
    ]


def show_document(run: RunView) -> dict[str, Any]:
    """Return the JSON document of `show --json`: a round's typed figures are there under `figures` alone."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(run))
    for entry in document["rounds"]:
        for name in _TYPED:
            del entry[name]
    return document


def read_document(document: Mapping[str, Any]) -> RunView:
    """Return the run of a document of `show_document`. Raises msgspec.ValidationError if it is not one."""
    rounds = [{**entry, "figures": _without_null(entry["figures"])} for entry in document["rounds"]]
    view = msgspec.convert({**document, "rounds": rounds}, RunView)
    views = []
    for entry in view.rounds:
        totals = msgspec.convert(msgspec.to_builtins(entry), RoundTotals)
        views.append(_round(entry.round, totals, entry.figures, entry.accuracy))
    return msgspec.structs.replace(view, rounds=views)


def _without_null(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Leave out figures that are not finite: JSON has null for them."""
    return {name: value for name, value in figures.items() if value is not None}


def natural_order(name: str) -> list[str | int]:
    """Sort key for names that compares the numbers in them as numbers.

    >>> sorted(["device-10", "device-2", "pi"], key=natural_order)
    ['device-2', 'device-10', 'pi']
    """
    return [int(part) if position % 2 else part for position, part in enumerate(re.split(r"([0-9]+)", name))]


def _under_way(
    store: Record, run: str, last: int, newest: RoundView | None
) -> Iterator[tuple[int, RoundTotals, list[ResultRecord]]]:
    """Rounds whose totals do not include all results yet: open rounds, and the last one while it is evaluated."""
    for entry in store.rounds.read_open(run):
        results = store.tasks.read_used_in(run, entry.round)
        yield entry.round, add_training(RoundTotals(cohort=len(entry.cohort)), results), results
    record = store.rounds.read(run, last)
    if (
        record
        and record.totals
        and not record.evaluated
        and (results := store.tasks.read_used_in(run, last, "evaluate"))
    ):
        yield last, add_evaluation(record.totals, results).totals, results


def _accuracies(results: list[ResultRecord]) -> dict[str, float]:
    return add_evaluation(RoundTotals(cohort=0), [result for result in results if result.kind == "evaluate"]).accuracy


def _find_best(rounds: list[RoundView]) -> int | None:
    """Return the round with the highest mean accuracy, the earliest of equal ones."""
    tested = [(entry.accuracy_mean, -entry.round) for entry in rounds if entry.accuracy_mean is not None]
    return -max(tested)[1] if tested else None


def _newest(values: Iterator[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _round(number: int, totals: RoundTotals, figures: dict[str, float], accuracy: dict[str, float]) -> RoundView:
    return RoundView(
        round=number,
        accuracy=accuracy,
        figures=figures,
        devices_s=figures.get("devices_s"),
        server_s=figures.get("server_s"),
        late=int(figures.get("late", 0)),
        declined=int(figures.get("declined", 0)),
        epsilon=figures.get(EPSILON),
        row_epsilon=figures.get(ROW_EPSILON),
        upload_epsilon=figures.get(UPLOAD_EPSILON),
        device_epsilon=figures.get(DEVICE_EPSILON),
        generator=_generator(figures),
        features=_features(figures, totals.accepted),
        sum=_view_sum(figures),
        **msgspec.structs.asdict(totals),
    )


def _generator(figures: dict[str, float]) -> GeneratorRound | None:
    if "generated_difference" not in figures:
        return None
    attention = None
    if (mean := figures.get("attention_entropy")) is not None:
        lowest, highest = figures["attention_entropy_lowest"], figures["attention_entropy_highest"]
        attention = AttentionEntropy(mean=mean, lowest=lowest, highest=highest)
    return GeneratorRound(difference=figures["generated_difference"], attention=attention)


def _features(figures: dict[str, float], uploads: int) -> FeatureRound | None:
    if (sent := figures.get("uploaded_features")) is None:
        return None
    return FeatureRound(uploads=uploads, features=int(sent), unequal=int(figures["unequal_uploads"]))


def _view_sum(figures: dict[str, float]) -> SumRound | None:
    if (devices := figures.get("sum_devices")) is None:
        return None
    return SumRound(
        devices=int(devices),
        attempt=int(figures.get("sum_attempt", 1)),
        left={
            step: int(figures.get(f"sum_left_{step}", 0)) for step in ("keys", "shares", "masked", "agree", "reveal")
        },
        clipped=int(figures["sum_clipped"]),
        error_bound=figures["sum_error_bound"],
        noise_multiplier=figures.get("sum_noise_multiplier"),
        clip=figures.get("sum_clip"),
    )


def view_device(name: str, totals: DeviceTotals) -> DeviceView:
    of_totals = {field: getattr(totals, field) for field in DeviceView.__struct_fields__ if hasattr(totals, field)}
    return DeviceView(
        **of_totals
        | {
            "device": name,
            "evaluations": totals.results - totals.rounds,
            "step_s": totals.step_s / totals.step_rounds if totals.step_rounds else None,
            "flops_per_round": round(totals.flops / totals.flops_rounds) if totals.flops_rounds else None,
        }
    )
