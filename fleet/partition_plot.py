"""A partition as a picture, and as a table and bars for a terminal: images of each class on each device."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table
from rich.text import Text

from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import StorageFailed
from fedvit.files import name_failure
from fleet.partition import PartitionSummary

Counts = npt.NDArray[np.int64]

_BARS = " ▁▂▃▄▅▆▇█"
_TERMINAL_COLUMNS = 60  # what device names and totals leave of 80
_TABLE_CLASSES = 10  # with more, a column per class does not fit into 80 characters


def summary_table(summary: PartitionSummary) -> Table:
    """A table for a terminal: images per device, and of each class if there are few classes."""
    many = len(summary.classes) > _TABLE_CLASSES
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in ("device", TRAIN, TEST):
        table.add_column(heading, justify="left" if heading == "device" else "right", no_wrap=True)
    for heading in ("classes", "most of") if many else map(_short, summary.classes):
        # Text: brackets in a class name are no markup
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for device in summary.devices:
        totals = {name: device.total(name) for name in summary.classes}
        classes = [name for name in summary.classes if totals[name]]
        if many:
            cells = [Text(str(len(classes))), Text(max(classes, key=totals.__getitem__, default=""))]
        else:
            cells = [Text(str(totals[name] or "·"), style="dim") for name in summary.classes]
        table.add_row(device.name, str(sum(device.train.values())), str(sum(device.test.values())), *cells)
    return table


def write_plot(summary: PartitionSummary, file: Path) -> None:
    """Draw a row per device and a column per class, a disc's area being the number of images, and each device's total.

    Raises StorageFailed when the picture cannot be written.
    """
    from matplotlib.figure import Figure  # takes a second, and is for this picture alone

    options = ", ".join(f"{option}={value}" for option, value in summary.options.items())
    title = f"{summary.dataset}: {summary.partition or 'dealt out'}{f' ({options})' if options else ''}"
    counts, classes = count_matrix(summary), [_cut(name) for name in summary.classes]
    devices = [_cut(device.name) for device in summary.devices]
    cell = min(max(24 / max(len(devices), len(classes)), 0.14), 0.4)  # inches
    figure = Figure(figsize=(cell * len(classes) + 3.5, cell * len(devices) + 2.5), layout="constrained")
    discs, totals = figure.subplots(1, 2, sharey=True, width_ratios=(cell * len(classes), 1.2))
    rows, columns = np.nonzero(counts)
    largest = max(int(counts.max(initial=0)), 1)
    scale = (0.9 * cell * 72) ** 2 / largest  # square points of one image
    drawn = discs.scatter(columns, rows, s=counts[rows, columns] * scale, color="#3567a6", zorder=2)
    discs.set_xticks(range(len(classes)), classes, rotation=90)
    discs.set_yticks(range(len(devices)), devices)
    discs.set(title=title, xlim=(-0.5, len(classes) - 0.5), ylim=(len(devices) - 0.5, -0.5))
    discs.tick_params(length=0)
    discs.grid(axis="y", color="#dddddd")
    totals.bar_label(totals.barh(range(len(devices)), counts.sum(axis=1), height=0.5, color="#dddddd"), padding=3)
    totals.set_axis_off()
    discs.spines[:].set_visible(False)
    sizes = (
        drawn.legend_elements("sizes", num=3, color="#3567a6", func=lambda area: area / scale)
        if len(rows)
        else ([], [])
    )
    figure.legend(*sizes, title="images of a class", ncols=3, loc="outside lower left", frameon=False)
    with name_failure(f"cannot write {file}", StorageFailed, "FV1701"):
        figure.savefig(file)


def count_matrix(summary: PartitionSummary) -> Counts:
    """Images of each device and class, train and test together: (devices, classes)."""
    counts = [[device.total(name) for name in summary.classes] for device in summary.devices]
    return np.array(counts, dtype=np.int64).reshape(len(summary.devices), len(summary.classes))


def bar_lines(devices: list[str], counts: Counts) -> list[str]:
    """A line per device, for a terminal of 80 letters: a bar per class, full for the largest count, and the total.

    Neighbouring classes share a letter where there are more than 60.

    >>> bar_lines(["a", "bb"], np.array([[4, 0], [1, 2]]))
    ['a  |██  | 4', 'bb |▂▂▄▄| 3']
    """
    together = max(math.ceil(counts.shape[1] / _TERMINAL_COLUMNS), 1)
    merged = np.add.reduceat(counts, np.arange(0, counts.shape[1], together), axis=1)
    broad = max(min(_TERMINAL_COLUMNS // merged.shape[1], 2), 1)
    steps = np.ceil(merged / max(int(merged.max(initial=0)), 1) * (len(_BARS) - 1)).astype(int)
    width = max(map(len, devices), default=0)
    return [
        f"{name:<{width}} |{''.join(_BARS[step] * broad for step in row)}| {total}"
        for name, row, total in zip(devices, steps, counts.sum(axis=1), strict=True)
    ]


def _cut(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _short(name: str) -> str:
    """A class name no wider than the numbers below it."""
    return name if len(name) <= 4 else f"{name[:3]}…"
