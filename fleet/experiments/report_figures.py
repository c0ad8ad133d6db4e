"""Pictures of an experiment's report, as SVG; the same figures give the same bytes."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from PIL import Image

from fleet.experiments.across import Study
from fleet.experiments.report_tables import note_missing_seeds
from profiles.report.curves import COSTS, add_up, curve, mean_over_seeds
from profiles.report.experiment import EmbeddedDevice, ExperimentOutcome
from profiles.report.figures import svg

Spread = Callable[[Sequence[float]], tuple[float, float]]
"""Lower and upper end of a band around the mean of these values."""


def draw_curves(outcome: ExperimentOutcome, partition: str) -> str:
    """Mean accuracy by round, a line per method; the band spans the seeds."""

    def draw(axes: Axes) -> None:
        plot_curves(axes, outcome, partition, lambda values: (min(values), max(values)))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.6)


def plot_curves(axes: Axes, outcome: ExperimentOutcome, partition: str, spread: Spread) -> None:
    """Plot the mean accuracy over seeds by round, a line per method, with its band; the legend is the caller's."""
    for index, method in enumerate(outcome.methods):
        by_round: dict[int, list[float]] = {}
        cells = [cell for cell in outcome.find_cells(method, partition) if cell.result]
        for cell in cells:
            for entry in cell.result.rounds if cell.result else ():
                if entry.accuracy:
                    by_round.setdefault(entry.round, []).append(entry.accuracy.mean)
        # those of all seeds: without the ones that stopped early a mean would be that of others
        rounds = [number for number in sorted(by_round) if len(by_round[number]) == len(cells)]
        if not rounds:
            continue
        label = f"{method}{note_missing_seeds(outcome, [cell.seed for cell in cells])}"
        (line,) = axes.plot(
            rounds,
            [fmean(by_round[number]) for number in rounds],
            **_style(index),
            label=label,
            marker="." if len(rounds) < 40 else "",
        )
        line.set_gid(f"curve-{method}")
        if len(cells) == 1:
            continue
        low, high = zip(*(spread(by_round[number]) for number in rounds), strict=True)
        band = axes.fill_between(rounds, low, high, color=f"C{index % 10}", alpha=0.15, linewidth=0)
        band.set_gid(f"band-{method}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy, mean over devices")


def draw_novel(outcome: ExperimentOutcome, partition: str) -> str | None:
    """Mean accuracy of novel devices by their rounds, a line per method; None without two such rounds."""
    if not any(len(entry.novel_rounds) > 1 for entry in outcome.comparisons if entry.partition == partition):
        return None

    def draw(axes: Axes) -> None:
        plot_novel(axes, outcome, partition)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.2)


def plot_novel(axes: Axes, outcome: ExperimentOutcome, partition: str) -> None:
    """Plot the mean accuracy of novel devices after each of their rounds; the legend is the caller's."""
    for index, method in enumerate(outcome.methods):
        entry = outcome.comparison(method, partition)
        if entry and entry.novel_rounds:
            rounds = range(1, len(entry.novel_rounds) + 1)
            (line,) = axes.plot(rounds, entry.novel_rounds, **_style(index), label=method, marker=".")
            line.set_gid(f"novel-{method}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round of the novel devices")
    axes.set_ylabel("accuracy, mean over them")


def draw_study(study: Study) -> str:
    """Draw accuracy against one option."""

    def draw(axes: Axes) -> None:
        plot_study(axes, study)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.6)


def plot_study(axes: Axes, study: Study) -> None:
    """Plot a line per method against numbers, or bars beside each other; the legend is the caller's."""
    for index, line in enumerate(study.lines):
        heights = [point.accuracy for point in line.points]
        errors = np.transpose([point.errors for point in line.points])
        if study.is_numeric:
            places = [float(point.value) for point in line.points]
            bars = axes.errorbar(places, heights, errors, **_style(index), label=line.name, marker=".", capsize=2)
            bars.lines[0].set_gid(f"across-{line.name}")
            continue
        width = 0.8 / len(study.lines)
        places = [study.values.index(point.value) + width * (index - (len(study.lines) - 1) / 2)
                  for point in line.points]  # fmt: skip
        axes.bar(places, heights, width, yerr=errors, color=f"C{index % 10}", label=line.name, capsize=2)
    for index, (method, accuracy) in enumerate(study.levels.items(), start=len(study.lines)):
        level = axes.axhline(accuracy, color=f"C{index % 10}", linestyle="--", linewidth=0.8, label=method)
        level.set_gid(f"level-{method}")
    if not study.is_numeric:
        axes.set_xticks(range(len(study.values)), [str(value) for value in study.values])
    axes.set_xlabel(study.option)
    axes.set_ylabel("accuracy, mean over devices")


def draw_costs(outcome: ExperimentOutcome, partition: str) -> list[str]:
    """Mean accuracy against each cost but rounds, a line per method; none of costs that no cell has."""
    points = {
        method: mean_over_seeds(
            [
                add_up(entry.point for entry in cell.result.rounds)
                for cell in outcome.find_cells(method, partition)
                if cell.result
            ]
        )
        for method in outcome.methods
    }
    pictures = []
    for name, cost in COSTS.items():
        curves = {method: curve(of, cost) for method, of in points.items()}
        if name != "round" and any(at for of in curves.values() for at, _ in of):
            pictures.append(_draw_cost(name, curves))
    return pictures


