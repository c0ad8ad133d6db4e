"""Reports of an experiment: tables for a terminal and in Markdown, and an HTML page with curves."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from statistics import fmean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from PIL import Image
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleet.experiments.cell import EmbeddedDevice
from fleet.experiments.grid import as_text
from fleet.experiments.outcome import CONFIDENCE, CellOutcome, Comparison, Interval, Outcome, SearchOutcome
from profiles.report.curves import COSTS, added_up, curve, mean_over_seeds
from profiles.report.figures import svg
from profiles.report.page import Grid, environment
from profiles.report.terminal import table as new_table

COST_HEADINGS = (
    "method", "partition", "accuracy", "± devices", "by image", "down MB", "up MB", "GFLOP", "wall s", "memory MB",
)  # fmt: skip
COST_UNITS = (
    "bytes and FLOPs per device and round; wall seconds of a whole run; memory of its process, all devices in it"
)
DIFFERENCES = (
    f"mean over seeds of the difference on the same seed, and its {CONFIDENCE:.0%} interval (Student's t, paired),"
    " not corrected for the number of comparisons"
)
PROGRESS = (
    "mean over seeds; ± evaluations is the population standard deviation over the evaluations of one run; rounds to an"
    " accuracy are those until the first evaluation that had it, where every seed reached it"
)
GAINS = (
    'of single devices over the same device with the same seed, all seeds together; "ahead" is the share of devices'
    " that gain"
)
LEADER = f"bold: ahead of every other method in its column, shown by {CONFIDENCE:.0%} intervals of paired differences"
GAIN_COLUMNS = ("mean", "lowest", "median", "highest", "ahead")
GENERIC = (
    "accuracy of the server's one model on images that no device has, mean over seeds and its"
    f" {CONFIDENCE:.0%} interval; - where each device has a part of its own"
)
NOVEL = (
    "accuracy of devices that joined after the training and learnt their own part alone, mean over them, then over"
    f" seeds, and its {CONFIDENCE:.0%} interval; what all devices share stood still"
)
SEARCH_HEADINGS = ("values", "", "rounds", "validation accuracy")
VALIDATION = (
    "validation accuracy: on images set apart from each device's training images, mean over devices after the last"
    " round, then over the search's seeds; no test image was seen"
)


def terminal_report(outcome: Outcome) -> Group:
    """Accuracies and costs."""
    accuracy = _table(f"{outcome.experiment}: accuracy", ("method", *outcome.partitions))
    for method in outcome.methods:
        cells = [
            Text(
                _accuracy(outcome, method, partition, before_interval="\n"),
                style="bold" if method == outcome.leader(partition) else "",
            )
            for partition in outcome.partitions
        ]
        accuracy.add_row(Text(method), *cells)
    costs = _table("costs", COST_HEADINGS)
    for row in cost_rows(outcome):
        costs.add_row(*map(Text, row))
    parts: list[RenderableType] = [accuracy, *(Text(note, style="dim") for note in (outcome.spread, LEADER))]
    parts += [Text(line, style="dim") for line in protocol_lines(outcome)]
    parts += [Text(line, style="dim") for line in spent(outcome)]
    if outcome.differences:
        differences = _table(difference_title(outcome), ("method", *outcome.partitions))
        for row in difference_rows(outcome, before_interval="\n"):
            differences.add_row(*map(Text, row))
        parts += [Text(), differences, Text(DIFFERENCES, style="dim")]
    if outcome.gains:
        gains = _table(gain_title(outcome), ("method", "partition", *GAIN_COLUMNS))
        for row in gain_rows(outcome):
            gains.add_row(*map(Text, row))
        parts += [Text(), gains, Text(GAINS, style="dim")]
    if generic_rows(outcome):
        generic = _table("generic model", ("method", *outcome.partitions))
        for row in generic_rows(outcome, before_interval="\n"):
            generic.add_row(*map(Text, row))
        parts += [Text(), generic, Text(GENERIC, style="dim")]
    if novel_rows(outcome):
        novel = _table("novel devices", ("method", *outcome.partitions))
        for row in novel_rows(outcome, before_interval="\n"):
            novel.add_row(*map(Text, row))
        parts += [Text(), novel, Text(NOVEL, style="dim")]
    if progress_rows(outcome):
        progress = _table("progress", progress_headings(outcome))
        for row in progress_rows(outcome):
            progress.add_row(*map(Text, row))
        parts += [Text(), progress, Text(PROGRESS, style="dim")]
    parts += [Text(f"{search_title(search)}: {search_note(search)}") for search in outcome.searches]
    parts += [Text(), costs, Text(COST_UNITS, style="dim")]
    if missing := unfinished(outcome):
        parts += [Text(), Text(missing, style="bold")]
    return Group(*parts)


def markdown_report(outcome: Outcome) -> str:
    """All tables, to be pasted into a document."""
    rows = []
    for method in outcome.methods:
        cells = []
        for partition in outcome.partitions:
            text = _accuracy(outcome, method, partition)
            cells.append(f"**{text}**" if method == outcome.leader(partition) else text)
        rows.append((method, *cells))
    notes = [outcome.spread, LEADER, *protocol_lines(outcome)]
    notes += [*spent(outcome), unfinished(outcome)]
    parts = [
        _markdown_table(("method", *outcome.partitions), rows),
        "\n".join(f"{note}  " for note in notes if note),
    ]
    if outcome.differences:
        rows = difference_rows(outcome)
        parts += [difference_title(outcome), _markdown_table(("method", *outcome.partitions), rows), DIFFERENCES]
    if outcome.gains:
        headings = ("method", "partition", *GAIN_COLUMNS)
        parts += [gain_title(outcome), _markdown_table(headings, gain_rows(outcome)), GAINS]
    if generic_rows(outcome):
        parts += ["generic model", _markdown_table(("method", *outcome.partitions), generic_rows(outcome)), GENERIC]
    if novel_rows(outcome):
        parts += ["novel devices", _markdown_table(("method", *outcome.partitions), novel_rows(outcome)), NOVEL]
    if progress_rows(outcome):
        parts += [_markdown_table(progress_headings(outcome), progress_rows(outcome)), PROGRESS]
    parts += [_markdown_table(COST_HEADINGS, cost_rows(outcome)), COST_UNITS]
    for search in outcome.searches:
        parts += [
            f"{search_title(search)}: {search_note(search)}",
            _markdown_table(SEARCH_HEADINGS, search_rows(search)),
        ]
    if outcome.searches:
        parts.append(VALIDATION)
    return "\n\n".join(parts) + "\n"


def html_report(outcome: Outcome) -> str:
    """One page that needs no other file."""
    page = environment("fleet.experiments").get_template("report.html")
    return page.render(
        outcome=outcome,
        settings=_settings(outcome),
        accuracy=[
            (
                method,
                [
                    (_accuracy(outcome, method, partition), method == outcome.leader(partition))
                    for partition in outcome.partitions
                ],
            )
            for method in outcome.methods
        ],
        leader=LEADER,
        cost_table=Grid(COST_HEADINGS, cost_rows(outcome), names=2),
        costs=COST_UNITS,
        difference_title=difference_title(outcome),
        difference_table=Grid(("method", *outcome.partitions), difference_rows(outcome)),
        differences=DIFFERENCES,
        gain_title=gain_title(outcome),
        gain_table=Grid(("method", "partition", *GAIN_COLUMNS), gain_rows(outcome), names=2),
        gains=GAINS,
        generic_table=Grid(("method", *outcome.partitions), generic_rows(outcome)),
        generic=GENERIC,
        novel_table=Grid(("method", *outcome.partitions), novel_rows(outcome)),
        novel=NOVEL,
        progress_table=Grid(progress_headings(outcome), progress_rows(outcome), names=2),
        progress=PROGRESS,
        searches=[
            (search_title(search), search_note(search), Grid(SEARCH_HEADINGS, search_rows(search), names=2))
            for search in outcome.searches
        ],
        validation=VALIDATION,
        protocols=protocol_lines(outcome),
        spent=spent(outcome),
        unfinished=unfinished(outcome),
        figures=[
            (
                partition,
                _curves(outcome, partition),
                _against(outcome, partition),
                _spread(outcome, partition),
                _gain_picture(outcome, partition) if _gains_on(outcome, partition) else None,
                _embedding_pictures(outcome, partition),
                _attention_picture(outcome, partition),
            )
            for partition in dict.fromkeys(entry.partition for entry in outcome.comparisons)
        ],
    )


def difference_title(outcome: Outcome) -> str:
    return f"{outcome.experiment}: difference in accuracy to {outcome.reference}"


def difference_rows(outcome: Outcome, before_interval: str = " ") -> list[tuple[str, ...]]:
    """One row for each method but the reference, a column for each partition."""
    return [
        (method, *(_difference(outcome, method, partition, before_interval) for partition in outcome.partitions))
        for method in outcome.methods
        if method != outcome.reference
    ]


def gain_title(outcome: Outcome) -> str:
    return f"{outcome.experiment}: gain over {outcome.reference}"


def gain_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """One row for each method on each partition, under GAIN_COLUMNS; none where the file names no reference."""
    rows = []
    for entry in outcome.comparisons if outcome.gains else ():
        if gains := outcome.gains_of(entry.method, entry.partition):
            figures = (fmean(gains), gains[0], median(gains), gains[-1])
            ahead = sum(gain > 0 for gain in gains) / len(gains)
            rows.append((entry.method, entry.partition, *(f"{figure:+.3f}" for figure in figures), f"{ahead:.0%}"))
    return rows


def generic_rows(outcome: Outcome, before_interval: str = " ") -> list[tuple[str, ...]]:
    """One row for each method with such a model, a column for each partition; none without a global test."""
    return _mean_rows(outcome, lambda entry: (entry.generic, entry.generic_interval), before_interval)


def novel_rows(outcome: Outcome, before_interval: str = " ") -> list[tuple[str, ...]]:
    """One row for each method, a column for each partition; none without novel devices."""
    return _mean_rows(outcome, lambda entry: (entry.novel, entry.novel_interval), before_interval)


def _mean_rows(
    outcome: Outcome, figure: Callable[[Comparison], tuple[float | None, Interval | None]], before_interval: str
) -> list[tuple[str, ...]]:
    """One row for each method that has the figure on any partition."""
    rows = []
    for method in outcome.methods:
        entries = [outcome.comparison(method, partition) for partition in outcome.partitions]
        figures = [figure(entry) if entry else (None, None) for entry in entries]
        if any(mean is not None for mean, _ in figures):
            rows.append((method, *(_with_interval(mean, interval, before_interval) for mean, interval in figures)))
    return rows


def _with_interval(mean: float | None, interval: Interval | None, before_interval: str) -> str:
    if mean is None:
        return "-"
    return f"{mean:.3f}{f'{before_interval}{_interval(interval)}' if interval else ''}"


def progress_headings(outcome: Outcome) -> tuple[str, ...]:
    """Of the table of progress; only the names where the experiment asks for none."""
    late, target = outcome.settings.get("late_rounds"), outcome.settings.get("target_accuracy")
    columns = [f"mean of the last {late} rounds", "± evaluations"] if late else []
    return ("method", "partition", *columns, *([f"rounds to {target:g}"] if target else []))


def progress_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """One row for each method on each partition, under `progress_headings`; none where these are only names."""
    late, target = outcome.settings.get("late_rounds"), outcome.settings.get("target_accuracy")
    rows = []
    for entry in outcome.comparisons if late or target else ():
        columns = [_figure(entry.late), _figure(entry.late_std)] if late else []
        rounds = "not reached" if entry.rounds_to_target is None else f"{entry.rounds_to_target:g}"
        rows.append((entry.method, entry.partition, *columns, *([rounds] if target else [])))
    return rows


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def search_title(search: SearchOutcome) -> str:
    return f"search for {search.method} on {search.partition}"


def search_note(search: SearchOutcome) -> str:
    """What was chosen, and whether other values may be better."""
    if search.chosen is None:
        return "no device could train with any of these values" if search.over else "not finished"
    edges = [
        f"{option} = {search.chosen[option]} is the {edge} value tried, {'lower' if edge == 'lowest' else 'higher'}"
        " ones may be better"
        for option, edge in search.at_edge.items()
    ]
    return "; ".join([f"chosen: {as_text(search.chosen)}", *edges])


def search_rows(search: SearchOutcome) -> list[tuple[str, ...]]:
    """One row for all values that were tried together, under SEARCH_HEADINGS."""
    return [
        (
            as_text(one.values),
            "chosen" if one.values == search.chosen else f"unusable: {one.unusable}" if one.unusable else "",
            str(one.rounds or "-"),
            "-" if one.accuracy is None else f"{one.accuracy:.3f}",
        )
        for one in search.tried
    ]


def cost_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """One row for each method on each partition, under COST_HEADINGS."""
    return [_cost_row(entry) for entry in outcome.comparisons]


def protocol_lines(outcome: Outcome) -> list[str]:
    """How accuracy is measured; where methods differ, a line for each way, naming the methods."""
    if len(outcome.protocols) < 2:
        return [f"accuracy: {protocol}" for protocol in outcome.protocols]
    methods = {
        protocol: dict.fromkeys(entry.method for entry in outcome.comparisons if entry.protocol == protocol)
        for protocol in outcome.protocols
    }
    return [f"accuracy of {', '.join(names)}: {protocol}" for protocol, names in methods.items()]


def spent(outcome: Outcome) -> list[str]:
    """A line on the privacy of each method that adds noise; none where there is no such method."""
    lines = []
    for entry in outcome.comparisons:
        known = (("updates", entry.epsilon), ("one device's features", entry.feature_epsilon))
        spent = [f"epsilon of {what} {epsilon:.3g}" for what, epsilon in known if epsilon is not None]
        lines += [f"{entry.method} on {entry.partition}: {', '.join(spent)}, over all rounds"] if spent else []
    return lines


def unfinished(outcome: Outcome) -> str:
    """A line on what is missing; empty when nothing is."""
    missing = [cell for cell in outcome.cells if cell.result is None]
    if not missing:
        return ""
    failed = [f"{cell.method}/{cell.partition}/seed-{cell.seed}: {cell.failure}" for cell in missing if cell.failure]
    reasons = f"; failed: {'; '.join(failed)}" if failed else ""
    return f"{len(missing)} of {len(outcome.cells)} cells are not finished{reasons}"


def _accuracy(outcome: Outcome, method: str, partition: str, before_interval: str = " ") -> str:
    entry = outcome.comparison(method, partition)
    if entry is None:
        return "-"
    deviation = outcome.deviation(entry)
    plus_minus = "" if deviation is None else f" ± {deviation:.3f}"
    interval = f"{before_interval}{_interval(entry.interval)}" if entry.interval else ""
    return f"{entry.accuracy:.3f}{plus_minus}{interval}{_fewer(outcome, entry.seeds)}"


def _difference(outcome: Outcome, method: str, partition: str, before_interval: str) -> str:
    entry = outcome.difference(method, partition)
    if entry is None:
        return "-"
    return f"{entry.mean:+.3f}{before_interval}{_interval(entry.interval)}{_fewer(outcome, entry.seeds)}"


def _interval(interval: Interval) -> str:
    return f"[{interval.low:.3f}, {interval.high:.3f}]"


def _fewer(outcome: Outcome, seeds: Sequence[int]) -> str:
    return f" ({len(seeds)} of {len(outcome.seeds)} seeds)" if len(seeds) < len(outcome.seeds) else ""


def _cost_row(entry: Comparison) -> tuple[str, ...]:
    return (
        entry.method,
        entry.partition,
        f"{entry.accuracy:.3f}",
        f"{entry.std_over_devices:.3f}",
        f"{entry.accuracy_weighted:.3f}",
        f"{entry.bytes_down / 1e6:.3f}",
        f"{entry.bytes_up / 1e6:.3f}",
        "-" if entry.flops is None else f"{entry.flops / 1e9:.2f}",
        f"{entry.wall_s:.0f}",
        "-" if entry.peak_rss_bytes is None else f"{entry.peak_rss_bytes / 1e6:.0f}",
    )


def _table(title: str, headings: Sequence[str]) -> Table:
    table = new_table(title)
    for heading in headings:
        name = heading in ("method", "partition")
        # Text: brackets in a name are no markup; of what does not fit, names are folded, numbers never
        table.add_column(
            Text(heading if name else heading.replace(" ", "\n")),
            justify="left" if name else "right",
            no_wrap=not name,
            overflow="fold",
        )
    return table


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _settings(outcome: Outcome) -> list[tuple[str, str]]:
    """All settings of the experiment, one line each."""
    lines = [
        (key, _as_text(value))
        for key, value in outcome.settings.items()
        if key not in ("methods", "partitions", "common")
    ]
    lines += [(f"partition {name}", _as_text(table)) for name, table in outcome.settings["partitions"].items()]
    lines += [(f"method {name}", _as_text(options)) for name, options in outcome.methods.items()]
    return lines


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {_as_text(inner)}" for key, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(_as_text, value)) or "-"
    return str(value)


# --- figures ------------------------------------------------------------------------------------------


def _curves(outcome: Outcome, partition: str) -> str:
    """Mean accuracy by round, a line per method; the band spans the seeds."""

    def draw(axes: Axes) -> None:
        for index, method in enumerate(outcome.methods):
            by_round: dict[int, list[float]] = {}
            for cell in _cells(outcome, method, partition):
                for entry in cell.result.rounds if cell.result else ():
                    if entry.accuracy:
                        by_round.setdefault(entry.round, []).append(entry.accuracy.mean)
            if not by_round:
                continue
            rounds = sorted(by_round)
            means = [fmean(by_round[number]) for number in rounds]
            axes.plot(rounds, means, **_style(index), label=method, marker="." if len(rounds) < 40 else "")
            low, high = ([extreme(by_round[number]) for number in rounds] for extreme in (min, max))
            axes.fill_between(rounds, low, high, color=f"C{index % 10}", alpha=0.15, linewidth=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy, mean over devices")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.6)


def _against(outcome: Outcome, partition: str) -> list[str]:
    """Mean accuracy against each cost but rounds, a line per method; none of costs that no cell has."""
    points = {
        method: mean_over_seeds(
            [
                added_up(entry.point for entry in cell.result.rounds)
                for cell in _cells(outcome, method, partition)
                if cell.result
            ]
        )
        for method in outcome.methods
    }
    drawn = []
    for name, cost in COSTS.items():
        curves = {method: curve(of, cost) for method, of in points.items()}
        if name != "round" and any(at for of in curves.values() for at, _ in of):
            drawn.append(_cost_curves(name, curves))
    return drawn


def _cost_curves(name: str, curves: Mapping[str, list[tuple[float, float]]]) -> str:
    def draw(axes: Axes) -> None:
        for index, (method, points) in enumerate(curves.items()):
            if points:
                spent, means = zip(*points, strict=True)
                axes.plot(spent, means, **_style(index), label=method, marker="." if len(points) < 40 else "")
        axes.set_xlabel(name)
        axes.set_ylabel("accuracy, mean over devices")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.2)


def _style(index: int) -> dict[str, Any]:
    return {"linestyle": ("-", "--", ":", "-.")[index // 10 % 4], "color": f"C{index % 10}"}


def _spread(outcome: Outcome, partition: str) -> str:
    """Accuracy of every single device after the last round, all seeds together."""
    shown = {
        method: [
            share
            for cell in _cells(outcome, method, partition)
            if cell.result
            for share in cell.result.accuracy_by_device.values()
        ]
        for method in outcome.methods
    }
    shown = {method: shares for method, shares in shown.items() if shares}

    def draw(axes: Axes) -> None:
        axes.boxplot(list(shown.values()), orientation="horizontal", tick_labels=list(shown), showfliers=False)
        for index, shares in enumerate(shown.values(), start=1):
            # spread evenly instead of at random, so that the same figures give the same page
            heights = [index + 0.25 * ((number * 0.618) % 1 - 0.5) for number in range(len(shares))]
            axes.plot(shares, heights, ".", color=f"C{(index - 1) % 10}", alpha=0.6)
        axes.invert_yaxis()
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("accuracy of single devices after the last round")

    return svg(draw, width=8, height=1.2 + 0.4 * len(shown))


def _gains_on(outcome: Outcome, partition: str) -> dict[str, list[float]]:
    gains = {method: outcome.gains_of(method, partition) for method in outcome.methods}
    return {method: some for method, some in gains.items() if some}


def _gain_picture(outcome: Outcome, partition: str) -> str:
    """Every device's gain over the reference, a line per method, devices in the order of their gain."""

    def draw(axes: Axes) -> None:
        axes.axhline(0, color="0.6", linewidth=0.8)
        for index, (method, gains) in enumerate(_gains_on(outcome, partition).items()):
            shares = [(number + 0.5) / len(gains) for number in range(len(gains))]
            axes.plot(shares, gains, **_style(index), label=method, marker=".")
        axes.set_xlabel("share of devices with a lower gain")
        axes.set_ylabel(f"gain over {outcome.reference}")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.6)


