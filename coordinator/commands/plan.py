"""`coordinator plan`: the configuration of a method that boards would get."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from coordinator.commands.flags import runs_flag
from coordinator.commands.prediction_flags import request_flags, request_of
from coordinator.commands.sign import PATH, sign_graphs
from coordinator.compute.planning.forecast import write_forecast
from coordinator.config import RunConfig, make_config
from coordinator.record.opening import open_existing_record
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError, OverBudget
from fedvit.files import private_files
from profiles.report.console import Console

OF_THE_RUN = {"method": "--method", "pairs": "--option", "model": "--model", "model_pairs": "--model-option"}
"""Flags that a recorded run stands for."""


@click.command(
    cls=Command,
    examples=[
        "coordinator plan --model vit_base_patch16_224 --device rpi5-8 --memory-budget 800MB",
        "coordinator plan --run night --device rpi5-8 --device rpi4b-4",
        "coordinator plan --method fedper --device rpi5-8 --classes 4 --sign publisher.key",
    ],
)
@click.option(
    "--run",
    metavar="NAME",
    help="Of this run of the record, in place of --method, --model and their options; the dashboard shows its plans "
    "until it begins.",
)
@runs_flag
@request_flags
@click.option(
    "--sign",
    "key",
    type=PATH,
    metavar="KEY",
    help="Sign the graphs of these configurations with the publisher's private key in this file.",
)
@click.option(
    "--signatures", "file", type=PATH, default="signatures.txt", help="File that --sign adds the signatures to."
)
@json_flag
@private_files()
def plan(run: str | None, folder: Path, key: Path | None, file: Path, as_json: bool, **request: Any) -> None:
    """Choose the configuration of a method that fits the budgets of boards, and list the alternatives.

    Ends with exit code 8 if nothing fits one of them. Signatures that --sign made are used by a coordinator that finds
    them as signatures.txt in its deployment.
    """
    use_graphs = sign_graphs(key, file) if key else None
    wanted = request_of(request, config=_read_recorded(run, folder) if run else None)
    profiling = import_module("coordinator.compute.planning.profiling")  # late: it imports torch
    chosen = profiling.choose_configurations(
        wanted, progress=lambda line: click.echo(line, err=True), use_graphs=use_graphs
    )
    if run:
        write_forecast(folder / run, profiling.forecast_of(wanted, chosen))
    if as_json:
        print_json(chosen)
    else:
        console = Console()
        report = import_module("coordinator.compute.planning.plan_report")
        console.print(report.plan_report(chosen, console.width))
    if none := [each.device for each in chosen if isinstance(each, profiling.NothingFits)]:
        raise OverBudget("FV1508", f"nothing fits the budget of {', '.join(none)}")


def _read_recorded(run: str, folder: Path) -> RunConfig:
    """The configuration of a run, with its classes once it has them.

    Raises ConfigError if there is no such run, or a flag contradicts it.
    """
    source = click.get_current_context().get_parameter_source
    given = [flag for name, flag in OF_THE_RUN.items() if source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise ConfigError("FV1901", f"--run {run} has its own method and model: leave out {', '.join(given)}")
    with open_existing_record(folder) as store:
        record = store.runs.read(run)
        config = make_config(record.config, f"run {run}").run
        return msgspec.structs.replace(config, classes=config.classes or tuple(record.classes))
