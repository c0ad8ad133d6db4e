"""A run in a terminal of `width` columns: the tables of `coordinator show`, `runs` and `report`.

What does not fit is left out as a whole column; `--json` has everything.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter, methodcaller

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.run_view import RoundView, RunLine, RunView
from coordinator.views.report.document import DeviceReport, RunReport
from coordinator.views.report.words import (
    count_rounds,
    feature_words,
    generator_words,
    privacy_words,
    run_verdict,
    settings_words,
    sum_words,
)
from coordinator.views.scores import score_columns
from fedvit.quantities import format_count
from profiles.report.page import percent, quantity
from profiles.report.tables import Column, Sheet, columns, natural_width
from profiles.report.terminal import STYLES

MOST_ROUNDS = 40
"""Most rounds that tables by round show."""
MOST_DEVICES = 20
"""Most devices that a report shows."""
MOST_REFUSALS = 10
MOST_CLASSES = 10
CURVE_WIDTH = 20
EPSILONS = {
    "epsilon": "updates,\nall rounds",
    "row_epsilon": "features,\nper row",
    "upload_epsilon": "features,\nper upload",
    "device_epsilon": "features,\nall rounds",
}
_DEVICE_COLUMNS = columns(
    {
        "device": "device",
        "train_samples": "train\nimages",
        "test_samples": "test\nimages",
        "rounds": "rounds\ntrained",
        "accuracy": "last\naccuracy",
        "bytes_down": "down",
        "bytes_up": "up",
        "step_s": "step",
        "peak_rss_bytes": "memory",
        "flops_per_round": "work of\na round",
    }
)
_RUN_COLUMNS = [
    Column("run", "run"),
    Column("created_at", "created"),
    *columns({"status": "status", "method": "method", "model": "model"}),
    Column("rounds", "rounds", lambda line: f"{line.rounds}/{line.rounds_planned}"),
    *columns({"mean_accuracy": "accuracy", "bytes": "size"}),
]
_FIGURES = {
    "step": "step",
    "training of a round": "round",
    "peak memory": "memory",
    "energy of a round": "energy\na round",
}


def draw_run(run: RunView, width: int) -> Group:
    """Draw all tables of one run."""
    reason = f" ({run.reason})" if run.reason else ""
    parts: list[RenderableType] = [
        Text(f"run {run.run}: {run.method} on {run.model}, {run.status}{reason}, {count_rounds(run)}, seed {run.seed}"),
        Text(settings_words(run.settings), style="dim"),
    ]
    if run.classes:
        more = ", ..." if len(run.classes) > MOST_CLASSES else ""
        names = ", ".join(run.classes[:MOST_CLASSES])
        parts.append(Text(f"{format_count(len(run.classes), 'class')}: {names}{more}", style="dim"))
    if any(entry.accuracy_mean is not None for entry in run.rounds):
        parts += [Text(), draw_accuracy(run, width), Text(f"accuracy: {run.protocol}", style="dim")]
    if run.best is not None and run.tested is None:
        parts.append(Text(f"best round: {run.best}", style="dim"))
    parts += [Text(line) for line in sum_words(run)]
    if run.epsilon is not None:
        parts.append(Text(f"privacy of devices' updates: epsilon {run.epsilon:.3g} over all rounds so far"))
    if run.feature_epsilon is not None:
        parts.append(Text(f"privacy of one device's features: epsilon {run.feature_epsilon:.3g} over all rounds"))
    if run.epsilon is not None or run.feature_epsilon is not None:
        sheet = Sheet(run.rounds[-MOST_ROUNDS:], columns({"round": "round", **EPSILONS}), omit_empty=True)
        parts += [Text(), sheet.draw(_title("epsilon by round", run.rounds), width)]
    if run.devices:
        parts += [Text(), draw_devices(run, width)]
    if any(device.budget_broken for device in run.devices):
        parts += [Text(), _budgets(run).draw("budgets", width)]
    if run.strikes:
        rows = [(device, times, run.quarantined.get(device, "-")) for device, times in run.strikes.items()]
        parts += [Text(), Sheet(rows, _from_tuple("device", "strikes", "quarantine")).draw("strikes", width)]
    if run.refusals:
        parts += [Text(), draw_refusals(run, width)]
    return Group(*parts)


def draw_accuracy(run: RunView, width: int) -> Table:
    """Draw accuracy by round, with a column per device if they fit, otherwise the lowest and the highest."""
    tested = [entry for entry in run.rounds if entry.accuracy_mean is not None]
    means = {"accuracy_mean": "mean", "accuracy_std": "std", "accuracy_weighted": "by image"}
    names = [device.device for device in run.devices if device.accuracy is not None]
    each = [Column("accuracy", name, _read_accuracy(name)) for name in names]
    extremes = columns({"accuracy_lowest": "lowest", "accuracy_highest": "highest"})
    title = _title("accuracy by round", tested)
    for middle in (each, extremes) if 2 * len(names) <= width else (extremes,):  # a column takes at least two letters
        scores = score_columns(tested)
        shown = [Column("round", "round"), *middle, *columns(means), *scores, Column("curve", "curve", _bar)]
        table = Sheet(tested[-MOST_ROUNDS:], shown).draw(title, width, optional=("curve",))
        if natural_width(table) <= width:
            break
    return table


def draw_devices(run: RunView, width: int) -> Table:
    """Draw the devices' work and costs; accuracy is that of the last evaluation."""
    return Sheet(run.devices, _DEVICE_COLUMNS).draw("devices", width, optional=("test_samples", "flops_per_round"))


