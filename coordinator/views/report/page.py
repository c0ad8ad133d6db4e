"""The page of a run: what it reached and cost, beside what was predicted."""

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from coordinator.run_view import RoundView
from coordinator.views.report.classes import class_sheet, make_confusion
from coordinator.views.report.devices import device_sheet
from coordinator.views.report.document import DeviceReport, DeviceRound, RunReport
from coordinator.views.report.words import (
    feature_words,
    generator_words,
    privacy_words,
    run_verdict,
    setting_words,
    sum_words,
)
from coordinator.views.scores import find_newest_scores, score_columns
from fedvit.answer_scores import SCORE_NAMES
from fedvit.quantities import format_count
from profiles.report.figures import svg
from profiles.report.page import BarChart, ChartBar, Segment, duration, environment, percent, quantity, share, size
from profiles.report.profile_page import budget_words
from profiles.report.tables import Column, Sheet, columns
from profiles.report.verdict import BUDGETS

MOST_ROWS = 400
"""Most rows of the table of all devices and rounds; the JSON has all."""
MOST_DEVICES = 12
"""Most devices that are shown one by one; of more, the page has their distribution and the extremes."""
LOWEST = 10
"""Most devices that are shown, if there are many: those with the lowest accuracy, or the highest costs."""
BIN = 0.05
"""Width of a bar of the distribution of accuracies."""
MOST_MISSING = 50
"""Most refused and missing results that are listed; the JSON has all."""
PREDICTED = Segment(0, "c7", "predicted")
MEASURED = Segment(0, "c0", "measured")
COMPARED = {"training of a round": "round_deadline_s", "peak memory": "memory_bytes", "energy of a round": None}
"""Figures that are drawn for each device, and the budget that limits them."""
UPDATE_EPSILONS = {"epsilon": "of a device, all rounds"}
FEATURE_EPSILONS = {
    "device_epsilon": "of a device, all rounds",
    "upload_epsilon": "of an upload",
    "row_epsilon": "of a row",
}
_ROUND_COLUMNS = columns(
    {
        "round": "round",
        "cohort": "devices",
        "accepted": "accepted",
        "accuracy_mean": "accuracy",
        "accuracy_lowest": "lowest",
        "accuracy_highest": "highest",
        "accuracy_weighted": "by image",
        "train_loss": "loss",
        "bytes_down": "down",
        "bytes_up": "up",
        "devices_s": "devices took",
        "server_s": "server took",
    }
)


def run_page(report: RunReport) -> str:
    """Make one page that needs no other file."""
    pages = environment("coordinator.views.report")
    pages.filters["setting"] = setting_words
    run = report.run
    rows = [DetailRow(device.device, entry) for device in report.devices for entry in device.rounds]
    tested = sorted(
        (device.totals for device in report.devices if device.totals.accuracy is not None),
        key=lambda device: device.accuracy or 0.0,
    )
    return pages.get_template("report.html").render(
        report=report,
        run=run,
        verdict=run_verdict(report),
        tiles=_tiles(report),
        accuracy=_draw_accuracy(run.rounds),
        loss=_draw_loss(run.rounds),
        generator=generator_words(run),
        features=feature_words(run),
        sums=sum_words(run),
        generator_pictures=[drawn for drawn in (_draw_difference(run.rounds), _draw_entropy(run.rounds)) if drawn],
        privacy=privacy_words(report),
        epsilons=[
            drawn
            for kind, names in (("updates", UPDATE_EPSILONS), ("features", FEATURE_EPSILONS))
            if (drawn := _draw_epsilons(run.rounds, kind, names))
        ],
        privacy_table=_privacy_sheet(run.rounds),
        distribution=_draw_distribution([device.accuracy or 0.0 for device in tested]),
        lowest=Sheet(
            tested[:LOWEST],
            columns(
                {
                    "device": "device",
                    "accuracy": "accuracy",
                    "train_samples": "training images",
                    "test_samples": "test images",
                    "rounds": "rounds",
                }
            ),
        ),
        class_table=class_sheet(report.classes),
        confusion=make_confusion(report.classes),
        device_table=device_sheet(report.devices, omit_empty=True),
        few=len(report.devices) <= MOST_DEVICES,
        compared=[(figure, _compare(report.devices, figure)) for figure in COMPARED],
        comparisons=[(device, device.comparisons()) for device in report.devices],
        missing=Sheet(
            (report.refusals + report.dropouts)[:MOST_MISSING],
            columns({"times": "times", "round": "round", "device": "device", "kind": "what", "reason": "reason"}),
        ),
        predicted=any(row.entry.expected for row in rows),
        budgets=_budget_sheet(report.devices),
        round_table=_draw_round_table(run.rounds),
        detail_table=_detail_sheet(rows) if len(rows) <= MOST_ROWS else None,
        details=len(rows),
    )


