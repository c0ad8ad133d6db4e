"""`coordinator evaluate`: lets devices test the model of an earlier run, without training."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from coordinator.commands.config_flags import flags_of
from coordinator.commands.flags import runs_flag
from coordinator.config import BrokerConfig, make_config
from coordinator.operations.submitting import Submission
from coordinator.operations.submitting import submit as submit_here
from coordinator.record.opening import open_existing_record
from coordinator.record.scores import find_round
from coordinator.serving.request import StartRequest
from export.bundle.command import round_flag
from fedvit.command_line import Command
from fedvit.files import private_files


@click.command(
    cls=Command,
    examples=["coordinator evaluate RUN", "coordinator evaluate RUN --round last --submit"],
)
@click.argument("run")
@round_flag
@click.option("--devices", type=click.IntRange(min=1), help="Devices to wait for; by default as many as RUN did.")
@click.option("--run", "name", metavar="NAME", help="Name of the new run; by default date, time and method.")
@click.option("--submit", "to_service", is_flag=True, help="Put it into the queue of the service of these runs.")
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@flags_of(("broker", BrokerConfig))
@runs_flag
@private_files()
def evaluate(
    run: str,
    asked_round: str | int | None,
    devices: int | None,
    name: str | None,
    to_service: bool,
    quiet: bool,
    folder: Path,
    **broker: Any,
) -> None:
    """Ask all devices for scores of the model of RUN, with their personal tensors, without training.

    This is a new run with zero rounds: `show` and `report` have its scores.
    """
    with open_existing_record(folder) as store:
        record, tested = store.runs.read(run), find_round(store, run, asked_round).round
    values = {**record.config, "rounds": 0, "start_from": run, "start_round": tested, "stop": {}}
    values |= {"classes": list(record.classes), "evaluation_cohort": 1.0, "privacy": {}}
    if devices is not None:
        values["devices"] = devices
    where = f"run {run}"
    if to_service:
        click.echo(submit_here(folder, Submission(values, where, name)).run)
        return
    set_here = {key.removeprefix("broker."): value for key, value in broker.items() if value is not None}
    values["broker"] = {**record.broker, **set_here}
    request = StartRequest(
        values=values, where=where, config=make_config(values, where), folder=folder, url=None, resume=None, name=name,
        resume_or_new=False, only_check=False, quiet=quiet, metrics_address=None,
    )  # fmt: skip
    import_module("coordinator.serving.start").start_run(request)  # late: it loads numpy
