"""A partition as a picture, and as a table and bars for a terminal: images of each class on each device."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table
from rich.text import Text

from fedvit.data.layout import TEST, TRAIN
from fedvit.errors import StorageFailed
from fleet.partition import PartitionSummary

Counts = npt.NDArray[np.int64]

_BARS = " ▁▂▃▄▅▆▇█"
_TERMINAL_COLUMNS = 60  # what device names and totals leave of 80

_TABLE_CLASSES = 10  # with more, a column per class does not fit into 80 characters
_INK, _PALE, _BUBBLE = "#222222", "#dddddd", "#3567a6"
_LABEL_LETTERS = 16
_LEGEND = "images of a class:"


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
    """Draw the images of each device and class. Raises StorageFailed when the picture cannot be written."""
    options = ", ".join(f"{option}={value}" for option, value in summary.options.items())
    title = f"{summary.dataset}: {summary.partition or 'dealt out'}{f' ({options})' if options else ''}"
    devices = [device.name for device in summary.devices]
    try:
        draw_bubbles(title, devices, list(summary.classes), count_matrix(summary)).save(file)
    except OSError as error:
        raise StorageFailed(f"cannot write {file}: {error.strerror or error}") from error


def count_matrix(summary: PartitionSummary) -> Counts:
    """Images of each device and class, train and test together: (devices, classes)."""
    counts = [[device.total(name) for name in summary.classes] for device in summary.devices]
    return np.array(counts, dtype=np.int64).reshape(len(summary.devices), len(summary.classes))


def draw_bubbles(title: str, devices: list[str], classes: list[str], counts: Counts) -> Image.Image:
    """A row per device, a column per class, a disc as large in area as the count (devices, classes).

    At the right a bar with the device's total, below what some sizes of a disc stand for. Names longer than 16 letters
    are cut.
    """
    page = _Page.for_names(devices, classes)
    largest = max(int(counts.max(initial=0)), 1)
    legend = sorted({max(1, largest // part) for part in (1, 4, 16)})
    widest = max(page.font.getlength(title), page.legend_width(legend))
    width = max(page.width, math.ceil(widest) + 2 * page.margin)
    image = Image.new("RGB", (width, page.height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((page.margin, page.margin), title, fill=_INK, font=page.font)
    for column, name in enumerate(classes):
        _write_upright(image, (page.x(column), page.top - page.gap), _cut(name), page.font)
    totals = counts.sum(axis=1)
    for row, name in enumerate(devices):
        y = page.y(row)
        draw.text((page.left - page.gap, y), _cut(name), fill=_INK, font=page.font, anchor="rm")
        draw.line((page.left, y, page.x(len(classes) - 1) + page.cell / 2, y), fill=_PALE)
        for column in np.flatnonzero(counts[row]).tolist():
            draw.circle((page.x(column), y), page.radius(counts[row, column] / largest), fill=_BUBBLE)
        length = page.bar * int(totals[row]) / max(int(totals.max(initial=0)), 1)
        draw.rectangle((page.right, y - page.cell / 4, page.right + length, y + page.cell / 4), fill=_PALE)
        draw.text((page.right + page.gap, y), str(totals[row]), fill=_INK, font=page.font, anchor="lm")
    _draw_legend(draw, page, legend)
    return image


def _draw_legend(draw: ImageDraw.ImageDraw, page: "_Page", sizes: list[int]) -> None:
    """Discs of these numbers of images, the last of which is the largest of the picture."""
    x, y = float(page.margin), page.y(page.rows) + page.gap
    draw.text((x, y), _LEGEND, fill=_INK, font=page.font, anchor="lm")
    x += page.font.getlength(_LEGEND)
    for size in sizes:
        x += page.gap + page.cell / 2
        draw.circle((x, y), page.radius(size / sizes[-1]), fill=_BUBBLE)
        x += page.cell / 2 + page.gap / 2
        draw.text((x, y), str(size), fill=_INK, font=page.font, anchor="lm")
        x += page.font.getlength(str(size))


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


@dataclass(frozen=True)
class _Page:
    """Positions on the picture, in pixels."""

    cell: int
    left: int
    top: int
    rows: int
    columns: int
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont

    gap, margin, bar = 8, 12, 120

    @classmethod
    def for_names(cls, devices: list[str], classes: list[str]) -> "_Page":
        cell = min(max(2400 // max(len(devices), len(classes), 1), 14), 40)
        font = ImageFont.load_default(min(cell - 2, 16))
        left, above = (
            math.ceil(max((font.getlength(_cut(name)) for name in names), default=0.0)) for names in (devices, classes)
        )
        title = 2 * cls.margin + 16
        return cls(cell, cls.margin + left + cls.gap, title + above + cls.gap, len(devices), len(classes), font)

    @property
    def right(self) -> int:
        return self.left + self.columns * self.cell + self.gap

    @property
    def width(self) -> int:
        return self.right + self.bar + self.margin

    @property
    def height(self) -> int:
        return self.top + (self.rows + 1) * self.cell + self.gap + self.margin  # the last row is the legend

    def legend_width(self, sizes: list[int]) -> float:
        discs = len(sizes) * (self.cell + 1.5 * self.gap)
        return self.font.getlength(_LEGEND) + discs + sum(self.font.getlength(str(size)) for size in sizes)

    def radius(self, share: float) -> float:
        """Radius of a disc whose area is this share of the largest one."""
        return max(0.48 * self.cell * math.sqrt(share), 1.0)

    def x(self, column: int) -> float:
        return self.left + (column + 0.5) * self.cell

    def y(self, row: int) -> float:
        return self.top + (row + 0.5) * self.cell


def _write_upright(
    image: Image.Image, foot: tuple[float, float], text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> None:
    """Text from the bottom up, centred above `foot`."""
    left, top, right, bottom = font.getbbox(text)
    strip = Image.new("L", (max(math.ceil(right - left), 1), max(math.ceil(bottom - top), 1)))
    ImageDraw.Draw(strip).text((-left, -top), text, fill=255, font=font)
    upright = strip.rotate(90, expand=True)
    corner = (round(foot[0] - upright.width / 2), round(foot[1] - upright.height))
    image.paste(Image.new("RGB", upright.size, _INK), corner, upright)


def _cut(name: str) -> str:
    return name if len(name) <= _LABEL_LETTERS else f"{name[: _LABEL_LETTERS - 1]}…"


def _short(name: str) -> str:
    """A class name no wider than the numbers below it."""
    return name if len(name) <= 4 else f"{name[:3]}…"