def run_piece(report: RunReport) -> str:
    """Make what a notebook shows of a run: a piece of a page, without the page's style."""
    return (
        environment("coordinator.views.report")
        .get_template("report_piece.html")
        .render(
            run=report.run,
            verdict=run_verdict(report),
            accuracy=_draw_accuracy(report.run.rounds),
            round_table=_draw_round_table(report.run.rounds),
            device_table=device_sheet(report.devices, omit_empty=True),
        )
    )


def _draw_round_table(rounds: Sequence[RoundView]) -> Sheet:
    """Make the table of rounds, with the scores of their evaluations that are known."""
    return Sheet(rounds, [*_ROUND_COLUMNS, *score_columns(rounds)])


def _tiles(report: RunReport) -> list[tuple[str, str]]:
    run = report.run
    peaks = [device.totals.peak_rss_bytes for device in report.devices if device.totals.peak_rss_bytes is not None]
    return [
        (share(run.mean_accuracy), "accuracy, mean over devices"),
        *((f"{value:.3g}", f"{SCORE_NAMES[name]}, all test images") for name, value in find_newest_scores(run.rounds)),
        (size(sum(device.totals.bytes_down for device in report.devices)), "down, all devices"),
        (size(sum(device.totals.bytes_up for device in report.devices)), "up, all devices"),
        *([(size(max(peaks)), "memory of a device at its highest")] if peaks else []),
        *([(duration(report.duration_s), "from the first round to the last")] if report.duration_s else []),
    ]


# --- pictures -------------------------------------------------------------------------------------------

Values = tuple[float, ...]
"""A figure of a round: the figure itself, then the lowest and the highest device."""


def _draw_rounds(
    rounds: Sequence[RoundView],
    pick: Callable[[RoundView], Values | None],
    label: str,
    *,
    colour: str,
    top: float | None = 1.0,
    spread: Callable[[RoundView], float] | None = None,
) -> str | None:
    """Draw a figure by round, its extremes as dots; None if no round has it. `top` None: a bit above the highest."""
    points = [(entry, values) for entry in rounds if (values := pick(entry)) is not None]
    if not points:
        return None
    numbers = [entry.round for entry, _ in points]
    main, *extremes = zip(*(values for _, values in points), strict=True)

    def draw(axes: Axes) -> None:
        axes.plot(numbers, main, color=colour, marker="." if len(numbers) < 40 else "")
        if spread:
            low = [value - spread(entry) for entry, (value, *_) in points]
            high = [value + spread(entry) for entry, (value, *_) in points]
            axes.fill_between(numbers, low, high, color=colour, alpha=0.2, linewidth=0)
        for extreme in extremes:
            axes.plot(numbers, extreme, color=colour, linewidth=0.8, linestyle=":")
        axes.set_ylim(0, max(1e-3, 1.05 * max(main)) if top is None else top)
        axes.set_ylabel(label)
        _name_rounds(axes)

    return svg(draw)


def _draw_accuracy(rounds: Sequence[RoundView]) -> str | None:
    """Draw the mean over devices, a band of a standard deviation, and the lowest and the highest device."""

    def pick(entry: RoundView) -> Values | None:
        mean, lowest, highest = entry.accuracy_mean, entry.accuracy_lowest, entry.accuracy_highest
        return None if mean is None or lowest is None or highest is None else (mean, lowest, highest)

    return _draw_rounds(rounds, pick, "accuracy", colour="C0", spread=lambda entry: entry.accuracy_std or 0.0)


def _draw_loss(rounds: Sequence[RoundView]) -> str | None:
    def pick(entry: RoundView) -> Values | None:
        return None if entry.train_loss is None else (entry.train_loss,)

    return _draw_rounds(rounds, pick, "training loss", colour="C1", top=None)


def _draw_difference(rounds: Sequence[RoundView]) -> str | None:
    def pick(entry: RoundView) -> Values | None:
        return (entry.generator.difference,) if entry.generator else None

    return _draw_rounds(rounds, pick, "difference between devices / size", colour="C0", top=None)


def _draw_entropy(rounds: Sequence[RoundView]) -> str | None:
    def pick(entry: RoundView) -> Values | None:
        entropy = entry.generator.attention if entry.generator else None
        return (entropy.mean, entropy.lowest, entropy.highest) if entropy else None

    return _draw_rounds(rounds, pick, "entropy of attention / log K", colour="C2")


def _draw_epsilons(rounds: Sequence[RoundView], kind: str, names: dict[str, str]) -> str | None:
    """Draw what was spent by round, of updates or of features; None without such noise."""
    lines = {
        label: [(entry.round, value) for entry in rounds if (value := getattr(entry, name)) is not None]
        for name, label in names.items()
    }
    if not any(lines.values()):
        return None

    def draw(axes: Axes) -> None:
        for place, (label, points) in enumerate(lines.items()):
            if points:
                numbers, values = zip(*points, strict=True)
                axes.plot(numbers, values, color=f"C{place}", marker="." if len(numbers) < 40 else "", label=label)
        if kind == "features":  # a row and a device are orders of magnitude apart
            axes.set_yscale("log")
            axes.legend(frameon=False)
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(f"epsilon of {kind}")
        _name_rounds(axes)

    return svg(draw)


