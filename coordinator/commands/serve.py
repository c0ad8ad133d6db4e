"""`coordinator serve`: a service for submitted runs."""

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from coordinator.commands.config_flags import service_flags
from coordinator.commands.flags import record_flag, runs_flag
from fedvit import monitoring
from fedvit.command_line import Command, log_format_flag
from fedvit.files import private_files


@click.command(
    cls=Command,
    examples=[
        "coordinator serve --broker.deployment deployment --side-by-side 2",
        "coordinator serve --standby --broker mqtts://broker.example.com",
    ],
)
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file; flags override it.")
@runs_flag
@record_flag
@click.option(
    "--standby",
    is_flag=True,
    help="If another service leads, wait, and take over when it has ended or hangs. Needs a record in PostgreSQL, and "
    "the address of a broker.",
)
@click.option("--quiet", is_flag=True, help="Show nothing but errors.")
@click.option("--prometheus", "metrics_address", **monitoring.OPTION)
@click.option("--prometheus-password-file", **monitoring.PASSWORD_OPTION)
@log_format_flag
@service_flags
@private_files()
def serve(**options: Any) -> None:
    """Keep a broker and its devices connected, and serve submitted runs until stopped."""
    import_module("coordinator.serving.service").ServiceProcess(options).run()  # late: it loads SQLAlchemy and numpy
