"""Figures of an experiment for a paper, as PDF or SVG of the width and font of its text.

A line, band, bar or mark has the id of its method in an SVG; the same figures give the same file.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont

from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fleet.experiments.across import Study
from fleet.experiments.outcome import mean_interval
from fleet.experiments.report_figures import Spread, plot_curves, plot_novel, plot_study
from fleet.experiments.report_tables import note_missing_seeds
from fleet.experiments.significance import MethodRanks, find_cliques
from profiles.report.experiment import ExperimentOutcome

LEGEND_COLUMNS = 2
LINE_HEIGHT_IN = 0.22
"""Height of a method's bar, or of its name beside the scale of ranks."""


def _spread_by_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean, deviation = fmean(values), stdev(values) if len(values) > 1 else 0.0
    return mean - deviation, mean + deviation


def _spread_by_interval(values: Sequence[float]) -> tuple[float, float]:
    interval = mean_interval(values)
    return (interval.low, interval.high) if interval else (values[0], values[0])


BANDS: dict[str, Spread] = {
    "interval": _spread_by_interval,
    "deviation": _spread_by_deviation,
    "range": lambda values: (min(values), max(values)),
}
"""Bands of a learning curve over seeds; a single seed has none."""


class FigureStyle(NamedTuple):
    """The look of all figures."""

    form: str = "pdf"  # or "svg"
    width_in: float = 3.3
    font: str = "serif"  # a family that is installed, or a generic one
    font_size: float = 8.0  # points
    band: str = "interval"


def check_font(font: str) -> None:
    """Check that a font is installed. Raises ConfigError naming it."""
    try:
        findfont(FontProperties(family=[font]), fallback_to_default=False)
    except ValueError:
        raise ConfigError(
            "FV2126", f"--font {font!r} is not installed on this machine; use serif, sans-serif, or a font's name"
        ) from None


def write_curves(outcome: ExperimentOutcome, partition: str, style: FigureStyle, file: Path) -> None:
    """Write accuracy by round, a line per method with its band over seeds."""

    def draw(axes: Axes) -> None:
        plot_curves(axes, outcome, partition, BANDS[style.band])
        axes.get_figure().legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False)  # type: ignore[union-attr]

    _write(draw, style, _curve_height(style, len(outcome.methods)), file)


def write_novel(outcome: ExperimentOutcome, partition: str, style: FigureStyle, file: Path) -> None:
    """Write accuracy of novel devices by their rounds, a line per method."""

    def draw(axes: Axes) -> None:
        plot_novel(axes, outcome, partition)
        axes.get_figure().legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False)  # type: ignore[union-attr]

    _write(draw, style, _curve_height(style, len(outcome.methods)), file)


def write_study(study: Study, style: FigureStyle, file: Path) -> None:
    """Write accuracy against one option."""

    def draw(axes: Axes) -> None:
        plot_study(axes, study)
        axes.get_figure().legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False)  # type: ignore[union-attr]

    _write(draw, style, _curve_height(style, len(study.lines) + len(study.levels)), file)


def _curve_height(style: FigureStyle, entries: int) -> float:
    """Height in inches of a plot with a legend of so many entries above it."""
    legend_rows = -(-entries // LEGEND_COLUMNS)
    return 0.62 * style.width_in + legend_rows * style.font_size * 1.6 / 72


def write_bars(outcome: ExperimentOutcome, partition: str, style: FigureStyle, file: Path) -> None:
    """Write accuracy after the last round, a bar per method with the interval over seeds; one seed has no interval."""
    entries = [entry for method in outcome.methods if (entry := outcome.comparison(method, partition))]

    def draw(axes: Axes) -> None:
        for place, entry in enumerate(entries):
            (bar,) = axes.barh(place, entry.accuracy, height=0.7, color="0.75")
            bar.set_gid(f"bar-{entry.method}")
            if entry.interval:
                (whisker,) = axes.plot([entry.interval.low, entry.interval.high], [place, place], "k|-", linewidth=0.8)
                whisker.set_gid(f"interval-{entry.method}")
        names = [f"{entry.method}{note_missing_seeds(outcome, entry.seeds)}" for entry in entries]
        axes.set_yticks(range(len(entries)), names)
        axes.invert_yaxis()
        axes.set_xlabel("accuracy, mean over devices")
        axes.grid(visible=False, axis="y")

    _write(draw, style, 0.5 + LINE_HEIGHT_IN * len(entries), file)


def write_ranks(ranks: MethodRanks, style: FigureStyle, file: Path) -> None:
    """Write the critical-difference diagram: bars join methods that are too near to each other to tell them apart."""
    means = sorted(ranks.means.items(), key=lambda entry: entry[1])
    cliques = find_cliques(ranks)
    half, gap = -(-len(means) // 2), 0.02 * len(means)
    first_name = 0.6 + 0.35 * len(cliques)  # below the scale and the bars

    def draw(axes: Axes) -> None:
        _draw_scale(axes, ranks)
        for place, (low, high) in enumerate(cliques):
            height = -0.4 - 0.35 * place
            (line,) = axes.plot([low - 0.03, high + 0.03], [height, height], "k", linewidth=2.5, solid_capstyle="butt")
            line.set_gid(f"clique-{place}")
        for place, (method, mean) in enumerate(means):
            is_left = place < half
            height = -first_name - (place if is_left else len(means) - 1 - place)
            edge = 1.0 if is_left else float(len(means))
            (line,) = axes.plot([mean, mean, edge], [0, height, height], "k", linewidth=0.6)
            line.set_gid(f"rank-{method}")
            text = f"{method} {mean:.2f}" if is_left else f"{mean:.2f} {method}"
            axes.text(
                edge - gap if is_left else edge + gap, height, text, ha="right" if is_left else "left", va="center"
            )
        axes.set_ylim(-first_name - half, 1.6)
        axes.set_axis_off()

    _write(draw, style, LINE_HEIGHT_IN * (2.2 + first_name + half), file)


def _draw_scale(axes: Axes, ranks: MethodRanks) -> None:
    count = len(ranks.means)
    axes.plot([1, count], [0, 0], "k", linewidth=0.8)
    for rank in range(1, count + 1):
        axes.plot([rank, rank], [0, 0.2], "k", linewidth=0.8)
        axes.text(rank, 0.3, str(rank), ha="center", va="bottom")
    (line,) = axes.plot([1, 1 + ranks.critical_difference], [1.3, 1.3], "k|-", linewidth=0.8)
    line.set_gid("critical-difference")
    text = f"CD = {ranks.critical_difference:.2f}"
    axes.text(1 + ranks.critical_difference + 0.02 * count, 1.3, text, ha="left", va="center")


def _write(draw: Callable[[Axes], None], style: FigureStyle, height_in: float, file: Path) -> None:
    """Raises StorageFailed."""
    settings: Any = {
        "font.family": [style.font], "font.size": style.font_size, "axes.linewidth": 0.6, "lines.linewidth": 1.0,
        "lines.markersize": 3, "axes.spines.top": False, "axes.spines.right": False,
        "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "fedvit",  # journals refuse fonts of type 3
    }  # fmt: skip
    with rc_context(settings):
        figure = Figure(figsize=(style.width_in, height_in), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.2, linewidth=0.4)
        draw(axes)
        content = io.BytesIO()
        metadata = {"CreationDate": None} if style.form == "pdf" else {"Date": None}
        figure.savefig(content, format=style.form, metadata=metadata)
    atomic_write(file, content.getvalue())
