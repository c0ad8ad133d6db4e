"""The report of a benchmark: one JSON object, and the same figures as tables for a terminal.

A report is a dictionary of figures, of dictionaries, and of lists of dictionaries. A figure's key ends with its unit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct
from rich import box
from rich.console import Group
from rich.table import Table

from bench.machine import Machine
from coordinator.rounds.display import choose_display
from fedvit.files import atomic_write
from profiles.report.console import Console

Report = dict[str, Any]
Progress = Callable[[str], None]

UNITS = {
    "mb_s": "MB/s", "per_s": "1/s", "bytes": "MB", "gflops": "GFLOP/s", "gflop": "GFLOP", "ms": "ms", "s": "s",
}  # fmt: skip
"""Unit by the end of a key; the first that matches counts. Bytes are shown in 10^6."""
MEGA = 1e6
LABELS = ("name", "model", "op", "kind")
"""Keys whose value names a result in a list."""
MOST_COLUMNS = 6
"""A longer list of results has a row, not a column, for each."""


class Measurement(Struct, frozen=True, kw_only=True):
    """A figure, with the values of several processes where it has them."""

    name: str
    unit: str
    values: tuple[Any, ...]
    machine: Machine | None

    @property
    def text(self) -> str:
        """Values for a reader; empty where nothing was measured."""
        return " ".join(_format(value, self.unit) for value in self.values)


def measure(run: Callable[[Progress], Report | list[Report]], as_json: bool, out: Path | None = None) -> Any:
    """Call `run` with a function that shows progress. Print its report, and write it to `out` as JSON."""
    with choose_display() as display:
        report = run(display.line)
    content = msgspec.json.format(msgspec.json.encode(report), indent=2)
    if as_json:
        click.echo(content.decode())
    else:
        Console().print(make_tables(report if isinstance(report, dict) else {"results": report}))
    if out:
        atomic_write(out, content + b"\n")
    return report


def list_measurements(report: Mapping[str, Any], machine: Machine | None = None) -> Iterator[Measurement]:
    """List the figures of a report, of nested dictionaries too; lists of results have tables of their own.

    >>> [(each.name, each.unit, each.text) for each in list_measurements({"onnx": {"step_s": 0.25, "peak_bytes": 5e6}})]
    [('onnx.step_s', 's', '0.25'), ('onnx.peak_bytes', 'MB', '5')]
    """
    for name, value in report.items():
        if isinstance(value, Mapping):
            for inner in list_measurements(value, machine):
                unit = inner.unit or _find_unit(name)
                yield msgspec.structs.replace(inner, name=f"{name}.{inner.name}", unit=unit)
        elif not isinstance(value, Machine) and not _is_results(value):
            values = tuple(value) if isinstance(value, list | tuple) else (value,)
            yield Measurement(name=name, unit=_find_unit(name), values=values, machine=machine)


def make_tables(report: Report) -> Group:
    """Make a table of the report's own figures, and one of each list of results in it."""
    machine = report.get("machine")
    figures = Table(box=box.SIMPLE_HEAD, show_edge=False, show_header=False)
    for each in list_measurements(report, machine):
        figures.add_row(each.name, each.text, each.unit)
    caption = f"{machine.cpu}, {machine.cores} cores" if machine else ""
    return Group(*_list_tables(report, "", machine), figures, caption)


def _list_tables(report: Mapping[str, Any], path: str, machine: Machine | None) -> Iterator[Table]:
    for name, value in report.items():
        title = f"{path}{name}"
        if _is_results(value):
            labels = [_find_label(item, number) for number, item in enumerate(value, 1)]
            yield _make_table(title, labels, [list(list_measurements(item, machine)) for item in value])
            for label, item in zip(labels, value, strict=True):
                yield from _list_tables(item, f"{title} {label}: ", machine)
        elif isinstance(value, Mapping):
            yield from _list_tables(value, f"{title}.", machine)


def _make_table(title: str, labels: Sequence[str], columns: Sequence[Sequence[Measurement]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    by_name = [{each.name: each for each in column if each.name not in LABELS} for column in columns]
    names = dict.fromkeys(name for column in by_name for name in column)
    units = {name: next(column[name].unit for column in by_name if name in column) for name in names}
    cells = {name: [column[name].text if name in column else "" for column in by_name] for name in names}
    if len(labels) <= MOST_COLUMNS:
        for heading in ("", *labels, ""):
            table.add_column(heading)
        for name in names:
            table.add_row(name, *cells[name], units[name])
    else:
        for heading in ("", *(f"{name} {units[name]}".strip() for name in names)):
            table.add_column(heading)
        for number, label in enumerate(labels):
            table.add_row(label, *(cells[name][number] for name in names))
    return table


def _is_results(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _find_label(result: Mapping[str, Any], number: int) -> str:
    return str(next((result[key] for key in LABELS if key in result), number))


def _find_unit(name: str) -> str:
    parts = name.removesuffix("_runs").split("_")
    ends = ("_".join(parts[begin:end]) for end in range(len(parts), 0, -1) for begin in range(end))
    return next((UNITS[end] for end in ends if end in UNITS), "")


def _format(value: object, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value / MEGA if unit == 'MB' else value:.4g}"
