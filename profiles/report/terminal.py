"""Reports for a terminal of `width` columns.

Units stand in the headings or beside the numbers; numbers are never cut or wrapped, and what does not fit is left out
as a whole column; the JSON has everything.
"""

from collections.abc import Callable
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from profiles.report.console import Console
from profiles.report.document import ProfileDocument
from profiles.report.page import count, duration, quantity, size
from profiles.report.verdict import BUDGETS, crosscheck_words, device_name, profile_verdict

STYLES = {"good": "bold green", "mild": "bold yellow", "bad": "bold red"}


def profile_report(document: ProfileDocument, width: int) -> Group:
    """The verdict, the cost of the variants, and their cost per device."""
    tone, sentence, lines = profile_verdict(document)
    parts: list[RenderableType] = [Text(document.title), Text(sentence, style=STYLES[tone])]
    parts += [Text(f"  {line}") for line in lines]
    parts += [Text(), _variants(document, width), Text(), _devices(document, width)]
    checked = [crosscheck_words(document.crosscheck)] if document.crosscheck else []
    warnings = [
        *document.warnings,
        *checked,
        *(f"{entry.id}: {line}" for entry in document.devices for line in entry.warnings),
    ]
    if warnings:
        parts += [Text(), *(Text(f"note: {line}", style="dim") for line in warnings)]
    return Group(*parts)


def _variants(document: ProfileDocument, width: int) -> Table:
    def drawn(*, bytes_: bool) -> Table:
        drawn = table("variants")
        column(drawn, "variant", justify="left")
        for heading in ("patches\nkept", "numbers\ntrained", "of an image\nforward", "of an image\nbackward"):
            column(drawn, heading)
        for heading in ("down\na round", "up\na round") if bytes_ else ():
            column(drawn, heading)
        for variant in document.variants:
            cost = variant.cost
            cells = [
                str(cost.kept_patches),
                count(cost.parameters_trained),
                count(cost.flops_forward / cost.batch_size, "FLOP"),
                count(cost.flops_backward / cost.batch_size, "FLOP"),
            ]
            drawn.add_row(
                Text(variant.label), *cells, *((size(cost.bytes_down), size(cost.bytes_up)) if bytes_ else ())
            )
        return drawn

    return first_that_fits(width, lambda: drawn(bytes_=True), lambda: drawn(bytes_=False))


def _devices(document: ProfileDocument, width: int) -> Table:
    def drawn(*, all_columns: bool) -> Table:
        drawn = table("devices")
        for heading in ("device", "variant"):
            column(drawn, heading, justify="left")
        for heading in ("step", "round", *(("energy\na round",) if all_columns else ()), "memory"):
            column(drawn, heading)
        column(drawn, "budget", justify="left")
        for device in document.devices:
            for variant, prediction in zip(document.variants, device.predictions, strict=True):
                over = ", ".join(BUDGETS[kind] for kind in prediction.over)
                energy = "not known" if prediction.energy_j is None else quantity(prediction.energy_j, "J")
                drawn.add_row(
                    Text(device_name(device)),
                    Text(variant.label),
                    duration(prediction.step_s),
                    duration(prediction.train_s),
                    *((energy,) if all_columns else ()),
                    size(prediction.peak_rss_bytes),
                    Text(f"over: {over}", style="red") if over else Text("fits", style="green"),
                )
        return drawn

    return first_that_fits(width, lambda: drawn(all_columns=True), lambda: drawn(all_columns=False))


# --- tables ---------------------------------------------------------------------------------------------


def table(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0)


def column(table: Table, heading: str, justify: Literal["left", "right"] = "right", style: str = "") -> None:
    # Text: brackets in a name are no markup
    table.add_column(Text(heading), justify=justify, style=style, no_wrap=True)


def first_that_fits(width: int, *candidates: Callable[[], Table]) -> Table:
    """The first table that needs no more than `width` columns, else the last."""
    for candidate in candidates[:-1]:
        table = candidate()
        if natural_width(table) <= width:
            return table
    return candidates[-1]()


def natural_width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def shortened(name: str, width: int) -> str:
    """A name in at most `width` letters: its middle is left out, for names of a fleet differ at their ends.

    >>> shortened("device-with-a-long-name-17", 12), shortened("device-3", 12)
    ('device…me-17', 'device-3')
    """
    if len(name) <= width:
        return name
    tail = max(0, width - 1) // 2
    return f"{name[: max(0, width - 1 - tail)]}…{name[len(name) - tail :]}" if width else ""
