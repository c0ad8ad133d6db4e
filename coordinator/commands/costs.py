"""Commands on costs: `boards` (what is known of them), `profile` and `plan` (before a run), `report` (after it)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.commands.flags import existing_store, key_value
from fedvit.command_line import amount
from fedvit.errors import OverBudget
from fedvit.files import atomic_write
from fedvit.known_names import check_names
from fedvit.quantities import parse_bytes, parse_flops, parse_seconds
from fedvit.resources import Budget


@click.command()
@click.argument("id", required=False, metavar="[ID[@MODE]]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def boards(id: str | None, as_json: bool) -> None:
    """List the boards that costs can be predicted for; or all about the one named ID, with sources."""
    from rich.console import Console

    from coordinator.planning.boards import board_page, boards_table, entries, entry
    from profiles.catalogue import in_mode

    board = in_mode(id)[0] if id else None
    if as_json:
        data = entry(board) if board else entries()
        click.echo(msgspec.json.format(msgspec.json.encode(data)).decode())
        return
    console = Console()
    console.print(board_page(board) if board else boards_table(console.width))


def _budget_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Budgets with units, as devices and runs have them; `_budget` takes them."""
    for flag, parse, text in (
        ("--memory-budget", parse_bytes, "Memory of every device's process, beside its board's; e.g. 512MB."),
        ("--flops-budget", parse_flops, "FLOPs of a round's training, e.g. 2TFLOP."),
        ("--round-deadline", parse_seconds, "Time of a round's training, e.g. 10m."),
        ("--upload-budget", parse_bytes, "Bytes of one round's result, e.g. 5MB."),
    ):
        command = click.option(flag, callback=amount(parse), metavar="AMOUNT", help=text)(command)
    return command


def _budget(flags: dict[str, Any]) -> Budget:
    return Budget(
        memory_bytes=flags["memory_budget"],
        flops_per_round=flags["flops_budget"],
        round_deadline_s=flags["round_deadline"],
        upload_bytes=flags["upload_budget"],
    )


def _request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """A method on a model, boards, and what they have and may spend."""
    options = (
        click.option("--method", default="eftvit", help="Federated method."),
        click.option(
            "--model", default="vit_small_images", help="Name of a timm Vision Transformer, or vit_small_images."
        ),
        click.option(
            "--option", "-o", "pairs", multiple=True, metavar="KEY=VALUE", help="Option of the method. Repeatable."
        ),
        click.option("--model-option", "model_pairs", multiple=True, metavar="KEY=VALUE", help="Repeatable."),
        click.option(
            "--device",
            "devices",
            multiple=True,
            required=True,
            metavar="ID[@MODE]",
            help="A board, in a power mode: see `coordinator boards`. Repeatable.",
        ),
        click.option("--classes", default=10, type=click.IntRange(min=2), help="Classes that the model tells apart."),
        click.option("--images", default=500, type=click.IntRange(min=1), help="Training images of one device."),
        click.option("--test-images", default=100, type=click.IntRange(min=0), help="Test images of one device."),
        _budget_flags,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _check_request(
    method: str, model: str, options: dict[str, Any], model_options: dict[str, Any], devices: tuple[str, ...]
) -> None:
    """Raises ConfigError for names that there are not, before anything imports torch."""
    from profiles.catalogue import in_mode

    check_names(method, options, model, model_options)
    for device in devices:
        in_mode(device)


@click.command()
@_request_flags
@click.option("--mask", "masks", multiple=True, type=float, help="Share of patches dropped in training. Repeatable.")
@click.option("--split", "splits", multiple=True, type=int, help="Blocks that a device trains. Repeatable.")
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
    **budgets: Any,
) -> None:
    """Predict what a method costs on boards: FLOPs, bytes, time, memory, energy; and which boards keep their budgets.

    Every --mask is combined with every --split. Ends with exit code 8 when a device fits none of the variants.
    """
    options, model_options = dict(map(key_value, pairs)), dict(map(key_value, model_pairs))
    _check_request(method, model, options, model_options, devices)
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
        budget=_budget(budgets),
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
@_request_flags
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def plan(
    method: str,
    model: str,
    pairs: tuple[str, ...],
    model_pairs: tuple[str, ...],
    devices: tuple[str, ...],
    classes: int,
    images: int,
    test_images: int,
    as_json: bool,
    **budgets: Any,
) -> None:
    """Choose the form of a method that boards would get inside their budgets, and say what else was looked at.

    Ends with exit code 8 when nothing fits one of them.
    """
    options, model_options = dict(map(key_value, pairs)), dict(map(key_value, model_pairs))
    _check_request(method, model, options, model_options, devices)
    from rich.console import Console

    from coordinator.planning.plan_report import plan_report
    from coordinator.planning.profiling import BoardMode, NothingFits, Request, choose_forms

    request = Request(
        method=method,
        options=options,
        model=model,
        model_options=model_options,
        classes=classes,
        targets=[BoardMode.parse(text) for text in devices],
        masks=(),
        splits=(),
        images=images,
        test_images=test_images,
        budget=_budget(budgets),
    )
    chosen = choose_forms(request, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    else:
        console = Console()
        console.print(plan_report(chosen, console.width))
    if none := [each.device for each in chosen if isinstance(each, NothingFits)]:
        raise OverBudget(f"nothing fits the budget of {', '.join(none)}")


@click.command()
@click.argument("run")
@click.option("--runs", "folder", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write a page: FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(run: str, folder: Path, out: Path | None, as_json: bool) -> None:
    """Tell what a run cost and reached: accuracy, bytes, time, memory, energy; predicted beside measured."""
    from rich.console import Console

    from coordinator.record.reporting import run_document
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
