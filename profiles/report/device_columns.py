"""The figures of a run's devices, as columns of a table and of a CSV file."""

import csv
import io
from collections.abc import Callable
from typing import Any, NamedTuple

from profiles.report.document import Comparison, RunDevice, RunDocument
from profiles.report.page import Grid, Value, duration, quantity, share, size

NOTHING = "–"
"""Stands in a table for a figure that was not measured."""


class Row(NamedTuple):
    """A device, and its medians over rounds by figure."""

    device: RunDevice
    medians: dict[str, Comparison]

    def predicted(self, figure: str) -> float | None:
        return self.medians[figure].predicted if figure in self.medians else None

    def measured(self, figure: str) -> float | None:
        return self.medians[figure].measured if figure in self.medians else None


class Column(NamedTuple):
    name: str  # in a CSV file, with its unit
    heading: str
    value: Callable[[Row], Value]
    text: Callable[[Any], str] = str


def _memory_budget(row: Row) -> int | None:
    return row.device.budget.memory_bytes if row.device.budget else None


COLUMNS = (
    Column("device", "device", lambda row: row.device.device),
    Column("train_images", "training images", lambda row: row.device.train_samples),
    Column("test_images", "test images", lambda row: row.device.test_samples),
    Column("rounds", "rounds", lambda row: row.device.rounds_that_were("accepted")),
    Column(
        "missing",
        "missing",
        lambda row: row.device.rounds_that_were("refused") + row.device.rounds_that_were("dropped out"),
    ),
    Column("accuracy", "accuracy", lambda row: row.device.accuracy, share),
    Column("bytes_down", "down", lambda row: row.device.bytes_down, size),
    Column("bytes_up", "up", lambda row: row.device.bytes_up, size),
    Column("step_s", "step", lambda row: row.measured("step"), duration),
    Column("train_predicted_s", "training predicted", lambda row: row.predicted("training of a round"), duration),
    Column("train_s", "training", lambda row: row.measured("training of a round"), duration),
    Column("memory_predicted_bytes", "memory predicted", lambda row: row.predicted("peak memory"), size),
    Column("memory_bytes", "peak memory", lambda row: row.device.peak_rss_bytes, size),
    Column("memory_budget_bytes", "memory budget", _memory_budget, size),
    Column("energy_j", "energy", lambda row: row.measured("energy of a round"), lambda value: quantity(value, "J")),
    Column("budgets_broken", "budgets broken", lambda row: sum(row.device.broken.values()) or None),
    Column("changes", "given, to fit its budget", lambda row: row.device.given or None),
)
"""In a table, a column without any figure is left out."""


def device_table(document: RunDocument) -> Grid:
    """One row for each device."""
    rows = _rows(document)
    columns = [column for column in COLUMNS if any(column.value(row) is not None for row in rows)]
    values = [[column.value(row) for column in columns] for row in rows]
    texts = [
        [NOTHING if value is None else column.text(value) for column, value in zip(columns, line, strict=True)]
        for line in values
    ]
    return Grid([column.heading for column in columns], texts, values=values)


def device_csv(document: RunDocument) -> str:
    """A line of headings, and one for each device; what was not measured is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.name for column in COLUMNS])
    writer.writerows([column.value(row) for column in COLUMNS] for row in _rows(document))
    return file.getvalue()


def _rows(document: RunDocument) -> list[Row]:
    return [Row(device, {entry.figure: entry for entry in device.comparisons()}) for device in document.devices]
