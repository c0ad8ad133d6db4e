"""Tables of all reports: columns are declared once, and drawn in a terminal, in a page, in Markdown, LaTeX or as CSV.

The unit in a column's name decides how its values are written, so a new field needs only its name and a heading.
A line break in a heading or a text is one in a terminal, and a space elsewhere.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from profiles.report.console import Console
from profiles.report.page import duration, percent, quantity, share, size

NOTHING = "–"
"""Text for a figure that was not measured."""
LEAST_NAME = 12
"""Fewest letters of a device's name that a terminal shows, from both ends."""
_UNITS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    (r"error$", percent),
    (r"_s$", duration),
    (r"bytes", size),
    (r"accuracy|loss|confidence", share),
    (r"flops", lambda value: quantity(value, "FLOP")),
    (r"_j$", lambda value: quantity(value, "J")),
    (r"^(parameters|steps)", lambda value: f"{value:,}"),
    (r"_w$", lambda value: quantity(value, "W")),
    (r"_c$", lambda value: f"{value:.1f} °C"),
    (r"epsilon$", lambda value: f"{value:.3g}"),
    (r"_at$|^at$|_since$", lambda value: clock(value)),
)
"""By what a name contains: how a value of it is written."""
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "|": r"\textbar{}", "±": r"$\pm$",
    "–": "--", "\n": " ",
}  # fmt: skip
"""Letters that LaTeX would read as commands, or does not have."""


class Column(NamedTuple):
    """A column of a table."""

    name: str  # with its unit
    heading: str
    value: Callable[[Any], Any] | None = None  # of a row; by default the row's attribute of the column's name
    style: Callable[[Any], str] | None = None  # of a row's cell: "bold" everywhere, a colour in a terminal
    is_long: bool = False  # it holds sentences or long names, which are wrapped

    def read(self, row: Any) -> Any:
        """Return the value of a row."""
        return self.value(row) if self.value else getattr(row, self.name)


def columns(headings: dict[str, str], part: str = "") -> list[Column]:
    """Make columns from attributes of a row, or of one of its parts, and their headings."""
    return [Column(name, heading, attrgetter(f"{part}.{name}") if part else None) for name, heading in headings.items()]


def clock(at: str | None) -> str:
    """Write a time of the record to the second, UTC.

    >>> clock("2026-11-21T03:45:00.123+00:00"), clock(None)
    ('2026-11-21 03:45:00', '–')
    """
    return NOTHING if at is None else at.replace("T", " ")[:19]


def format_value(name: str, value: Any) -> str:
    """Write a value in the unit of its name.

    >>> format_value("step_s", 0.02), format_value("bytes_up", 10**6), format_value("accuracy", None)
    ('20.0 ms', '1.00 MB', '–')
    """
    if value is None:
        return NOTHING
    if isinstance(value, str) and not name.endswith(("at", "_since")):
        return value  # a link stays one
    if isinstance(value, bool):
        return "yes" if value else "no"
    write = next((write for unit, write in _UNITS if re.search(unit, name)), str)
    return write(value)


