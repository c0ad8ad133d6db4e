"""The report of a run: the read model, what was predicted beside what was measured, and warnings."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import Struct

from coordinator.compute.planning.method_entry import find_stored_needs
from coordinator.record.record import Record
from coordinator.record.tables import DeviceTotals, RefusalRecord
from coordinator.run_view import DeviceView, RunView, natural_order, read_run, view_device
from fedvit.answer_scores import add_histograms, find_auc
from fedvit.label_forms import TaskName
from fedvit.resources import Budget, BudgetKind, ResourceUse
from fedvit.wire.messages import ClassCount
from profiles.prediction import FLOP_CONVENTION, Expected, Prediction
from profiles.report.document import SCHEMA, Comparison

NAMED = 5
"""Devices that a warning names."""
BUSY_LOAD_PER_CORE = 0.5
"""Load of other programs from which a measured speed is called too low."""
_HEAD_KEYS = ("status", "reason", "method", "model", "seed", "rounds_planned", "protocol")
_ROUND_KEYS = (
    "round", "cohort", "accepted", "accuracy_mean", "accuracy_lowest", "accuracy_highest", "accuracy_weighted",
    "train_loss", "bytes_down", "bytes_up", "devices_s", "server_s", "accuracy_std", "epsilon", "row_epsilon",
    "upload_epsilon", "device_epsilon", "generator", "features", "sum",
)  # fmt: skip
"""Fields of a round in the JSON of `report`."""


class DeviceRound(Struct, frozen=True, kw_only=True):
    """One device in one round of its cohort."""

    round: int
    status: Literal["accepted", "refused", "dropped out"]
    expected: Expected | None
    measured: ResourceUse | None  # of its training
    accuracy: float | None  # of an evaluation after the round
    reason: str | None = None  # why its result is missing


class DeviceReport(Struct, frozen=True, kw_only=True):
    """One device over a run, with its rounds one by one."""

    totals: DeviceView
    rounds: list[DeviceRound]
    declined: int = 0  # tasks
    sent: str = "updates"  # what its results of training are

    @property
    def received(self) -> str:
        """Kinds of results that arrived from it, and how many of each."""
        return f"{self.totals.rounds} {self.sent}, {self.totals.evaluations} evaluations"

    @property
    def device(self) -> str:
        return self.totals.device

    @property
    def budget(self) -> Budget | None:
        """The newest budget; None if the run has no prediction."""
        return next((entry.expected.budget for entry in reversed(self.rounds) if entry.expected), None)

    @property
    def changes(self) -> str:
        """Options that were changed in the last round for the device's budget; "" without changes."""
        newest = next((entry.expected for entry in reversed(self.rounds) if entry.expected), None)
        return ", ".join(f"{name} = {value}" for name, value in newest.changes.items()) if newest else ""

    @property
    def broken(self) -> dict[BudgetKind, int]:
        """Budgets that tasks exceeded, and in how many rounds."""
        kinds = [kind for entry in self.rounds if entry.measured for kind in entry.measured.broke]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    def count_rounds(self, status: str) -> int:
        """Number of rounds with this status."""
        return sum(entry.status == status for entry in self.rounds)

    def comparisons(self) -> list[Comparison]:
        """Medians over rounds of what was predicted and of what was measured, for figures that are known."""
        expected = [entry.expected for entry in self.rounds if entry.expected]
        measured = [entry.measured for entry in self.rounds if entry.measured]
        pairs: list[tuple[str, str, list[float | None], list[float | None]]] = [
            ("step", "s", [e.prediction.step_s for e in expected], [m.step_s for m in measured]),
            ("training of a round", "s", [e.prediction.usual_train_s for e in expected], [m.train_s for m in measured]),
            (
                "peak memory", "bytes",
                [e.prediction.peak_rss_bytes for e in expected], [m.peak_rss_bytes for m in measured],
            ),
            ("FLOPs of a round", "FLOP", [e.usual_flops for e in expected], [m.flops for m in measured]),
            ("sent down", "bytes", [e.bytes_down for e in expected], [m.fetched_bytes for m in measured]),
            ("sent up", "bytes", [e.bytes_up for e in expected], [m.upload_bytes for m in measured]),
            ("energy of a round", "J", [e.prediction.energy_j for e in expected], [m.energy_j for m in measured]),
        ]  # fmt: skip
        comparisons = [
            Comparison(figure=figure, unit=unit, predicted=_find_median(before), measured=_find_median(after))
            for figure, unit, before, after in pairs
        ]
        return [entry for entry in comparisons if entry.predicted is not None or entry.measured is not None]


