"""Shows the catalogue of boards: a list, and all figures of one board with their sources."""

import re
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from profiles.catalogue import Board, Figure, boards, sources
from profiles.report.page import quantity, scaled, size
from profiles.report.terminal import column, first_that_fits, table

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


def boards_table(width: int) -> Table:
    """One line per board, in its default power mode, and one per other power mode."""

    def draw(*, every: bool) -> Table:
        made = table(None)
        column(made, "board", justify="left")
        if every:
            column(made, "name", justify="left")
        for heading in ("memory\nGiB", "cores", "peak\nGFLOP/s", "training\nViT-B", "memory\nGB/s", "load\nW"):
            column(made, heading)
        column(made, "installs", justify="left")
        for board, mode in ((each, mode) for each in boards() for mode in each.modes or [None]):
            load_w = board.load_w(mode)
            made.add_row(
                Text(f"{board.id}@{mode}" if mode else board.id),
                *((Text(board.name),) if every else ()),
                f"{board.memory.ram_bytes.value / 2**30:g}",
                str(sum(count for _, count, _ in board.training_cores(mode))),
                f"{board.peak_flops_per_s(mode) / 1e9:.0f}",
                f"{board.training_flops_per_s(768, mode) / 1e9:.0f}",
                f"{board.stream_bytes_per_s.value / 1e9:.1f}",
                "-" if load_w is None else f"{load_w:.0f}",
                "yes" if board.software.installs else "only in a container",
            )
        return made

    return first_that_fits(width, lambda: draw(every=True), lambda: draw(every=False))


def board_page(board: Board) -> Group:
    """Every figure of one board, with its mark and source."""
    figures = table("figures")
    for heading in ("figure", "value", "mark"):
        column(figures, heading, justify="right" if heading == "value" else "left")
    figures.add_column("source", overflow="fold")
    for place, figure in {**board.figures(), "usable memory": board.usable_bytes}.items():
        mark = Text(figure.mark, MARK_STYLES[figure.mark])
        source = Text(sources().get(figure.source, figure.source))
        figures.add_row(Text(place), _value(place, figure), mark, source)
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
    return Group(*parts, Text(), figures)


def _modes(board: Board) -> Table:
    modes = table("power modes")
    column(modes, "mode", justify="left")
    for heading in ("cores", "clock\nGHz", "peak\nGFLOP/s", "training\nViT-B", "limit\nW"):
        column(modes, heading)
    column(modes, "mark", justify="left")
    modes.add_column("source", overflow="fold")
    for name, mode in board.modes.items():
        cores = board.training_cores(name)
        modes.add_row(
            Text(f"{board.id}@{name}", style="bold" if name == board.default_mode else ""),
            " + ".join(str(count) for _, count, _ in cores),
            " + ".join(f"{clock_hz / 1e9:.2f}" for _, _, clock_hz in cores),
            f"{board.peak_flops_per_s(name) / 1e9:.0f}",
            f"{board.training_flops_per_s(768, name) / 1e9:.0f}",
            "-" if mode.load_w is None else f"{mode.load_w:g}",
            Text(mode.mark, MARK_STYLES[mode.mark]),
            sources().get(mode.source, mode.source),
        )
    return modes


def _value(place: str, figure: Figure) -> str:
    """In the unit that the place's name ends in."""
    for ending, unit in (("bytes_per_s", "B/s"), ("flops_per_s", "FLOP/s"), ("ops_per_s", "OP/s"), ("_hz", "Hz")):
        if place.endswith(ending):
            return scaled(figure.value, unit)
    if place.endswith("_w"):
        return quantity(figure.value, "W")
    return size(figure.value) if place.endswith("bytes") or place == "usable memory" else f"{figure.value:g}"


def _keys(board: Board) -> set[str]:
    """The sources of the board's figures; formulas name them among other words."""
    texts = [figure.source for figure in board.figures().values()]
    texts += [mode.source for mode in board.modes.values()] + [board.software.source]
    return {key for key in sources() for text in texts if key in re.split(r"[ (),:;]+", text)}