class Sheet:
    """Values of rows, ready to be drawn."""

    def __init__(
        self, rows: Iterable[Any], columns: Sequence[Column], *, omit_empty: bool = False, unknown: str = NOTHING
    ) -> None:
        rows = list(rows)
        values = [[column.read(row) for column in columns] for row in rows]
        shown = [
            place for place in range(len(columns)) if not omit_empty or any(row[place] is not None for row in values)
        ]
        self.columns = [columns[place] for place in shown]
        self.values = [[row[place] for place in shown] for row in values]
        self.styles = [[column.style(row) if column.style else "" for column in self.columns] for row in rows]
        self._unknown = unknown

    @property
    def texts(self) -> list[list[str]]:
        """Rows of cells as text."""
        return [
            [
                self._unknown if value is None else format_value(column.name, value)
                for column, value in zip(self.columns, row, strict=True)
            ]
            for row in self.values
        ]

    def is_text(self, place: int) -> bool:
        """Return whether a column holds words or times, which are aligned to the left, and no numbers with units."""
        name = self.columns[place].name
        if name == "device" or name.endswith("at"):
            return True
        return any(isinstance(row[place], str) and re.match(r"[^-+−–\d]", row[place]) for row in self.values)

    def is_long(self, place: int) -> bool:
        """Return whether a column holds sentences or long names, which are wrapped."""
        return self.columns[place].is_long or self.columns[place].name in ("reason", "what", "quarantine")

    def csv(self) -> str:
        """The table as CSV: a line of names, and one for each row; what was not measured is empty."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column.name for column in self.columns])
        writer.writerows(self.values)
        return file.getvalue()

    def markdown(self) -> str:
        """The table in Markdown."""
        rows = [
            [f"**{text}**" if style == "bold" else text for text, style in zip(*row, strict=True)]
            for row in zip(self.texts, self.styles, strict=True)
        ]
        lines = [[column.heading for column in self.columns], ["---"] * len(self.columns), *rows]
        return "\n".join(f"| {' | '.join(cells)} |".replace("\n", " ") for cells in lines)

    def latex(self, caption: str, label: str) -> str:
        """The table for a paper; the document needs the package booktabs."""
        rows = [
            [
                rf"\textbf{{{escape_latex(text)}}}" if style == "bold" else escape_latex(text)
                for text, style in zip(*row, strict=True)
            ]
            for row in zip(self.texts, self.styles, strict=True)
        ]
        places = range(len(self.columns))
        alignment = "".join("l" if self.is_long(place) or self.is_text(place) else "r" for place in places)
        headings = [escape_latex(column.heading) for column in self.columns]
        lines = [rf"{' & '.join(cells)} \\" for cells in (headings, *rows)]
        return "\n".join(
            [
                r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(caption)}}}", rf"\label{{{label}}}",
                rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule",
                r"\end{tabular}", r"\end{table}", "",
            ]
        )  # fmt: skip

    def draw(self, title: str | None, width: int = 80, optional: Sequence[str] = ()) -> Table:
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
        table = Table(
            title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0
        )
        for place in places:
            is_hidden = self.columns[place].name == "device" and not name_width
            table.add_column(
                Text("" if is_hidden else self.columns[place].heading),  # brackets in a name are no markup
                justify="left" if self.is_long(place) or self.is_text(place) else "right",
                no_wrap=not self.is_long(place),
                overflow="fold" if self.is_long(place) else "ellipsis",
            )
        for texts, styles in zip(self.texts, self.styles, strict=True):
            table.add_row(*(Text(self._cell(place, texts[place], name_width), styles[place]) for place in places))
        return table

    def _cell(self, place: int, text: str, name_width: int) -> str:
        if self.columns[place].name == "device":
            return shorten(text, name_width)
        return "" if self.is_long(place) and not name_width else text


def escape_latex(text: str) -> str:
    """Write a text so that LaTeX prints it, and reads none of it as a command.

    >>> print(escape_latex("50% of a_b"), escape_latex("[-0.1, 0.2]"))
    50\\% of a\\_b {[}$-$0.1, 0.2]
    """
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    escaped = re.sub(r"(?<![\w.)])-(?=\d)", "$-$", escaped)  # a minus sign, no hyphen
    return f"{{[}}{escaped[1:]}" if escaped.startswith("[") else escaped  # after a line's end it would be an option


def natural_width(table: Table) -> int:
    """Width of a table that nothing bounds."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def shorten(name: str, width: int) -> str:
    """Cut a name to at most `width` letters: its middle is left out, for names of a fleet differ at their ends.

    >>> shorten("device-with-a-long-name-17", 12), shorten("device-3", 12)
    ('device…me-17', 'device-3')
    """
    if len(name) <= width:
        return name
    tail = max(0, width - 1) // 2
    return f"{name[: max(0, width - 1 - tail)]}…{name[len(name) - tail :]}" if width else ""
