"""From a run's record to its report."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec

from coordinator.record.store import Store
from coordinator.record.summary import DeviceSummary, RoundSummary, summarise
from coordinator.record.tables import RefusalRecord, ResultRecord, RoundRecord
from profiles.prediction import Expected
from profiles.report.document import DeviceRound, Refusal, RunDevice, RunDocument, RunPrivacy, RunRound

Expectations = Mapping[tuple[int, str], Expected]
"""(round, device) -> what was expected of it when it was asked."""


def run_document(store: Store, run: str) -> RunDocument:
    """Everything that the record holds of one run, beside what was expected. Raises ConfigError without such a run."""
    record = store.run(run)
    summary = summarise(store, run)
    results, refusals, rounds = store.results(run), store.refusals(run), store.rounds(run)
    expected = store.expected(run)
    asked = {device for entry in rounds for device in entry.cohort}
    known = {device.device: device for device in summary.devices}
    by_device: dict[str, dict[int, ResultRecord]] = defaultdict(dict)
    for result in results:
        if result.kind == "train":
            by_device[result.device][result.round] = result
    tried = [entry for entry in refusals if entry.kind != "evaluate"]
    missing = {(entry.device, entry.round): entry for entry in tried}  # the newest
    devices = [
        _device(name, known.get(name), rounds, by_device[name], missing, summary.rounds, expected)
        for name in sorted(asked | set(known))
    ]
    return RunDocument(
        run=run,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        started_at=record.created_at,
        software=f"fedvit {version('fedvit')}",
        status=summary.status,
        reason=summary.reason,
        method=summary.method,
        model=summary.model,
        seed=summary.seed,
        rounds_planned=summary.rounds_planned,
        protocol=summary.protocol,
        rounds=[_round(entry) for entry in summary.rounds],
        devices=devices,
        refusals=_counted(entry for entry in refusals if not entry.lost),
        dropouts=_counted(entry for entry in refusals if entry.lost),
        privacy=_privacy(record.config.get("privacy", {})),
        warnings=[*_thinned(record.thinned), *_warnings(devices, expected)],
    )


def _round(entry: RoundSummary) -> RunRound:
    return RunRound(
        round=entry.round,
        cohort=entry.cohort,
        accepted=entry.accepted,
        accuracy_mean=entry.accuracy_mean,
        accuracy_lowest=entry.accuracy_lowest,
        accuracy_highest=entry.accuracy_highest,
        accuracy_weighted=entry.accuracy_weighted,
        train_loss=entry.train_loss,
        bytes_down=entry.bytes_down,
        bytes_up=entry.bytes_up,
        devices_s=entry.figures.get("devices_s"),
        server_s=entry.figures.get("server_s"),
        epsilon=entry.figures.get("dp_epsilon"),
        row_epsilon=entry.figures.get("dp_row_epsilon"),
        upload_epsilon=entry.figures.get("dp_upload_epsilon"),
        device_epsilon=entry.figures.get("dp_device_epsilon"),
    )


def _privacy(table: Mapping[str, Any]) -> RunPrivacy | None:
    """The noise that a run asked for, from the table [privacy] of its configuration."""
    asked = msgspec.convert(table, RunPrivacy)
    return asked if asked.noise_multiplier or asked.feature_noise else None


def _device(
    name: str,
    summary: DeviceSummary | None,
    rounds: list[RoundRecord],
    trained: dict[int, ResultRecord],
    missing: Mapping[tuple[str, int | None], RefusalRecord],
    summaries: list[RoundSummary],
    expected: Expectations,
) -> RunDevice:
    accuracy = {entry.round: entry.accuracy.get(name) for entry in summaries}
    entries = []
    for record in rounds:
        if name not in record.cohort:
            continue
        result = trained.get(record.round)
        if result is None and record.closed_at is None:
            continue  # it is still at work
        refusal = None if result else missing.get((name, record.round))
        refused = refusal is not None and not refusal.lost
        entries.append(
            DeviceRound(
                round=record.round,
                status="accepted" if result else "refused" if refused else "dropped out",
                expected=expected.get((record.round, name)),
                measured=result.use if result else None,
                accuracy=accuracy.get(record.round),
                reason=refusal.reason if refusal else None,
            )
        )
    return RunDevice(
        device=name,
        train_samples=summary.train_samples if summary else 0,
        test_samples=summary.test_samples if summary else 0,
        accuracy=summary.accuracy if summary else None,
        rounds=entries,
        bytes_down=summary.bytes_down if summary else 0,
        bytes_up=summary.bytes_up if summary else 0,
        peak_rss_bytes=summary.peak_rss_bytes if summary else None,
    )


def _counted(refusals: Iterable[RefusalRecord]) -> list[Refusal]:
    """Equal ones together, in the order of their first time."""
    times = Counter((entry.round, entry.device, entry.kind, entry.reason) for entry in refusals)
    return [
        Refusal(round=number, device=device, kind=kind, reason=reason, times=count)
        for (number, device, kind, reason), count in times.items()
    ]


def _thinned(before: int | None) -> list[str]:
    if before is None:
        return []
    return [f"Of rounds before {before} only totals are left (keep_rounds): they are missing in tables of devices."]


def _warnings(devices: list[RunDevice], expected: Expectations) -> list[str]:
    """What a reader must know of the figures: what was modelled, throttled, or never measured."""
    warnings = []
    if any(entry.prediction.source == "catalogue" for entry in expected.values()):
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