class ClassAccuracy(Struct, frozen=True, kw_only=True):
    """The answers of all devices of one evaluation for the test images of one class."""

    name: str
    devices: int  # with test images of it
    images: int
    correct: int
    wrong: dict[str, int] = {}  # by the class that was answered, the most frequent first; empty: not counted, or none
    auc: float | None = None  # of this class against all others; None: scores were not counted
    task: TaskName = "classification"  # of a segmentation, images are patches

    @property
    def accuracy(self) -> float:
        return self.correct / self.images


class RunPrivacy(Struct, frozen=True, kw_only=True):
    """The noise of a run, as in its table [privacy]; 0: none of that kind."""

    delta: float = 1e-5
    noise_multiplier: float = 0.0
    clip: float | None = None
    accounting: str = "every_round"
    feature_noise: float = 0.0
    feature_clip: float | None = None
    deterministic_noise: bool = False  # the noise follows from the seed: it protects nobody


class CountedRefusal(Struct, frozen=True, kw_only=True):
    """A refused message; equal ones are counted."""

    round: int | None
    device: str
    kind: str
    reason: str
    times: int


class RunReport(Struct, frozen=True, kw_only=True):
    """A run, finished or not."""

    run: RunView
    created_at: str  # of this report: ISO 8601, UTC
    software: str
    devices: list[DeviceReport]
    refusals: list[CountedRefusal]
    dropouts: list[CountedRefusal]  # tasks without a result
    privacy: RunPrivacy | None = None  # None: the run asked for no noise
    duration_s: float | None = None  # from the first round's begin to the end of the newest closed one
    classes: list[ClassAccuracy] = []  # of the newest evaluation; empty: no device counted them
    warnings: list[str] = []


def read_report(store: Record, run: str) -> RunReport:
    """Read the report of one run. Raises ConfigError if there is no such run."""
    record, view = store.runs.read(run), read_run(store, run)
    by_device = _read_rounds(store, view)
    totals = {device.device: device for device in view.devices}
    declined = Counter(entry.device for entry in view.refusals if entry.kind == "declined")
    needs = find_stored_needs(view.method)
    sent = "updates" if needs is None or needs.updates else "feature uploads" if needs.features else "losses"
    devices = [
        DeviceReport(
            totals=totals.get(name) or view_device(name, DeviceTotals()),
            rounds=by_device.get(name, []),
            declined=declined[name],
            sent=sent,
        )
        for name in sorted(by_device.keys() | totals.keys(), key=natural_order)
    ]
    return RunReport(
        run=view,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        software=f"fedvit {version('fedvit')}",
        devices=devices,
        refusals=_count_equal(entry for entry in view.refusals if not entry.lost),
        dropouts=_count_equal(entry for entry in view.refusals if entry.lost),
        privacy=_privacy(record.config.get("privacy", {})),
        duration_s=_duration_s(store, run),
        classes=read_classes(store, view),
        warnings=[*_warn_of_thinning(record.thinned), *_find_doubts(devices)],
    )


