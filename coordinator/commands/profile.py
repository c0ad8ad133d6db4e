"""`coordinator profile`: predicts the cost of a method on boards."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from coordinator.commands.prediction_flags import request_flags, request_of
from fedvit.command_line import Command, json_flag
from fedvit.errors import OverBudget
from fedvit.files import atomic_write
from profiles.report.console import Console
from profiles.report.document import encode
from profiles.report.profile_page import profile_page
from profiles.report.terminal import profile_report


@click.command(
    cls=Command,
    examples=["coordinator profile --device rpi5-8 --device rpi4b-4 --mask 0 --mask 0.75 --out profile.html"],
)
@request_flags
@click.option("--mask", "masks", multiple=True, type=float, help="Share of patches dropped in training. Repeatable.")
@click.option("--split", "splits", multiple=True, type=int, help="Blocks that a device trains. Repeatable.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@json_flag
def profile(masks: tuple[float, ...], splits: tuple[int, ...], out: Path | None, as_json: bool, **request: Any) -> None:
    """Predict what a method costs on boards: FLOPs, bytes, time, memory, energy; and which budgets are kept.

    Every --mask is combined with every --split. Ends with exit code 8 if no variant fits the budget of a device.
    """
    wanted = request_of(request, masks=masks, splits=splits)
    profiling = import_module("coordinator.compute.planning.profiling")  # late: it imports torch
    document = profiling.make_document(wanted, progress=lambda line: click.echo(line, err=True))
    console = Console()
    if as_json:
        click.echo(encode(document).decode(), nl=False)
    else:
        console.print(profile_report(document, console.width))
    if out:
        atomic_write(out, profile_page(document).encode())
        click.echo(f"written: {out}", err=True)
    if none := [device.id for device in document.devices if all(entry.over for entry in device.predictions)]:
        raise OverBudget("FV1508", f"no variant fits the budget of {', '.join(none)}")
