"""`coordinator profile`: predicts the cost of a method on boards."""

from pathlib import Path
from typing import Any

import click

from coordinator.commands.flags import key_value
from coordinator.commands.prediction_flags import budget_of, check_request, request_flags
from fedvit.command_line import Command, json_flag
from fedvit.errors import OverBudget
from fedvit.files import atomic_write


@click.command(
    cls=Command,
    examples=["coordinator profile --device rpi5-8 --device rpi4b-4 --mask 0 --mask 0.75 --out profile.html"],
)
@request_flags
@click.option("--mask", "masks", multiple=True, type=float, help="Share of patches dropped in training. Repeatable.")
@click.option("--split", "splits", multiple=True, type=int, help="Blocks that a device trains. Repeatable.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@json_flag
def profile(
    method: str,
    model: str,
    pairs: tuple[str, ...],
    model_pairs: tuple[str, ...],
    devices: tuple[str, ...],
    masks: tuple[float, ...],
    splits: tuple[int, ...],
    classes: int,
    images: int,
    test_images: int,
    out: Path | None,
    as_json: bool,
    **budgets: Any,
) -> None:
    """Predict what a method costs on boards: FLOPs, bytes, time, memory, energy; and which budgets are kept.

    Every --mask is combined with every --split. Ends with exit code 8 if no variant fits the budget of a device.
    """
    options, model_options = dict(map(key_value, pairs)), dict(map(key_value, model_pairs))
    check_request(method, model, options, model_options, devices)
    from rich.console import Console

    from coordinator.planning.profiling import BoardMode, Request, make_document
    from profiles.report.document import encode
    from profiles.report.profile_page import profile_page
    from profiles.report.terminal import profile_report

    request = Request(
        method=method,
        options=options,
        model=model,
        model_options=model_options,
        classes=classes,
        targets=[BoardMode.parse(text) for text in devices],
        masks=masks,
        splits=splits,
        images=images,
        test_images=test_images,
        budget=budget_of(budgets),
    )
    document = make_document(request, progress=lambda line: click.echo(line, err=True))
    console = Console()
    if as_json:
        click.echo(encode(document), nl=False)
    else:
        console.print(profile_report(document, console.width))
    if out:
        atomic_write(out, profile_page(document).encode())
        click.echo(f"written: {out}", err=True)
    if none := [device.id for device in document.devices if all(entry.over for entry in device.predictions)]:
        raise OverBudget(f"no variant fits the budget of {', '.join(none)}")
