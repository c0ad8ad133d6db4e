"""A run in figures: for `coordinator show`, the demo's closing table, and `--json`."""

import math
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.record.retention import folder_bytes
from coordinator.record.store import Store
from coordinator.record.tables import DeviceTotals, ResultRecord, RoundTotals
from coordinator.record.totals import evaluated, trained, with_result
from fedvit.resources import BudgetKind
from profiles.report.terminal import column, first_that_fits, natural_width, shortened
from profiles.report.terminal import table as new_table


class RoundSummary(RoundTotals, frozen=True, kw_only=True):
    """One round."""

    round: int
    accuracy: dict[str, float]  # by device, of an evaluated round whose details are there
    figures: dict[str, float]


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


class RunLine(Struct, frozen=True, kw_only=True):
    """One run in the list of all."""

    run: str
    created_at: str
    status: str
    method: str
    model: str
    rounds: int
    rounds_planned: int
    mean_accuracy: float | None  # of its newest evaluation
    bytes: int  # of its folder; the record is one file of all runs


class RunSummary(Struct, frozen=True, kw_only=True):
    run: str
    created_at: str
    status: str
    reason: str | None
    method: str
    model: str
    seed: int
    rounds_planned: int
    protocol: str | None  # how accuracy is measured: papers differ
    classes: tuple[str, ...]
    rounds: list[RoundSummary]
    devices: list[DeviceSummary]
    refusals: list[dict[str, str | int | bool | None]]
    strikes: dict[str, int] = {}  # by device, over the whole run
    quarantined: dict[str, str] = {}  # devices that are in quarantine -> why
    epsilon: float | None = None  # differential privacy of devices' updates after the last round; None: none
    feature_epsilon: float | None = None  # of all features of one device over the run
    mean_accuracy: float | None
    bytes_down: int
    bytes_up: int
    max_edge_rss_bytes: int | None


def summarise(store: Store, run: str, accuracy_of: int | None = None) -> RunSummary:
    """What the record holds of one run, from its totals; accuracies by device of the newest `accuracy_of` rounds, of
    all by default. Raises ConfigError when there is no such run."""
    record = store.run(run)
    last = store.last_round(run)
    accuracy = store.accuracy(run, 0 if accuracy_of is None else last - accuracy_of + 1)
    rounds = {
        entry.round: _round(entry.round, entry.totals, entry.figures, accuracy.get(entry.round, {}))
        for entry in store.totals(run)
    }
    known = {entry.device: entry.totals for entry in store.devices(run)}
    for number, totals, results in _under_way(store, run, last, rounds.get(last)):
        before = rounds.get(number)
        rounds[number] = _round(number, totals, before.figures if before else {}, _accuracies(results))
        for result in results:
            known[result.device] = with_result(known.get(result.device, DeviceTotals()), result)
    listed = [rounds[number] for number in sorted(rounds)]
    devices = [_device(name, known[name]) for name in sorted(known) if known[name].results or known[name].budget_broken]
    peaks = [device.peak_rss_bytes for device in devices if device.peak_rss_bytes is not None]
    means = (entry.accuracy_mean for entry in reversed(listed) if entry.accuracy_mean is not None)
    return RunSummary(
        run=run,
        created_at=record.created_at,
        status=record.status,
        reason=record.reason,
        method=str(record.config.get("method")),
        model=str(record.config.get("model")),
        seed=int(record.config.get("seed", 0)),
        rounds_planned=int(record.config.get("rounds", 0)),
        protocol=record.protocol,
        classes=record.classes,
        rounds=listed,
        devices=devices,
        refusals=[msgspec.structs.asdict(entry) for entry in store.refusals(run)],
        strikes=dict(sorted(Counter(entry.device for entry in store.strikes(run)).items())),
        quarantined={record.device: record.reason for record in store.quarantines(run) if record.holds(last or 1)},
        epsilon=_last(listed, "dp_epsilon"),
        feature_epsilon=_last(listed, "dp_device_epsilon"),
        mean_accuracy=next(means, None),
        bytes_down=sum(device.bytes_down for device in devices),
        bytes_up=sum(device.bytes_up for device in devices),
        max_edge_rss_bytes=max(peaks, default=None),
    )