def _draw_cost(name: str, curves: Mapping[str, list[tuple[float, float]]]) -> str:
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


def draw_spread(outcome: ExperimentOutcome, partition: str) -> str:
    """Accuracy of every single device after the last round, all seeds together."""
    shares_by_method = {
        method: [
            share
            for cell in outcome.find_cells(method, partition)
            if cell.result
            for share in cell.result.accuracy_by_device.values()
        ]
        for method in outcome.methods
    }
    shares_by_method = {method: shares for method, shares in shares_by_method.items() if shares}

    def draw(axes: Axes) -> None:
        axes.boxplot(
            list(shares_by_method.values()),
            orientation="horizontal",
            tick_labels=list(shares_by_method),
            showfliers=False,
        )
        for index, shares in enumerate(shares_by_method.values(), start=1):
            # spread evenly instead of at random, so that the same figures give the same page
            heights = [index + 0.25 * ((number * 0.618) % 1 - 0.5) for number in range(len(shares))]
            axes.plot(shares, heights, ".", color=f"C{(index - 1) % 10}", alpha=0.6)
        axes.invert_yaxis()
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("accuracy of single devices after the last round")

    return svg(draw, width=8, height=1.2 + 0.4 * len(shares_by_method))


def draw_gains(outcome: ExperimentOutcome, partition: str) -> str | None:
    """Every device's gain over the reference, a line per method, devices in the order of their gain; None if none."""
    gains_by_method = {method: outcome.sort_gains(method, partition) for method in outcome.methods}
    if not any(gains_by_method.values()):
        return None

    def draw(axes: Axes) -> None:
        axes.axhline(0, color="0.6", linewidth=0.8)
        lines = [(method, gains) for method, gains in gains_by_method.items() if gains]
        for index, (method, gains) in enumerate(lines):
            shares = [(number + 0.5) / len(gains) for number in range(len(gains))]
            axes.plot(shares, gains, **_style(index), label=method, marker=".")
        axes.set_xlabel("share of devices with a lower gain")
        axes.set_ylabel(f"gain over {outcome.reference}")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

    return svg(draw, width=8, height=3.6)


def draw_embeddings(outcome: ExperimentOutcome, partition: str) -> list[tuple[str, str]]:
    """(method, picture) of each method whose server has an embedding for every device."""
    cells = [cell for method in outcome.methods for cell in outcome.find_cells(method, partition)]
    results = [(cell.method, cell.result) for cell in cells if cell.result]
    return [(method, _draw_plane(result.embeddings)) for method, result in results if result.embeddings]


def _draw_plane(devices: Sequence[EmbeddedDevice]) -> str:
    names = sorted({entry.kind for entry in devices})
    colours = colormaps["tab10" if len(names) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    kinds = {kind: colours[number % len(colours)] for number, kind in enumerate(names)}

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


def list_attack_pictures(outcome: ExperimentOutcome, partition: str) -> list[tuple[str, str, str]]:
    """(method, what the attacker has, PNG in base 64) for the first attacked device of each method."""
    attacks = [
        (method, attack)
        for method in outcome.methods
        for cell in outcome.find_cells(method, partition)
        for attack in (cell.result.attacks if cell.result else ())
    ]
    first = {(method, attack.attacker): attack for method, attack in reversed(attacks)}
    return [(*name, b64encode(attack.picture).decode()) for name, attack in reversed(first.items())]


def draw_attention(outcome: ExperimentOutcome, partition: str) -> str | None:
    """The test images in a row, and below them a row for each method: the same images under its models' attention."""
    attention = {
        method: cell.result.attention
        for method in outcome.methods
        for cell in outcome.find_cells(method, partition)
        if cell.result and cell.result.attention
    }
    if not attention:
        return None
    pictures = list({(one.device, one.png): one for row in attention.values() for one in row}.values())

    def draw(axes: Axes) -> None:
        for column, picture in enumerate(pictures):
            pixels = np.asarray(Image.open(BytesIO(picture.png)))
            for row, method in enumerate([None, *attention]):
                place = (column, column + 0.94, row + 0.94, row)
                axes.imshow(pixels, extent=place)
                for one in attention[method] if method else ():
                    if one.device == picture.device:
                        heat = np.array(one.attention)
                        axes.imshow(heat, extent=place, cmap="inferno", alpha=0.65, interpolation="bilinear")
        axes.set_xlim(0, len(pictures))
        axes.set_ylim(len(attention) + 1, 0)
        axes.set_yticks([row + 0.5 for row in range(len(attention) + 1)], ["image", *attention])
        axes.set_xticks([column + 0.5 for column in range(len(pictures))], [one.label for one in pictures])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    return svg(draw, width=1.5 + 1.1 * len(pictures), height=0.4 + 1.1 * (len(attention) + 1))