def _draw_distribution(accuracies: Sequence[float]) -> str | None:
    """Draw how many devices have which accuracy; None for so few devices that the table shows it."""
    if len(accuracies) <= MOST_DEVICES:
        return None

    def draw(axes: Axes) -> None:
        first = math.floor(min(accuracies) / BIN)
        last = max(math.ceil(max(accuracies) / BIN), first + 1)
        axes.hist(accuracies, bins=last - first, range=(first * BIN, last * BIN), color="C0")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("accuracy of the last evaluation")
        axes.set_ylabel("devices")

    return svg(draw)


def _name_rounds(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")


def _compare(devices: Sequence[DeviceReport], figure: str) -> BarChart | None:
    """Compare one figure of the devices with the most of it, predicted above measured; None if never measured."""
    bars: list[ChartBar] = []
    rows = [
        (device, entry, entry.measured)
        for device in devices
        for entry in device.comparisons()
        if entry.figure == figure and entry.measured is not None
    ]
    if len(rows) > MOST_DEVICES:
        rows = sorted(rows, key=lambda row: row[2], reverse=True)[:LOWEST]
    for device, entry, measured in rows:
        name, budget = device.device, COMPARED[figure]
        if entry.predicted is not None:
            segment = Segment(entry.predicted, PREDICTED.colour, PREDICTED.name)
            bars.append(ChartBar(name, (segment,), quantity(entry.predicted, entry.unit)))
            name = ""
        error = f" ({percent(entry.relative_error)})" if entry.relative_error is not None else ""
        bars.append(
            ChartBar(
                name,
                (Segment(measured, MEASURED.colour, MEASURED.name),),
                quantity(measured, entry.unit) + error,
                limit=getattr(device.budget, budget) if device.budget and budget else None,
            )
        )
    predicted = any(segment.colour == PREDICTED.colour for bar in bars for segment in bar.segments)
    return BarChart(tuple(bars), (PREDICTED, MEASURED) if predicted else (MEASURED,), "budget") if bars else None


# --- tables ---------------------------------------------------------------------------------------------


class DetailRow(NamedTuple):
    """One device in one round."""

    device: str
    entry: DeviceRound


def _privacy_sheet(rounds: Sequence[RoundView]) -> Sheet:
    """Make the table of epsilons by round, of the kinds that the run has."""
    names = {name: f"updates: {label}" for name, label in UPDATE_EPSILONS.items()}
    names |= {name: f"features: {label}" for name, label in FEATURE_EPSILONS.items()}
    return Sheet(rounds, columns({"round": "round", **names}), omit_empty=True)


def _budget_sheet(devices: Sequence[DeviceReport]) -> Sheet:
    """Make the table of budgets, kept or broken, by device and kind; of many devices only broken ones."""
    rows = []
    for device in devices:
        limits = budget_words(device.budget) if device.budget else {}
        for kind, name in BUDGETS.items():
            if kind in device.broken or (kind in limits and len(devices) <= MOST_DEVICES):
                outcome = f"broken in {format_count(device.broken[kind], 'round')}" if kind in device.broken else "kept"
                rows.append((device.device, name, limits.get(kind, "kept by the device alone"), outcome))
    headings = ("device", "budget", "limit", "outcome")
    return Sheet(rows, [Column(name, name, itemgetter(at)) for at, name in enumerate(headings)])


def _detail_sheet(rows: Sequence[DetailRow]) -> Sheet:
    def read_prediction(name: str) -> Callable[[DetailRow], float | None]:
        return lambda row: getattr(row.entry.expected.prediction, name) if row.entry.expected else None

    def read_use(name: str) -> Callable[[DetailRow], float | None]:
        return lambda row: getattr(row.entry.measured, name) if row.entry.measured else None

    def find_error(name: str) -> Callable[[DetailRow], float | None]:
        def read(row: DetailRow) -> float | None:
            before, after = read_prediction(name)(row), read_use(name)(row)
            return None if before is None or not after else (before - after) / after

        return read

    return Sheet(
        rows,
        [
            Column("device", "device"),
            Column("round", "round", lambda row: row.entry.round),
            Column(
                "outcome",
                "outcome",
                lambda row: f"{row.entry.status}{': ' if row.entry.reason else ''}{row.entry.reason or ''}",
            ),
            Column("train_s", "training predicted", read_prediction("train_s")),
            Column("train_s", "measured", read_use("train_s")),
            Column("error", "error", find_error("train_s")),
            Column("peak_rss_bytes", "memory predicted", read_prediction("peak_rss_bytes")),
            Column("peak_rss_bytes", "measured", read_use("peak_rss_bytes")),
            Column("error", "error", find_error("peak_rss_bytes")),
            Column("energy_j", "energy", read_use("energy_j")),
            Column("accuracy", "accuracy", lambda row: row.entry.accuracy),
        ],
    )
