"""`coordinator plan`: the configuration of a method that boards would get."""

from typing import Any

import click
import msgspec

from coordinator.commands.flags import key_value
from coordinator.commands.prediction_flags import budget_of, check_request, request_flags
from fedvit.command_line import Command, json_flag
from fedvit.errors import OverBudget


@click.command(
    cls=Command, examples=["coordinator plan --model vit_base_patch16_224 --device rpi5-8 --memory-budget 800MB"]
)
@request_flags
@json_flag
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
    """Choose the configuration of a method that fits the budgets of boards, and list the alternatives.

    Ends with exit code 8 if nothing fits one of them.
    """
    options, model_options = dict(map(key_value, pairs)), dict(map(key_value, model_pairs))
    check_request(method, model, options, model_options, devices)
    from rich.console import Console

    from coordinator.planning.plan_report import plan_report
    from coordinator.planning.profiling import BoardMode, NothingFits, Request, choose_configurations

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
        budget=budget_of(budgets),
    )
    chosen = choose_configurations(request, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    else:
        console = Console()
        console.print(plan_report(chosen, console.width))
    if none := [each.device for each in chosen if isinstance(each, NothingFits)]:
        raise OverBudget(f"nothing fits the budget of {', '.join(none)}")
