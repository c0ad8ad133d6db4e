"""The common parts of pages: frame, bars, and formatted numbers.

A page needs no other file. Without its script only the sorting and filtering of tables is missing. Bars are boxes of a
width in percent and not drawings, so that their texts have the page's size on a telephone, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Segment:
    """One part of a bar; `colour` is a class of the style sheet."""

    value: float
    colour: str
    name: str
    hatched: bool = False


@dataclass(frozen=True)
class ChartBar:
    label: str
    segments: tuple[Segment, ...]
    text: str
    limit: float | None = None  # drawn as a line where it lies within the scale

    @property
    def total(self) -> float:
        return sum(segment.value for segment in self.segments)


@dataclass(frozen=True)
class BarChart:
    """Bars below each other on one scale, with what their colours mean."""

    bars: tuple[ChartBar, ...]
    legend: tuple[Segment, ...] = ()
    limit_name: str = ""
    least_scale: float = 0.0  # of charts that are compared, the largest scale of them

    @property
    def scale(self) -> float:
        """Value of the full width. It includes a limit unless the bars would vanish."""
        longest = max((bar.total for bar in self.bars), default=0.0) or 1.0
        limits = [bar.limit for bar in self.bars if bar.limit is not None and bar.limit <= 2.5 * longest]
        return max(self.least_scale, 1.02 * max([longest, *limits]))

    def percent(self, value: float) -> str:
        return f"{100 * value / self.scale:.2f}%"

    def shows(self, bar: ChartBar) -> bool:
        """Return whether the bar's limit lies on the scale."""
        return bar.limit is not None and bar.limit <= self.scale

    @property
    def shows_limits(self) -> bool:
        return any(self.shows(bar) for bar in self.bars)


def on_one_scale(charts: Sequence[BarChart]) -> list[BarChart]:
    """Put charts on one scale: bars of the same length stand for the same amount."""
    largest = max((chart.scale for chart in charts), default=0.0)
    return [replace(chart, least_scale=largest) for chart in charts]


def environment(*packages: str) -> "Environment":
    """Make an environment with the templates of these packages and of this one."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # a terminal's tables do without

    loaders = [PackageLoader(package, ".") for package in (*packages, "profiles.report")]
    templates = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "duration": duration,
        "size": size,
        "count": count,
        "share": share,
        "percent": percent,
        "quantity": quantity,
    }
    return templates


# --- numbers for people ---------------------------------------------------------------------------------

NOT_MEASURED = "not measured"


def duration(seconds: float | None) -> str:
    """Three digits at most, in the unit that suits.

    >>> [duration(value) for value in (0.0042, 1.5, 92.4, 1234, 20000, None)]
    ['4.20 ms', '1.50 s', '92.4 s', '20.6 min', '5.56 h', 'not measured']
    """
    if seconds is None:
        return NOT_MEASURED
    if seconds < 1:
        return f"{digits(1000 * seconds)} ms"
    if seconds < 120:
        return f"{digits(seconds)} s"
    return f"{digits(seconds / 60)} min" if seconds < 7200 else f"{digits(seconds / 3600)} h"


def size(bytes_: float | None) -> str:
    """Decimal units, as file sizes are given.

    >>> [size(value) for value in (512, 59_700_000, 4_294_967_296, None)]
    ['512 B', '59.7 MB', '4.29 GB', 'not measured']
    """
    return abbreviate(bytes_, "B")


def count(value: float | None, unit: str = "") -> str:
    """
    >>> count(602e9, "FLOP"), count(14_926_090), count(None)
    ('602 GFLOP', '14.9 M', 'not measured')
    """
    return abbreviate(value, unit)


def share(value: float | None) -> str:
    """An accuracy.

    >>> share(0.94412), share(None)
    ('0.944', 'not measured')
    """
    return NOT_MEASURED if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A relative error, with its sign.

    >>> percent(0.123), percent(-0.5), percent(None)
    ('+12 %', '−50 %', '')
    """
    return "" if value is None else f"{100 * value:+.0f} %".replace("-", "−")


def quantity(value: float | None, unit: str) -> str:
    """A value of a comparison or a paper, in its unit.

    >>> quantity(2.5, "s"), quantity(1e9, "bytes"), quantity(2.997, "GMAC"), quantity(6e11, "FLOP"), quantity(None, "J")
    ('2.50 s', '1.00 GB', '2.997 GMAC', '600 GFLOP', 'not measured')
    """
    if value is None:
        return NOT_MEASURED
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    if unit in ("FLOP", "J"):
        return abbreviate(value, unit)
    return f"{value:,.4g} {unit}".rstrip()


def abbreviate(value: float | None, unit: str) -> str:
    if value is None:
        return NOT_MEASURED
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{digits(value / factor)} {prefix}{unit}"
    return f"{digits(value) if value % 1 else f'{value:.0f}'} {unit}".rstrip()


def digits(value: float) -> str:
    """Three digits that count.

    >>> [digits(value) for value in (0.04567, 1.5, 12.34, 123.4, 0)]
    ['0.046', '1.50', '12.3', '123', '0']
    """
    if value == 0:
        return "0"
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.2g}"
    )