def overview(store: Store, folder: Path) -> list[RunLine]:
    """All runs, newest first; `folder` is that of the runs."""
    return [
        RunLine(
            run=record.id,
            created_at=record.created_at,
            status=record.status,
            method=str(record.config.get("method")),
            model=str(record.config.get("model")),
            rounds=store.last_round(record.id),
            rounds_planned=int(record.config.get("rounds", 0)),
            mean_accuracy=store.mean_accuracy(record.id),
            bytes=folder_bytes(folder / record.id),
        )
        for record in store.runs()
    ]


def _under_way(
    store: Store, run: str, last: int, newest: RoundSummary | None
) -> Iterator[tuple[int, RoundTotals, list[ResultRecord]]]:
    """Rounds whose totals lack results that are there: those that are open, and the last while it is evaluated."""
    for entry in store.open_rounds(run):
        results = store.used_in(run, entry.round)
        yield entry.round, trained(RoundTotals(cohort=len(entry.cohort)), results), results
    record = store.round(run, last)
    if record and record.totals and not record.evaluated and (results := store.used_in(run, last, "evaluate")):
        yield last, evaluated(record.totals, results).totals, results


def _accuracies(results: list[ResultRecord]) -> dict[str, float]:
    return evaluated(RoundTotals(cohort=0), [result for result in results if result.kind == "evaluate"]).accuracy


def _last(rounds: list[RoundSummary], figure: str) -> float | None:
    told = [entry.figures[figure] for entry in rounds if figure in entry.figures]
    return told[-1] if told else None


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
    )


def round_line(store: Store, run: str, number: int, rounds: int) -> str:
    """One line on one finished round."""
    entry = store.round(run, number)
    assert entry is not None  # it is finished
    assert entry.totals is not None
    summary = _round(number, entry.totals, entry.figures, {})
    parts = [f"round {number:>3}/{rounds}", f"{summary.accepted}/{summary.cohort} devices"]
    parts += [f"{int(count)} {what}" for what in ("late", "declined") if (count := summary.figures.get(what))]
    if summary.accuracy_mean is not None and summary.accuracy_std is not None:
        parts.append(f"accuracy {summary.accuracy_mean:.3f} ± {summary.accuracy_std:.3f}")
    if summary.train_loss is not None:
        parts.append(f"loss {summary.train_loss:.3f}")
    if "devices_s" in summary.figures:
        parts.append(f"devices {summary.figures['devices_s']:.1f} s, server {summary.figures['server_s']:.1f} s")
    if "dp_epsilon" in summary.figures:
        parts.append(f"epsilon {summary.figures['dp_epsilon']:.3g}")
    if "dp_upload_epsilon" in summary.figures:
        row, upload = summary.figures["dp_row_epsilon"], summary.figures["dp_upload_epsilon"]
        parts.append(f"epsilon {row:.3g} a row, {upload:.3g} an upload")
    parts.append(f"down {megabytes(summary.bytes_down)}, up {megabytes(summary.bytes_up)}")
    return "   ".join(parts)


# --- tables -------------------------------------------------------------------------------------------
#
# Made for a terminal of `width` columns: units stand in the headings, numbers are never cut or wrapped, and
# what does not fit is left out as a whole column; `--json` has everything.

CURVE_WIDTH = 20
MOST_ROUNDS = 40
"""The newest that tables by round show."""
LEAST_NAME = 12
"""Of a device's name at least so many letters are shown, from both of its ends."""


