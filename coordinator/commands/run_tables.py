"""The read model of a run as tables for a terminal: for `coordinator show` and `runs`, and at the end of the demo.

For a terminal of `width` columns: units are in the headings, numbers are never cut or wrapped, and columns that do not
fit are left out; `--json` has everything.
"""

import math
from functools import partial

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.record.summary import RoundSummary, RunLine, RunSummary
from fedvit.quantities import format_count
from profiles.report.terminal import column, first_that_fits, natural_width, shortened
from profiles.report.terminal import table as new_table
from profiles.report.verdict import settings_words

CURVE_WIDTH = 20
MOST_ROUNDS = 40
"""Most rounds that tables by round show."""
MOST_CLASSES = 10
LEAST_NAME = 12
"""Fewest letters of a device's name that are shown, from both ends."""


def report(summary: RunSummary, width: int) -> Group:
    """All tables of one run."""
    reason = f" ({summary.reason})" if summary.reason else ""
    parts: list[RenderableType] = [
        Text(
            f"run {summary.run}: {summary.method} on {summary.model}, {summary.status}{reason}, "
            f"{len(summary.rounds)} of {summary.rounds_planned} rounds, seed {summary.seed}"
        ),
        Text(settings_words(summary.settings), style="dim"),
        *([Text(_classes(summary.classes), style="dim")] if summary.classes else []),
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


def _classes(classes: tuple[str, ...]) -> str:
    more = ", ..." if len(classes) > MOST_CLASSES else ""
    return f"{format_count(len(classes), 'class')}: {', '.join(classes[:MOST_CLASSES])}{more}"


def accuracy_table(summary: RunSummary, width: int) -> Table:
    """Accuracy by round, with a column per device if they fit, otherwise the lowest and the highest."""
    # measuring the table of a large fleet takes long; a column takes at least two letters
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
    "epsilon": "updates,\nall rounds",
    "row_epsilon": "features,\nper row",
    "upload_epsilon": "features,\nper upload",
    "device_epsilon": "features,\nall rounds",
}


def privacy_table(summary: RunSummary) -> Table:
    """Epsilon after each round, of the kinds that the run has."""
    known = [name for name in EPSILONS if any(getattr(entry, name) is not None for entry in summary.rounds)]
    table = new_table(_title("epsilon by round", summary.rounds))
    for heading in ("round", *(EPSILONS[name] for name in known)):
        column(table, heading)
    for entry in summary.rounds[-MOST_ROUNDS:]:
        values = [getattr(entry, name) for name in known]
        table.add_row(str(entry.round), *("-" if value is None else f"{value:.3g}" for value in values))
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
    for heading in (*headings, "down\nMB", "up\nMB", "step\nms", "memory\nMB", "GFLOP\nper round"):
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
    """Number of tasks of each device within its budgets; which budgets the others exceeded, and how often."""
    table = new_table("budgets")
    for heading in ("device", "tasks within\nbudget", "tasks\nover budget"):
        column(table, heading, justify="left" if heading == "device" else "right")
    table.add_column("what", overflow="fold")
    for device in summary.devices:
        what = ", ".join(f"{kind} {count}" for kind, count in device.broke.items())
        name = Text(shortened(device.device, max(LEAST_NAME, width // 2)))
        table.add_row(name, str(device.budget_kept), str(device.budget_broken), Text(what))
    return table


def strike_table(summary: RunSummary, width: int) -> Table:
    """Devices with strikes."""
    table = new_table("strikes")
    for heading in ("device", "strikes"):
        column(table, heading, justify="left" if heading == "device" else "right")
    table.add_column("quarantine", overflow="fold")
    for device, count in summary.strikes.items():
        name = Text(shortened(device, max(LEAST_NAME, width // 3)))
        table.add_row(name, str(count), Text(summary.quarantined.get(device, "-")))
    return table


def refusal_table(summary: RunSummary, width: int, most: int = 10) -> Table:
    """The newest refusals, equal ones counted; only reasons may take several lines."""
    times: dict[tuple[int | None, str, str, str], int] = {}
    for entry in summary.refusals:
        key = (entry.round, entry.device, entry.kind, entry.reason)
        times[key] = times.pop(key, 0) + 1  # moved to the end
    left_out = len(times) - most
    table = new_table("refused or lost" if left_out <= 0 else f"refused or lost, and {left_out} others before")
    for heading in ("times", "round", "device", "what"):
        column(table, heading, justify="right" if heading in ("times", "round") else "left")
    table.add_column("reason", overflow="fold")
    for (number, device, kind, reason), count in list(times.items())[-most:]:
        name = shortened(device, max(LEAST_NAME, width // 4))
        table.add_row(str(count), "" if number is None else str(number), Text(name), Text(kind), Text(reason))
    return table


def runs_table(listed: list[RunLine], width: int) -> Table:
    """One line per run. A run's name is never cut: `show` and `--resume` need it."""
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _scaled(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.{0 if value / unit >= 9999.95 else 1}f}"
