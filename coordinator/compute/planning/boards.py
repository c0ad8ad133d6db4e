"""Shows the catalogue of boards: a list, and all figures of one board with their sources."""

import re
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from profiles.catalogue import Board, Figure, PowerMode, boards, sources
from profiles.report.page import abbreviate, quantity, size
from profiles.report.tables import Column, Sheet

MARK_STYLES = {"measured": "green", "published": "", "derived": "cyan", "unverified": "yellow"}


def entries() -> list[dict[str, Any]]:
    """The list as data; rates are those of each board's default power mode."""
    return [
        {
            "id": board.id,
            "name": board.name,
            "mode": board.default_mode,
            "modes": list(board.modes),
            "ram_bytes": board.memory.ram_bytes.whole,
            "usable_bytes": board.usable_bytes.whole,
            "peak_flops_per_s": board.peak_flops_per_s(),
            "speed": msgspec.to_builtins(board.speed()),
            "power_w": board.power_w(),
            "installs": board.software.installs,
        }
        for board in boards()
    ]


def entry(board: Board) -> dict[str, Any]:
    """All about one board as data, sources in full."""
    return {
        **msgspec.to_builtins(board),
        "usable_bytes": msgspec.to_builtins(board.usable_bytes),
        "speeds": {mode or "": msgspec.to_builtins(board.speed(mode)) for mode in board.modes or [None]},
        "doubts": board.doubts(),
        "sources": {key: text for key, text in sources().items() if key in _keys(board)},
    }


class _BoardMode(NamedTuple):
    """A board in a power mode; None: it has none."""

    board: Board
    mode: str | None


_BOARD_COLUMNS = (
    Column("board", "board", lambda row: f"{row.board.id}@{row.mode}" if row.mode else row.board.id),
    Column("name", "name", lambda row: row.board.name),
    Column("memory", "memory\nGiB", lambda row: f"{row.board.memory.ram_bytes.value / 2**30:g}"),
    Column("cores", "cores", lambda row: sum(count for _, count, _ in row.board.training_cores(row.mode))),
    Column("peak", "peak\nGFLOP/s", lambda row: f"{row.board.peak_flops_per_s(row.mode) / 1e9:.0f}"),
    Column("training", "training\nViT-B", lambda row: f"{row.board.training_flops_per_s(768, row.mode) / 1e9:.0f}"),
    Column("stream", "memory\nGB/s", lambda row: f"{row.board.stream_bytes_per_s.value / 1e9:.1f}"),
    Column("load", "load\nW", lambda row: None if (w := row.board.load_w(row.mode)) is None else f"{w:.0f}"),
    Column("installs", "installs", lambda row: "yes" if row.board.software.installs else "only in a container"),
)
_FIGURE_COLUMNS = (
    Column("figure", "figure", itemgetter(0)),
    Column("value", "value", lambda row: _value(*row)),
    Column("mark", "mark", lambda row: row[1].mark, lambda row: MARK_STYLES[row[1].mark]),
    Column("source", "source", lambda row: sources().get(row[1].source, row[1].source), is_long=True),
)


def boards_table(width: int) -> Table:
    """Draw one line per board, in its default power mode, and one per other power mode."""
    rows = [_BoardMode(board, mode) for board in boards() for mode in board.modes or [None]]
    return Sheet(rows, _BOARD_COLUMNS, unknown="-").draw(None, width, optional=("name",))


def board_page(board: Board) -> Group:
    """Every figure of one board, with its mark and source."""
    figures = Sheet({**board.figures(), "usable memory": board.usable_bytes}.items(), _FIGURE_COLUMNS)
    parts: list[RenderableType] = [
        Text(f"{board.id}: {board.name}", style="bold"),
        Text(f"storage: {', '.join(board.connections.storage)}; network: {', '.join(board.connections.network)}"),
        Text(f"{board.software.system}; glibc {board.software.glibc}, Python {board.software.python}"),
    ]
    parts += [Text(f"  {note}", style="dim") for note in (*board.software.notes, *board.power.notes)]
    beside = [unit.name for unit in (board.gpu, board.accelerator) if unit]
    parts += [Text(f"beside the processor: {name}") for name in beside]
    if board.modes:
        parts += [Text(), _modes(board)]
    return Group(*parts, Text(), figures.draw("figures"))


def _modes(board: Board) -> Table:
    def read_style(row: tuple[str, PowerMode]) -> str:
        return "bold" if row[0] == board.default_mode else ""

    def clocks_ghz(row: tuple[str, PowerMode]) -> str:
        return " + ".join(f"{clock_hz / 1e9:.2f}" for _, _, clock_hz in board.training_cores(row[0]))

    columns = (
        Column("mode", "mode", lambda row: f"{board.id}@{row[0]}", read_style),
        Column("cores", "cores", lambda row: " + ".join(str(count) for _, count, _ in board.training_cores(row[0]))),
        Column("clock", "clock\nGHz", clocks_ghz),
        Column("peak", "peak\nGFLOP/s", lambda row: f"{board.peak_flops_per_s(row[0]) / 1e9:.0f}"),
        Column("training", "training\nViT-B", lambda row: f"{board.training_flops_per_s(768, row[0]) / 1e9:.0f}"),
        Column("limit", "limit\nW", lambda row: None if row[1].load_w is None else f"{row[1].load_w:g}"),
        *_FIGURE_COLUMNS[2:],
    )
    return Sheet(board.modes.items(), columns, unknown="-").draw("power modes")


def _value(place: str, figure: Figure) -> str:
    """In the unit that the place's name ends in."""
    for ending, unit in (("bytes_per_s", "B/s"), ("flops_per_s", "FLOP/s"), ("ops_per_s", "OP/s"), ("_hz", "Hz")):
        if place.endswith(ending):
            return abbreviate(figure.value, unit)
    if place.endswith("_w"):
        return quantity(figure.value, "W")
    return size(figure.value) if place.endswith("bytes") or place == "usable memory" else f"{figure.value:g}"


def _keys(board: Board) -> set[str]:
    """The sources of the board's figures; formulas name them among other words."""
    texts = [figure.source for figure in board.figures().values()]
    texts += [mode.source for mode in board.modes.values()] + [board.software.source]
    return {key for key in sources() for text in texts if key in re.split(r"[ (),:;]+", text)}