def report(summary: RunSummary, width: int) -> Group:
    """All tables of one run, for a person."""
    reason = f" ({summary.reason})" if summary.reason else ""
    parts: list[RenderableType] = [
        Text(
            f"run {summary.run}: {summary.method} on {summary.model}, {summary.status}{reason}, "
            f"{len(summary.rounds)} of {summary.rounds_planned} rounds, seed {summary.seed}"
        )
    ]
    if any(entry.accuracy_mean is not None for entry in summary.rounds):
        parts += [Text(), accuracy_table(summary, width), Text(f"accuracy: {summary.protocol}", style="dim")]
    if summary.epsilon is not None:
        parts.append(Text(f"privacy of devices' updates: epsilon {summary.epsilon:.3g} over all rounds so far"))
    if summary.feature_epsilon is not None:
        parts.append(Text(f"privacy of one device's features: epsilon {summary.feature_epsilon:.3g} over all rounds"))
    if summary.epsilon is not None or summary.feature_epsilon is not None:
        parts += [Text(), privacy_table(summary)]
    if summary.devices:
        parts += [Text(), device_table(summary, width)]
    if any(device.budget_broken for device in summary.devices):
        parts += [Text(), budget_table(summary, width)]
    if summary.strikes:
        parts += [Text(), strike_table(summary, width)]
    if summary.refusals:
        parts += [Text(), refusal_table(summary, width)]
    return Group(*parts)


def accuracy_table(summary: RunSummary, width: int) -> Table:
    """Accuracy by round, each device in a column where they fit, else the lowest and the highest."""
    # to make and measure a table of a fleet takes long, and a column takes two letters at least
    each = (True, False) if 2 * len(summary.devices) <= width else (False,)
    return first_that_fits(
        width,
        *(
            partial(_accuracy_table, summary, each_device=each_device, curve=curve)
            for each_device in each
            for curve in (True, False)
        ),
    )


def _accuracy_table(summary: RunSummary, *, each_device: bool, curve: bool) -> Table:
    names = [device.device for device in summary.devices if device.accuracy is not None]
    tested = [entry for entry in summary.rounds if entry.accuracy_mean is not None]
    table = new_table(_title("accuracy by round", tested))
    for heading in ("round", *(names if each_device else ("lowest", "highest")), "mean", "std", "by image"):
        column(table, heading, style="bold" if heading == "mean" else "")
    if curve:
        column(table, "curve", justify="left")
    for entry in tested[-MOST_ROUNDS:]:
        assert entry.accuracy_mean is not None  # those without were left out
        values = [entry.accuracy.get(name) for name in names]
        if not each_device:
            values = [entry.accuracy_lowest, entry.accuracy_highest]
        cells = [_share(value) for value in (*values, entry.accuracy_mean, entry.accuracy_std, entry.accuracy_weighted)]
        bar = [Text("█" * math.floor(CURVE_WIDTH * entry.accuracy_mean + 0.5), style="green")] if curve else []
        table.add_row(str(entry.round), *cells, *bar)
    return table


EPSILONS = {
    "dp_epsilon": "updates,\nall rounds",
    "dp_row_epsilon": "features,\na row",
    "dp_upload_epsilon": "features,\nan upload",
    "dp_device_epsilon": "features,\nall rounds",
}


def privacy_table(summary: RunSummary) -> Table:
    """Epsilon after each round, of the kinds that the run has."""
    known = [figure for figure in EPSILONS if any(figure in entry.figures for entry in summary.rounds)]
    table = new_table(_title("epsilon by round", summary.rounds))
    for heading in ("round", *(EPSILONS[figure] for figure in known)):
        column(table, heading)
    for entry in summary.rounds[-MOST_ROUNDS:]:
        told = [entry.figures.get(figure) for figure in known]
        table.add_row(str(entry.round), *("-" if value is None else f"{value:.3g}" for value in told))
    return table


def _title(what: str, rounds: list[RoundSummary]) -> str:
    return what if len(rounds) <= MOST_ROUNDS else f"{what}: the newest {MOST_ROUNDS} of {len(rounds)}"


def device_table(summary: RunSummary, width: int) -> Table:
    """What each device did and what it cost; accuracy is that of its last evaluation."""
    left = width - natural_width(_device_table(summary, name_width=0))
    return _device_table(summary, name_width=max(LEAST_NAME, left))


