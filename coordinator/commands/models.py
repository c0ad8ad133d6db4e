"""`coordinator models`: the models that devices use, and who may use which."""

from pathlib import Path

import click
import msgspec

from coordinator.commands.flags import runs_flag
from coordinator.model_view import ModelView, describe_score
from coordinator.operations.models import ModelChange
from coordinator.operations.opening import open_models
from fedvit.command_line import Command, Group, json_flag
from fedvit.files import private_files
from profiles.report.console import Console
from profiles.report.tables import Column, Sheet, columns


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=["coordinator models", "coordinator models promote RUN-10 --where site=berlin"],
)
@runs_flag
@json_flag
@click.pass_context
def models(context: click.Context, /, folder: Path, *, as_json: bool) -> None:
    """List the models that devices have compared or use; promote, roll back or retire one."""
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"folder": folder, "as_json": as_json}}
        return
    with open_models(folder) as source:
        listed = source.list_all()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(listed)).decode())
        return
    console = Console()
    console.print(Sheet(listed, _COLUMNS).draw(None, console.width) if listed else f"no model in {folder}")


@models.command(
    cls=Command, examples=["coordinator models promote RUN-10", "coordinator models promote RUN-10 --where site=berlin"]
)
@click.argument("name")
@click.option("--where", default="", metavar="LABELS", help="Only devices with these labels: site=berlin,board=rpi5.")
@runs_flag
@json_flag
@private_files()
def promote(name: str, where: str, folder: Path, as_json: bool) -> None:
    """Let devices that have the model NAME use it, whatever the rules of its run say."""
    with open_models(folder, writes=True) as source:
        _print(source.promote(name, where), as_json=as_json)


@models.command(cls=Command, examples=["coordinator models rollback RUN-10"])
@click.argument("name")
@runs_flag
@json_flag
@private_files()
def rollback(name: str, folder: Path, as_json: bool) -> None:
    """Stop the use of the model NAME: its devices use their former ones again."""
    with open_models(folder, writes=True) as source:
        _print(source.roll_back(name), as_json=as_json)


@models.command(cls=Command, examples=["coordinator models retire RUN-10"])
@click.argument("name")
@runs_flag
@json_flag
@private_files()
def retire(name: str, folder: Path, as_json: bool) -> None:
    """Let devices remove the model NAME, which none of them uses."""
    with open_models(folder, writes=True) as source:
        _print(source.retire(name), as_json=as_json)


def _print(changed: ModelChange, *, as_json: bool) -> None:
    click.echo(msgspec.json.encode(changed).decode() if as_json else changed.done)


def _count_states(model: ModelView) -> str:
    counts = [f"{count} {state}" for state, count in model.states.items()]
    more = {"pending": model.pending, "drifted": model.drift_count}
    counts += [f"{count} {name}" for name, count in more.items() if count]
    return ", ".join(counts) or "none"


_COLUMNS = [
    *columns({"model": "model", "stage": "state", "method": "method", "run": "run", "round": "round"}),
    Column("devices", "devices", _count_states),
    Column("score", "right answers", lambda model: describe_score(model.score), is_long=True),
    Column("reason", "reason", is_long=True),
]
