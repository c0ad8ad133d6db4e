"""The options of the charts, as ECharts takes them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_POINTS = 400
"""Points of one line: more are not seen, and take long to send."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8a8a8a")
"""Colours of the reports; people who see no red or green can tell them apart."""
Values = Sequence[float | None]
Options = dict[str, Any]
"""Options of one chart."""
_SHARES = {"min": 0, "max": 1, "interval": 0.25}
"""Axis of values from 0 to 1, which ECharts would show up to 1.2."""


def has_values(named: Mapping[str, Values]) -> bool:
    """Return whether any line has a value.

    >>> has_values({"energy": [None, None]}), has_values({"energy": [None, 2.0]})
    (False, True)
    """
    return any(value is not None for values in named.values() for value in values)


def choose_time_unit(seconds: Iterable[float | None]) -> tuple[float, str]:
    """Choose a unit in which the largest time is a readable number: its seconds, and its name.

    >>> choose_time_unit([1.5, None]), choose_time_unit([900.0])
    ((1.0, 's'), (60.0, 'min'))
    """
    largest = max((value for value in seconds if value is not None), default=0.0)
    return (1.0, "s") if largest < 300 else (60.0, "min") if largest < 3 * 3600 else (3600.0, "h")


def select_points(count: int) -> list[int]:
    """The places of at most MOST_POINTS of `count` points, with the first and the last.

    >>> select_points(3), len(select_points(100_000)) <= MOST_POINTS, select_points(100_000)[-1]
    ([0, 1, 2], True, 99999)
    """
    step = -(-count // (MOST_POINTS - 1)) or 1
    places = list(range(0, count, step))
    return places if not count or places[-1] == count - 1 else [*places, count - 1]


def lines(x: Sequence[float], named: Mapping[str, Values], *, x_name: str, y_name: str) -> Options:
    """Lines over one scale."""
    kept = select_points(len(x))
    series = [
        _line(name, [[x[place], values[place]] for place in kept], COLOURS[number % len(COLOURS)])
        for number, (name, values) in enumerate(named.items())
    ]
    return _limit_axis(_frame(x_name, y_name) | {"series": series, "legend": _legend(list(named))}, named.values())


def overlay_lines(curves: Mapping[str, Sequence[tuple[float, float]]], *, x_name: str, y_name: str) -> Options:
    """Lines that each have points of their own."""
    series = [
        _line(name, [list(points[place]) for place in select_points(len(points))], COLOURS[number % len(COLOURS)])
        for number, (name, points) in enumerate(curves.items())
    ]
    values = [[value for _, value in points] for points in curves.values()]
    return _limit_axis(_frame(x_name, y_name) | {"series": series, "legend": _legend(list(curves))}, values)


def band(x: Sequence[float], mean: Values, low: Values, high: Values, *, x_name: str, y_name: str) -> Options:
    """A line within the range from `low` to `high`, where both are known."""
    kept = select_points(len(x))
    floor = [[x[place], low[place]] for place in kept]
    above = [[x[place], _difference(high[place], low[place])] for place in kept]
    hidden = {"lineStyle": {"opacity": 0}, "symbol": "none", "stack": "range", "silent": True}
    series = [
        {"type": "line", "name": "lowest", "data": floor, **hidden},
        {
            "type": "line", "name": "range over devices", "data": above,
            "areaStyle": {"color": COLOURS[0], "opacity": 0.25}, "itemStyle": {"color": COLOURS[4]}, **hidden,
        },
        _line("mean", [[x[place], mean[place]] for place in kept], COLOURS[0]),
    ]  # fmt: skip
    return _limit_axis(
        _frame(x_name, y_name) | {"series": series, "legend": _legend(["mean", "range over devices"])}, [high]
    )


def stack_bars(x: Sequence[float], named: Mapping[str, Values], *, x_name: str, y_name: str) -> Options:
    """Bars that add up."""
    kept = select_points(len(x))
    series = [
        {
            "type": "bar", "stack": "all", "name": name, "itemStyle": {"color": COLOURS[number % len(COLOURS)]},
            "data": [[x[place], values[place]] for place in kept],
        }
        for number, (name, values) in enumerate(named.items())
    ]  # fmt: skip
    return _frame(x_name, y_name) | {"series": series, "legend": _legend(list(named))}


def histogram(values: Sequence[float], *, x_name: str, y_name: str) -> Options:
    """Bars that count the values from 0 to 1 in each tenth."""
    counts = [0] * 10
    for value in values:
        counts[min(9, int(10 * value))] += 1
    options = _frame(x_name, y_name)
    options["xAxis"] |= {"type": "category", "data": [f"{place / 10:.1f}" for place in range(10)]}
    series = {"type": "bar", "name": y_name, "itemStyle": {"color": COLOURS[0]}, "data": counts, "barCategoryGap": "8%"}
    return options | {"series": [series]}


def scale(value: float | None, unit: float) -> float | None:
    """A value in a unit, to three places behind the point.

    >>> scale(512_000_000, 1e6), scale(None, 1e6)
    (512.0, None)
    """
    return None if value is None else round(value / unit, 3)


def _limit_axis(options: Options, lines: Iterable[Values]) -> Options:
    """Let the axis of accuracies end at 1."""
    values = [value for line in lines for value in line if value is not None]
    if options["yAxis"]["name"] == "accuracy" and all(value <= 1.0 for value in values):
        options["yAxis"] |= _SHARES
    return options


def _difference(high: float | None, low: float | None) -> float | None:
    return None if high is None or low is None else high - low


def _line(name: str, data: list[list[float | None]] | list[list[float]], colour: str) -> dict[str, Any]:
    return {
        "type": "line", "name": name, "data": data, "connectNulls": True, "symbolSize": 4,
        "lineStyle": {"width": 2, "color": colour}, "itemStyle": {"color": colour},
    }  # fmt: skip


def _legend(names: list[str]) -> dict[str, Any]:
    """Name the lines; a single one has the name of its chart."""
    return {"data": names, "top": 0, "left": 0, "type": "scroll", "show": len(names) > 1}


def _frame(x_name: str, y_name: str) -> Options:
    grid_line = {"lineStyle": {"color": "rgba(128, 128, 128, 0.3)"}}
    text = {"fontSize": 12}
    quiet = {"axisLine": {"show": False}, "axisTick": {"show": False}, "axisLabel": {**text, "hideOverlap": True}}
    return {
        "animation": False,
        "textStyle": {"fontFamily": "system-ui, sans-serif"},
        "grid": {"left": 8, "right": 16, "top": 52, "bottom": 24, "containLabel": True},
        "tooltip": {"trigger": "axis", "renderMode": "richText"},
        "xAxis": {"type": "value", "name": x_name, "nameLocation": "middle", "nameGap": 24, "nameTextStyle": text,
                  "min": "dataMin", "max": "dataMax", "minInterval": 1, "splitNumber": 4,
                  "splitLine": {"show": False}, **quiet},
        "yAxis": {"type": "value", "name": y_name, "nameTextStyle": {**text, "align": "left", "padding": [0, 0, 0, -8]},
                  "nameGap": 12, "splitNumber": 3, "splitLine": grid_line, **quiet},
    }  # fmt: skip
