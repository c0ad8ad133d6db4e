"""Makes the report document of a run from its read model."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec

from coordinator.record.record import Record
from coordinator.record.summary import DeviceSummary, RunSummary, device_rounds, natural_order, summarise
from coordinator.record.tables import RefusalRecord
from fedvit.wire.messages import ClassCount
from profiles.prediction import Prediction
from profiles.report.document import ClassAccuracy, DeviceRound, Refusal, RunDevice, RunDocument, RunPrivacy, RunRound

NAMED = 5
"""Devices that a warning names."""
BUSY_LOAD_PER_CORE = 0.5
"""Load of other programs from which a measured speed is called too low."""


def run_document(store: Record, run: str) -> RunDocument:
    """The report of one run: measured beside predicted. Raises ConfigError if there is no such run."""
    record, summary = store.runs.read(run), summarise(store, run)
    by_device = device_rounds(store, summary)
    known = {device.device: device for device in summary.devices}
    devices = [
        _device(name, known.get(name), by_device.get(name, []))
        for name in sorted(by_device.keys() | known.keys(), key=natural_order)
    ]
    return RunDocument(
        run=run,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        started_at=summary.created_at,
        software=f"fedvit {version('fedvit')}",
        status=summary.status,
        reason=summary.reason,
        method=summary.method,
        model=summary.model,
        seed=summary.seed,
        rounds_planned=summary.rounds_planned,
        settings=summary.settings,
        protocol=summary.protocol,
        rounds=[msgspec.convert(entry, RunRound, from_attributes=True) for entry in summary.rounds],
        devices=devices,
        refusals=_counted(entry for entry in summary.refusals if not entry.lost),
        dropouts=_counted(entry for entry in summary.refusals if entry.lost),
        privacy=_privacy(record.config.get("privacy", {})),
        duration_s=_duration_s(store, run),
        classes=class_accuracies(store, summary),
        warnings=[*_thinned(record.thinned), *_warnings(devices)],
    )


def _duration_s(store: Record, run: str) -> float | None:
    """From the first round's begin to the end of the newest closed one, with all breaks; None before that."""
    rounds = store.rounds.read_all(run)
    ends = [entry.closed_at for entry in rounds if entry.closed_at]
    if not ends:
        return None
    begin, end = (datetime.fromisoformat(at) for at in (min(entry.opened_at for entry in rounds), max(ends)))
    return max(0.0, (end - begin).total_seconds())


def class_accuracies(store: Record, summary: RunSummary) -> list[ClassAccuracy]:
    """The answers by class of the newest evaluation; none where its details were removed."""
    newest = next((entry.round for entry in reversed(summary.rounds) if entry.accuracy_mean is not None), None)
    if newest is None:
        return []
    counts: dict[int, list[ClassCount]] = defaultdict(list)
    for result in store.tasks.read_used_in(summary.run, newest, "evaluate"):
        for count in result.by_class:
            if count.images:
                counts[count.label].append(count)
    return [
        ClassAccuracy(
            name=summary.classes[label],
            devices=len(of),
            images=sum(count.images for count in of),
            correct=sum(count.correct for count in of),
            wrong=_wrong_answers(of, summary.classes),
        )
        for label, of in sorted(counts.items())
        if label < len(summary.classes)
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


def _device(name: str, summary: DeviceSummary | None, rounds: list[DeviceRound]) -> RunDevice:
    return RunDevice(
        device=name,
        train_samples=summary.train_samples if summary else 0,
        test_samples=summary.test_samples if summary else 0,
        accuracy=summary.accuracy if summary else None,
        rounds=rounds,
        bytes_down=summary.bytes_down if summary else 0,
        bytes_up=summary.bytes_up if summary else 0,
        peak_rss_bytes=summary.peak_rss_bytes if summary else None,
    )


def _counted(refusals: Iterable[RefusalRecord]) -> list[Refusal]:
    """Equal refusals counted together, in the order of their first occurrence."""
    times = Counter((entry.round, entry.device, entry.kind, entry.reason) for entry in refusals)
    return [
        Refusal(round=number, device=device, kind=kind, reason=reason, times=count)
        for (number, device, kind, reason), count in times.items()
    ]


def _thinned(before: int | None) -> list[str]:
    if before is None:
        return []
    return [f"Rounds before {before} only have totals (keep_rounds): they are missing in tables of devices."]


def _warnings(devices: list[RunDevice]) -> list[str]:
    """Warnings about the figures: values that were modelled, throttled, or never measured."""
    warnings = []
    expected = [entry.expected for device in devices for entry in device.rounds if entry.expected]
    if any(entry.prediction.source == "catalogue" for entry in expected):
        warnings.append("Some predictions use the catalogue's speeds, not measured ones.")
    if busy := sorted({entry.prediction.device for entry in expected if _was_busy(entry.prediction)}):
        warnings.append(
            f"Other programs were running while the speed of {_some(busy)} was measured, so predicted times are too"
            " long. On the idle device, `edge-client profile --fresh` measures it again."
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
        warnings.append(f"Energy is modelled from load, not measured, on {_some(modelled)}.")
    if without:
        warnings.append(f"Energy was not measured on {_some(without)}.")
    return warnings


def _was_busy(prediction: Prediction) -> bool:
    """Return True if half a core or more was taken, for each core, while the device's speed was measured."""
    return (prediction.load_per_core or 0.0) >= BUSY_LOAD_PER_CORE


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} others" if len(names) > NAMED else "")
