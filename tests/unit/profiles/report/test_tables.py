"""Tables: one declaration of columns for a terminal, Markdown, pages and CSV."""

import io
from typing import NamedTuple

import pytest
from rich.console import Console

from profiles.report.tables import Column, Sheet, columns, natural_width, shorten


class Row(NamedTuple):
    device: str
    step_s: float | None
    bytes_up: int


ROWS = [Row("pi [5]", 0.02, 10**6), Row("jetson", None, 0)]
COLUMNS = [
    *columns({"device": "device", "step_s": "one\nstep"}),
    Column("bytes_up", "up", style=lambda row: "bold" if row.bytes_up else ""),
]


def test_sheet_as_texts_markdown_and_csv() -> None:
    assert Sheet(ROWS, COLUMNS, unknown="not known").texts == [
        ["pi [5]", "20.0 ms", "1.00 MB"], ["jetson", "not known", "0 B"],
    ]  # fmt: skip
    assert Sheet(ROWS, COLUMNS).markdown().splitlines() == [
        "| device | one step | up |", "| --- | --- | --- |", "| pi [5] | 20.0 ms | **1.00 MB** |",
        "| jetson | – | 0 B |",
    ]  # fmt: skip
    assert Sheet(ROWS, COLUMNS).csv() == "device,step_s,bytes_up\npi [5],0.02,1000000\njetson,,0\n"


@pytest.mark.parametrize(("width", "has_step"), [(40, True), (18, False)])
def test_optional_columns_are_left_out_of_a_narrow_terminal(width: int, has_step: bool) -> None:
    table = Sheet(ROWS, COLUMNS).draw(None, width, optional=("step_s",))
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    assert natural_width(table) <= width
    assert ("20.0 ms" in file.getvalue()) == has_step
    assert "pi [5]" in file.getvalue()


@pytest.mark.parametrize("width", [0, 1, 2, 3, 12, 35, 36, 70])
def test_names_lose_their_middle(width: int) -> None:
    name = "abcdefghijklmnopqrstuvwxyz0123456789"
    short = shorten(name, width)
    assert len(short) == min(width, len(name))
    begin, _, end = short.partition("…")
    assert name.startswith(begin)
    assert name.endswith(end)
    assert width <= 2 or 0 <= len(begin) - len(end) <= 1 or short == name


def test_latex_reads_no_name_as_a_command() -> None:
    row = Row("pi_5 & \\input{x} 50%", -0.5, 1)
    lines = Sheet([row], COLUMNS).latex("a_b", "tab:x").splitlines()
    assert lines[2] == r"\caption{a\_b}"
    assert r"\begin{tabular}{lrr}" in lines
    assert lines[lines.index(r"\midrule") + 1].startswith(r"pi\_5 \& \textbackslash{}input\{x\} 50\% & $-$")
    assert r"\textbf{1 B} \\" in lines[lines.index(r"\midrule") + 1]