def draw_refusals(run: RunView, width: int) -> Table:
    """Draw the newest refusals; equal ones are counted."""
    times: dict[tuple[int | None, str, str, str], int] = {}
    for entry in run.refusals:
        key = (entry.round, entry.device, entry.kind, entry.reason)
        times[key] = times.pop(key, 0) + 1  # moved to the end
    more = len(times) - MOST_REFUSALS
    rows = [(count, "" if key[0] is None else key[0], *key[1:]) for key, count in [*times.items()][-MOST_REFUSALS:]]
    shown = _from_tuple("times", "round", "device", "of", "reason")
    title = "refused or lost" if more <= 0 else f"refused or lost, and {more} others before"
    return Sheet(rows, shown).draw(title, width)


def draw_runs(lines: Sequence[RunLine], width: int) -> Table:
    """Draw one line per run. A run's name is never cut: `show` and `--resume` need it."""
    return Sheet(lines, _RUN_COLUMNS).draw(None, width, optional=("model", "created_at", "method", "bytes"))


def _from_tuple(*names: str) -> list[Column]:
    return [Column(name, name, itemgetter(place)) for place, name in enumerate(names)]


def _read_accuracy(device: str) -> Callable[[RoundView], float | None]:
    return lambda entry: entry.accuracy.get(device)


def _budgets(run: RunView) -> Sheet:
    what = Column("what", "what", lambda device: ", ".join(f"{kind} {count}" for kind, count in device.broke.items()))
    within = {"device": "device", "budget_kept": "tasks within\nbudget", "budget_broken": "tasks\nover budget"}
    return Sheet(run.devices, [*columns(within), what])


def _bar(entry: RoundView) -> str:
    return "█" * math.floor(CURVE_WIDTH * (entry.accuracy_mean or 0.0) + 0.5)


def _title(what: str, rounds: Sequence[RoundView]) -> str:
    return what if len(rounds) <= MOST_ROUNDS else f"{what}: the newest {MOST_ROUNDS} of {len(rounds)}"


# --- report ---------------------------------------------------------------------------------------------


def draw_report(report: RunReport, width: int) -> Group:
    """Draw the outcome of a run, with predicted beside measured figures."""
    run = report.run
    tone, sentence, lines = run_verdict(report)
    parts: list[RenderableType] = [
        Text(f"run {run.run}: {run.method} on {run.model}, seed {run.seed}"),
        Text(sentence, style=STYLES[tone]),
        *(Text(f"  {line}") for line in lines),
        *(Text(line) for line in (*generator_words(run), *feature_words(run), *sum_words(run), *privacy_words(report))),
        Text(settings_words(run.settings), style="dim"),
    ]
    if any(device.comparisons() for device in report.devices):
        parts += [Text(), _draw_comparisons(report.devices[:MOST_DEVICES], width)]
    changed = [device for device in report.devices if device.changes]
    if changed:
        parts.append(Text())
    parts += [
        Text(f"{device.device} was given {device.changes}, to fit its budget") for device in changed[:MOST_DEVICES]
    ]
    if len(report.devices) > MOST_DEVICES:
        some = f"the first {MOST_DEVICES} of {len(report.devices)} devices; --csv and --out have all"
        parts += [Text(), Text(some)]
    if report.warnings:
        parts += [Text(), *(Text(f"note: {line}", style="dim") for line in report.warnings)]
    return Group(*parts)


def _draw_comparisons(devices: Sequence[DeviceReport], width: int) -> Table:
    """Draw predicted beside measured, medians over rounds; energy and errors if there are any."""
    rows = []
    for device in devices:
        compared = {entry.figure: entry for entry in device.comparisons()}
        for kind in ("predicted", "measured", "error"):
            cells = {
                figure: percent(entry.relative_error) or None
                if kind == "error"
                else None
                if getattr(entry, kind) is None
                else quantity(getattr(entry, kind), entry.unit)
                for figure, entry in compared.items()
            }
            if any(cells.get(figure) for figure in _FIGURES):
                rows.append({"device": device.device if kind != "error" else "", "kind": kind, **cells})
    known = Counter(figure for row in rows for figure, value in row.items() if value)
    shown = {"device": "device", "kind": "", **{figure: name for figure, name in _FIGURES.items() if known[figure]}}
    sheet = Sheet(rows, [Column(name, heading, methodcaller("get", name)) for name, heading in shown.items()])
    return sheet.draw("predicted and measured", width, optional=("step", "energy of a round"))
