"""`coordinator start`: one run, from its configuration to its end."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from coordinator.commands.config_flags import config_flags
from coordinator.commands.flags import record_flag, runs_flag
from coordinator.serving.request import StartRequest
from fedvit import monitoring
from fedvit.command_line import Command, log_format_flag
from fedvit.files import private_files


@click.command(
    cls=Command,
    examples=[
        "coordinator start --method fedavg --rounds 50 --devices 3",
        "coordinator start --config run.toml --privacy.noise-multiplier 0.5 --privacy.clip 1",
        "coordinator start --resume",
    ],
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option(
    "--resume",
    is_flag=False,
    flag_value="newest",
    default=None,
    metavar="[RUN]",
    help="Resume an interrupted run, at the broker that its devices know; without a name the newest.",
)
@click.option(
    "--run", "name", metavar="NAME", default=None, help="Name of the new run; by default date, time and method."
)
@click.option(
    "--resume-or-new",
    is_flag=True,
    help="Resume the run of --run, or begin it if it does not exist; a finished run is left as it is.",
)
@click.option(
    "--check",
    "only_check",
    is_flag=True,
    help="Only check the configuration: the model is built, its weights and the run of --start-from are read, the "
    "broker of --broker answers; no device is waited for.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--prometheus", "metrics_address", **monitoring.OPTION)
@click.option("--prometheus-password-file", **monitoring.PASSWORD_OPTION)
@log_format_flag
@config_flags
@private_files()
def start(**options: Any) -> None:
    """Start a broker unless one is given, wait for devices, and train."""
    request = StartRequest.from_flags(options)
    import_module("coordinator.serving.start").start_run(request)  # late: it loads SQLAlchemy