def _embedding_pictures(outcome: Outcome, partition: str) -> list[tuple[str, str]]:
    """(method, picture) of each method whose server has an embedding for every device."""
    cells = [cell for method in outcome.methods for cell in _cells(outcome, method, partition)]
    return [(cell.method, _plane(cell.result.embeddings)) for cell in cells if cell.result and cell.result.embeddings]


def _plane(devices: Sequence[EmbeddedDevice]) -> str:
    kinds = {kind: f"C{number % 10}" for number, kind in enumerate(sorted({entry.kind for entry in devices}))}

    def draw(axes: Axes) -> None:
        for kind, colour in kinds.items():
            for novel, marker in ((False, "o"), (True, "*")):
                chosen = [entry for entry in devices if (entry.kind, entry.novel) == (kind, novel)]
                label = f"{kind}{', novel' if novel else ''}"
                if chosen:
                    place = [entry.x for entry in chosen], [entry.y for entry in chosen]
                    axes.plot(*place, marker, color=colour, label=label, alpha=0.8)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=6, height=3.6)


def _attention_picture(outcome: Outcome, partition: str) -> str | None:
    """The test images in a row, and below them a row for each method: the same images under its models' attention."""
    shown = {
        method: cell.result.attention
        for method in outcome.methods
        for cell in _cells(outcome, method, partition)
        if cell.result and cell.result.attention
    }
    if not shown:
        return None
    pictures = list({(one.device, one.png): one for row in shown.values() for one in row}.values())

    def draw(axes: Axes) -> None:
        for column, picture in enumerate(pictures):
            pixels = np.asarray(Image.open(BytesIO(picture.png)))
            for row, method in enumerate([None, *shown]):
                place = (column, column + 0.94, row + 0.94, row)
                axes.imshow(pixels, extent=place)
                for one in shown[method] if method else ():
                    if one.device == picture.device:
                        heat = np.array(one.attention)
                        axes.imshow(heat, extent=place, cmap="inferno", alpha=0.65, interpolation="bilinear")
        axes.set_xlim(0, len(pictures))
        axes.set_ylim(len(shown) + 1, 0)
        axes.set_yticks([row + 0.5 for row in range(len(shown) + 1)], ["image", *shown])
        axes.set_xticks([column + 0.5 for column in range(len(pictures))], [one.label for one in pictures])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    return svg(draw, width=1.5 + 1.1 * len(pictures), height=0.4 + 1.1 * (len(shown) + 1))


def _cells(outcome: Outcome, method: str, partition: str) -> list[CellOutcome]:
    return [cell for cell in outcome.cells if (cell.method, cell.partition) == (method, partition)]
