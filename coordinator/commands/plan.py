"""`coordinator plan`: the configuration of a method that boards would get."""

from typing import Any

import click
import msgspec

from coordinator.commands.prediction_flags import request_flags, request_of
from fedvit.command_line import Command, json_flag
from fedvit.errors import OverBudget


@click.command(
    cls=Command, examples=["coordinator plan --model vit_base_patch16_224 --device rpi5-8 --memory-budget 800MB"]
)
@request_flags
@json_flag
def plan(as_json: bool, **request: Any) -> None:
    """Choose the configuration of a method that fits the budgets of boards, and list the alternatives.

    Ends with exit code 8 if nothing fits one of them.
    """
    wanted = request_of(request)
    from rich.console import Console

    from coordinator.planning.plan_report import plan_report
    from coordinator.planning.profiling import NothingFits, choose_configurations

    chosen = choose_configurations(wanted, progress=lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(chosen)).decode())
    else:
        console = Console()
        console.print(plan_report(chosen, console.width))
    if none := [each.device for each in chosen if isinstance(each, NothingFits)]:
        raise OverBudget(f"nothing fits the budget of {', '.join(none)}")
