"""Tables of views: columns are declared once, and drawn in a terminal, in a page or as CSV.

The unit in a column's name decides how its values are written, so a new field needs only its name and a heading.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from profiles.report.page import duration, percent, quantity, share, size
from profiles.report.terminal import column as add_column
from profiles.report.terminal import natural_width, shortened
from profiles.report.terminal import table as new_table

NOTHING = "–"
"""Text for a figure that was not measured."""
LEAST_NAME = 12
"""Fewest letters of a device's name that a terminal shows, from both ends."""
_UNITS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    (r"error$", percent),
    (r"_s$", duration),
    (r"bytes", size),
    (r"accuracy|loss", share),
    (r"flops", lambda value: quantity(value, "FLOP")),
    (r"_j$", lambda value: quantity(value, "J")),
    (r"_c$", lambda value: f"{value:.1f} °C"),
    (r"epsilon$", lambda value: f"{value:.3g}"),
    (r"_at$|^at$", lambda value: clock(value)),
)
"""By what a name contains: how a value of it is written."""


class Column(NamedTuple):
    """A column of a table."""

    name: str  # with its unit
    heading: str
    value: Callable[[Any], Any] | None = None  # of a row; by default the row's attribute of the column's name

    def read(self, row: Any) -> Any:
        """Return the value of a row."""
        return self.value(row) if self.value else getattr(row, self.name)


def columns(headings: dict[str, str]) -> list[Column]:
    """Make columns from attributes of a row and their headings."""
    return [Column(name, heading) for name, heading in headings.items()]


def clock(at: str | None) -> str:
    """Write a time of the record to the second, UTC.

    >>> clock("2026-11-21T03:45:00.123+00:00"), clock(None)
    ('2026-11-21 03:45:00', '–')
    """
    return NOTHING if at is None else at.replace("T", " ")[:19]


def text_of(name: str, value: Any) -> str:
    """Write a value in the unit of its name.

    >>> text_of("step_s", 0.02), text_of("bytes_up", 10**6), text_of("accuracy", None), text_of("rounds", 3)
    ('20.0 ms', '1.00 MB', '–', '3')
    """
    if value is None:
        return NOTHING
    if isinstance(value, str) and not name.endswith("at"):
        return value  # a link stays one
    if isinstance(value, bool):
        return "yes" if value else "no"
    write = next((write for unit, write in _UNITS if re.search(unit, name)), str)
    return write(value)


class Sheet:
    """Values of rows, ready to be drawn."""

    def __init__(self, rows: Iterable[Any], columns: Sequence[Column], *, omit_empty: bool = False) -> None:
        values = [[column.read(row) for column in columns] for row in rows]
        shown = [
            place for place in range(len(columns)) if not omit_empty or any(row[place] is not None for row in values)
        ]
        self.columns = [columns[place] for place in shown]
        self.values = [[row[place] for place in shown] for row in values]

    @property
    def texts(self) -> list[list[str]]:
        """Rows of cells as text."""
        return [
            [text_of(column.name, value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.values
        ]

    def is_text(self, place: int) -> bool:
        """Return whether a column holds words or times, which are aligned to the left, and no numbers with units."""
        name = self.columns[place].name
        if name == "device" or name.endswith("at"):
            return True
        return any(isinstance(row[place], str) and re.match(r"[^-+−–\d]", row[place]) for row in self.values)

    def is_long(self, place: int) -> bool:
        """Return whether a column holds sentences, which are wrapped."""
        return self.columns[place].name in ("reason", "what", "quarantine")

    def csv(self) -> str:
        """A line of names, and one for each row; what was not measured is empty."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows(self.values)
        return file.getvalue()

    def draw(self, title: str | None, width: int, optional: Sequence[str] = ()) -> Table:
        """Draw the table for a terminal: columns of `optional` are left out, the first one first, until it fits.

        Numbers are never cut or wrapped; names of devices are shortened in their middle."""
        for count in range(len(optional) + 1):
            places = [place for place, column in enumerate(self.columns) if column.name not in optional[:count]]
            free = width - natural_width(self._draw(title, places, name_width=0))
            longest = max((len(text) for text in self._names()), default=0)
            if free >= min(longest, LEAST_NAME) or count == len(optional):
                break
        if any(self.is_long(place) for place in places):  # leave room for its sentences
            free = min(free, width // 4)
        return self._draw(title, places, name_width=max(LEAST_NAME, free))

    def _names(self) -> list[str]:
        place = next((place for place, column in enumerate(self.columns) if column.name == "device"), None)
        return [] if place is None else [row[place] for row in self.values]

    def _draw(self, title: str | None, places: Sequence[int], name_width: int) -> Table:
        table = new_table(title)
        for place in places:
            heading = self.columns[place].heading
            if self.is_long(place):
                table.add_column(heading, overflow="fold")
            else:
                is_name = self.columns[place].name == "device"
                add_column(
                    table, "" if is_name and not name_width else heading, "left" if self.is_text(place) else "right"
                )
        for row in self.texts:
            table.add_row(*(Text(self._cell(place, row[place], name_width)) for place in places))
        return table

    def _cell(self, place: int, text: str, name_width: int) -> str:
        if self.columns[place].name == "device":
            return shortened(text, name_width)
        return "" if self.is_long(place) and not name_width else text
