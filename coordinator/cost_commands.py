"""Commands on costs: `boards` (what is known of them), `profile` (before a run), `report` (after it)."""

from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.flags import existing_store, key_value
from fedvit.errors import OverBudget
from fedvit.files import atomic_write
from fedvit.resources import Budget


@click.command()
@click.argument("id", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def boards(id: str | None, as_json: bool) -> None:
    """List the boards that costs can be predicted for; or all about the one named ID, with sources."""
    from rich.console import Console

    from coordinator.boards import board_page, boards_table, entries, entry
    from profiles.catalogue import load

    if as_json:
        data = entry(load(id)) if id else entries()
        click.echo(msgspec.json.format(msgspec.json.encode(data)).decode())
        return
    console = Console()
    console.print(board_page(load(id)) if id else boards_table(console.width))


@click.command()
@click.option("--method", default="eftvit", help="Federated method.")
@click.option("--model", default="vit_small_images", help="Name of a timm Vision Transformer, or vit_small_images.")
@click.option("--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Option of the method. Repeatable.")
@click.option("--model-option", "model_pairs", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option(
    "--device",
    "devices",
    multiple=True,
    required=True,
    metavar="ID[@MODE]",
    help="A board, in a power mode: see `coordinator boards`. Repeatable.",
)
@click.option("--mask", "masks", multiple=True, type=float, help="Share of patches dropped in training. Repeatable.")
@click.option("--split", "splits", multiple=True, type=int, help="Blocks that a device trains. Repeatable.")
@click.option("--classes", default=10, type=click.IntRange(min=2), help="Classes that the model tells apart.")
@click.option("--images", default=500, type=click.IntRange(min=1), help="Training images of one device.")
@click.option("--test-images", default=100, type=click.IntRange(min=0), help="Test images of one device.")
@click.option("--memory-bytes", type=click.IntRange(min=1), help="Budget of every device, beside its board's memory.")
@click.option("--round-deadline-s", type=click.FloatRange(min=0, min_open=True), help="Budget of a round's training.")
@click.option("--flops-per-round", type=click.IntRange(min=1), help="Budget of a round's training.")
@click.option("--upload-bytes", type=click.IntRange(min=1), help="Budget of one round's result.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
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
    **budget: Any,
) -> None:
    """Predict what a method costs on boards: FLOPs, bytes, time, memory, energy; and who fits its budget.

    Every --mask is combined with every --split. Ends with exit code 8 when a device fits none of the variants.
    """
    from rich.console import Console

    from coordinator.profiling import Request, Target, make_document
    from profiles.report.document import encode
    from profiles.report.profile_page import profile_page
    from profiles.report.terminal import profile_report

    request = Request(
        method=method,
        options=dict(map(key_value, pairs)),
        model=model,
        model_options=dict(map(key_value, model_pairs)),
        classes=classes,
        targets=[Target.parse(text) for text in devices],
        masks=masks,
        splits=splits,
        images=images,
        test_images=test_images,
        budget=Budget(**budget),
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


@click.command()
@click.argument("run")
@click.option("--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(run: str, folder: Path, out: Path | None, as_json: bool) -> None:
    """Tell what a run cost and reached: accuracy, bytes, time, memory, energy; predicted beside measured."""
    from rich.console import Console

    from coordinator.reporting import run_document
    from profiles.report.document import encode
    from profiles.report.terminal import run_report

    store = existing_store(folder, "--runs")
    try:
        document = run_document(store, run)
    finally:
        store.close()
    if as_json:
        click.echo(encode(document), nl=False)
    else:
        console = Console()
        console.print(run_report(document, console.width))
    if out:
        from profiles.report.run_page import run_page  # matplotlib, a second that the tables need not wait

        atomic_write(out, run_page(document).encode())
        click.echo(f"written: {out}", err=True)