def _device_table(summary: RunSummary, *, name_width: int) -> Table:
    table = new_table("devices")
    column(table, "device" if name_width else "", justify="left")
    headings = ("train\nimages", "test\nimages", "rounds\ntrained", "last\naccuracy")
    for heading in (*headings, "down\nMB", "up\nMB", "step\nms", "memory\nMB", "GFLOP\na round"):
        column(table, heading)
    for device in summary.devices:
        table.add_row(
            Text(shortened(device.device, name_width)),
            str(device.train_samples),
            str(device.test_samples),
            str(device.rounds),
            _share(device.accuracy),
            _scaled(device.bytes_down, 1e6),
            _scaled(device.bytes_up, 1e6),
            _scaled(device.step_s, 1e-3),
            _scaled(device.peak_rss_bytes, 1e6),
            _scaled(device.flops_per_round, 1e9),
        )
    return table


def budget_table(summary: RunSummary, width: int) -> Table:
    """How many tasks of each device kept its budgets; which ones the others broke, and how often."""
    table = new_table("budgets")
    for heading in ("device", "tasks\nkept", "tasks\nbroken"):
        column(table, heading, justify="left" if heading == "device" else "right")
    table.add_column("what", overflow="fold")
    for device in summary.devices:
        what = ", ".join(f"{kind} {count}" for kind, count in device.broke.items())
        name = Text(shortened(device.device, max(LEAST_NAME, width // 2)))
        table.add_row(name, str(device.budget_kept), str(device.budget_broken), Text(what))
    return table


def strike_table(summary: RunSummary, width: int) -> Table:
    """Devices that sent what no honest one sends."""
    table = new_table("strikes")
    for heading in ("device", "strikes"):
        column(table, heading, justify="left" if heading == "device" else "right")
    table.add_column("quarantine", overflow="fold")
    for device, count in summary.strikes.items():
        name = Text(shortened(device, max(LEAST_NAME, width // 3)))
        table.add_row(name, str(count), Text(summary.quarantined.get(device, "-")))
    return table


def refusal_table(summary: RunSummary, width: int, most: int = 10) -> Table:
    """The newest refusals, equal ones together; only their reasons may take several lines."""
    times: dict[tuple[int | str | None, ...], int] = {}
    for entry in summary.refusals:
        key = tuple(entry[name] for name in ("round", "device", "kind", "reason"))
        times[key] = times.pop(key, 0) + 1  # at the end again
    left_out = len(times) - most
    table = new_table("refused or lost" if left_out <= 0 else f"refused or lost, and {left_out} others before")
    for heading in ("times", "round", "device", "what"):
        column(table, heading, justify="right" if heading in ("times", "round") else "left")
    table.add_column("reason", overflow="fold")
    for (number, device, kind, reason), count in list(times.items())[-most:]:
        name = shortened(str(device), max(LEAST_NAME, width // 4))
        table.add_row(str(count), "" if number is None else str(number), Text(name), Text(str(kind)), Text(str(reason)))
    return table


def runs_table(listed: list[RunLine], width: int) -> Table:
    """One line a run. A run's name is never cut: it is what `show` and `--resume` want."""
    return first_that_fits(
        width,
        lambda: _runs_table(listed, ("created", "status", "method", "model", "rounds", "accuracy", "MB")),
        lambda: _runs_table(listed, ("created", "status", "method", "rounds", "accuracy", "MB")),
        lambda: _runs_table(listed, ("status", "method", "rounds", "accuracy", "MB")),
        lambda: _runs_table(listed, ("status", "rounds", "accuracy")),
    )


def _runs_table(listed: list[RunLine], headings: tuple[str, ...]) -> Table:
    table = new_table(None)
    for heading in ("run", *headings):
        column(table, heading, justify="right" if heading in ("rounds", "accuracy", "MB") else "left")
    for entry in listed:
        cells = {
            "created": entry.created_at[:16].replace("T", " "),
            "status": entry.status,
            "method": entry.method,
            "model": entry.model,
            "rounds": f"{entry.rounds}/{entry.rounds_planned}",
            "accuracy": _share(entry.mean_accuracy),
            "MB": _scaled(entry.bytes, 1e6),
        }
        table.add_row(Text(entry.run), *(Text(cells[heading]) for heading in headings))
    return table


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f} MB"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _scaled(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.{0 if value / unit >= 9999.95 else 1}f}"