def encode_report(report: RunReport) -> bytes:
    """Return the JSON of `report --json`, indented."""
    run = report.run
    document = {
        "kind": "run",
        "run": run.run,
        "created_at": report.created_at,
        "started_at": run.created_at,
        "software": report.software,
        **{name: getattr(run, name) for name in _HEAD_KEYS},
        "rounds": [{name: getattr(entry, name) for name in _ROUND_KEYS} for entry in run.rounds],
        "devices": [_device_document(device) for device in report.devices],
        "refusals": report.refusals,
        "dropouts": report.dropouts,
        "privacy": report.privacy,
        "settings": run.settings,
        "duration_s": report.duration_s,
        "classes": report.classes,
        "warnings": report.warnings,
        "convention": FLOP_CONVENTION,
        "schema": SCHEMA,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _device_document(device: DeviceReport) -> dict[str, Any]:
    totals = device.totals
    return {
        "device": totals.device,
        "train_samples": totals.train_samples,
        "test_samples": totals.test_samples,
        "accuracy": totals.accuracy,
        "rounds": device.rounds,
        "bytes_down": totals.bytes_down,
        "bytes_up": totals.bytes_up,
        "received": device.received,
        "declined": device.declined,
        "peak_rss_bytes": totals.peak_rss_bytes,
    }


def _read_rounds(store: Record, view: RunView) -> dict[str, list[DeviceRound]]:
    """Read the outcome of every ended training task, by device, of rounds that still have details."""
    run = view.run
    expected, accuracy = store.tasks.read_expected(run), {entry.round: entry.accuracy for entry in view.rounds}
    results = {(entry.round, entry.device): entry for entry in store.tasks.read_results(run) if entry.kind == "train"}
    missing = {
        (entry.round, entry.device): entry for entry in view.refusals if entry.kind not in ("evaluate", "compare")
    }
    rounds: dict[str, list[DeviceRound]] = defaultdict(list)
    for record in store.rounds.read_all(run):
        for device in record.cohort:
            task, of_device = (record.round, device), rounds[device]
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
    return rounds


def _duration_s(store: Record, run: str) -> float | None:
    """From the first round's begin to the end of the newest closed one, with all breaks; None before that."""
    rounds = store.rounds.read_all(run)
    ends = [entry.closed_at for entry in rounds if entry.closed_at]
    if not ends:
        return None
    begin, end = (datetime.fromisoformat(at) for at in (min(entry.opened_at for entry in rounds), max(ends)))
    return max(0.0, (end - begin).total_seconds())


def read_classes(store: Record, view: RunView) -> list[ClassAccuracy]:
    """The answers by class of the newest evaluation; none where its details were removed."""
    newest = next((entry.round for entry in reversed(view.rounds) if entry.accuracy_mean is not None), None)
    if newest is None:
        return []
    counts: dict[int, list[ClassCount]] = defaultdict(list)
    listed: list[ClassCount] = []
    for result in store.tasks.read_used_in(view.run, newest, "evaluate"):
        listed += result.by_class
        for count in result.by_class:
            if count.images:
                counts[count.label].append(count)
    scores, task = add_histograms(listed), store.runs.read(view.run).config.get("task", "classification")
    return [
        ClassAccuracy(
            name=view.classes[label],
            devices=len(of),
            images=sum(count.images for count in of),
            correct=sum(count.correct for count in of),
            wrong=_wrong_answers(of, view.classes),
            auc=find_auc(*scores[label]) if label in scores else None,
            task=task,
        )
        for label, of in sorted(counts.items())
        if label < len(view.classes)
    ]


def _wrong_answers(counts: Iterable[ClassCount], classes: Sequence[str]) -> dict[str, int]:
    """By the class that was answered, the most frequent first."""
    added: Counter[str] = Counter()
    for count in counts:
        added.update({classes[label]: images for label, images in count.wrong if label < len(classes)})
    return dict(added.most_common())


def _privacy(table: Mapping[str, Any]) -> RunPrivacy | None:
    """The configured noise of a run, from its table [privacy]; None without noise."""
    asked = msgspec.convert(table, RunPrivacy)
    return asked if asked.noise_multiplier or asked.feature_noise else None


def _count_equal(refusals: Iterable[RefusalRecord]) -> list[CountedRefusal]:
    """Count equal refusals together, in the order of their first occurrence."""
    times = Counter((entry.round, entry.device, entry.kind, entry.reason) for entry in refusals)
    return [
        CountedRefusal(round=number, device=device, kind=kind, reason=reason, times=count)
        for (number, device, kind, reason), count in times.items()
    ]


def _warn_of_thinning(before: int | None) -> list[str]:
    if before is None:
        return []
    return [f"Rounds before {before} only have totals (keep_rounds): they are missing in tables of devices."]


def _find_doubts(devices: list[DeviceReport]) -> list[str]:
    """Warnings about the figures: values that were modelled, throttled, or never measured."""
    warnings = []
    expected = [entry.expected for device in devices for entry in device.rounds if entry.expected]
    if any(entry.prediction.source == "catalogue" for entry in expected):
        warnings.append("Some predictions use the catalogue's speeds, not measured ones.")
    if busy := sorted({entry.prediction.device for entry in expected if _is_busy(entry.prediction)}):
        warnings.append(
            f"Other programs were running while the speed of {_name_some(busy)} was measured, so predicted times are"
            " too long. On the idle device, `edge-client profile --fresh` measures it again."
        )
    slowed: list[str] = []
    modelled: list[str] = []
    for device in devices:
        measured = [entry.measured for entry in device.rounds if entry.measured]
        throttled = sum(use.throttled is True for use in measured)
        if throttled:
            slowed.append(f"{device.device} was throttled in {throttled} of {len(measured)} rounds.")
        if any(use.energy_j is not None and use.energy_source == "model" for use in measured):
            modelled.append(device.device)
    without = [
        device.device
        for device in devices
        if any(entry.measured for entry in device.rounds)
        and all(entry.measured.energy_j is None for entry in device.rounds if entry.measured)
    ]
    warnings += slowed[:NAMED]
    if len(slowed) > NAMED:
        warnings.append(f"{len(slowed)} devices were throttled in all.")
    if modelled:
        warnings.append(f"Energy is modelled from load, not measured, on {_name_some(modelled)}.")
    if without:
        warnings.append(f"Energy was not measured on {_name_some(without)}.")
    return warnings


def _is_busy(prediction: Prediction) -> bool:
    """Return True if half a core or more was taken, for each core, while the device's speed was measured."""
    return (prediction.load_per_core or 0.0) >= BUSY_LOAD_PER_CORE


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} others" if len(names) > NAMED else "")


def _find_median(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None
