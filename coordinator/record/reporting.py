"""Makes the report document of a run from its read model."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec

from coordinator.record.store import Store
from coordinator.record.summary import DeviceSummary, device_rounds, natural_order, summarise
from coordinator.record.tables import RefusalRecord
from profiles.report.document import DeviceRound, Refusal, RunDevice, RunDocument, RunPrivacy, RunRound


def run_document(store: Store, run: str) -> RunDocument:
    """The report of one run: measured beside predicted. Raises ConfigError if there is no such run."""
    record, summary = store.run(run), summarise(store, run)
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
        warnings=[*_thinned(record.thinned), *_warnings(devices)],
    )


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
    for device in devices:
        measured = [entry.measured for entry in device.rounds if entry.measured]
        throttled = sum(use.throttled is True for use in measured)
        if throttled:
            warnings.append(f"{device.device} was throttled in {throttled} of {len(measured)} rounds.")
        if any(use.energy_j is not None and use.energy_source == "model" for use in measured):
            warnings.append(f"{device.device}: energy is modelled from load, not measured.")
    without = [
        device.device
        for device in devices
        if any(entry.measured for entry in device.rounds)
        and all(entry.measured.energy_j is None for entry in device.rounds if entry.measured)
    ]
    if without:
        some = ", ".join(without[:5]) + (f" and {len(without) - 5} others" if len(without) > 5 else "")
        warnings.append(f"Energy was not measured on {some}.")
    return warnings
