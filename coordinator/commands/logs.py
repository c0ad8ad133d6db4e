"""`coordinator logs`: shows the log lines that a device sent with its failures."""

from pathlib import Path

import click

from coordinator.commands.flags import runs_flag
from coordinator.operations.opening import open_runs
from fedvit.command_line import Command, json_flag, print_json
from fedvit.errors import ConfigError
from fedvit.terminal import escape_line


@click.command(cls=Command, examples=["coordinator logs pi-kitchen", "coordinator logs pi-kitchen --run RUN --json"])
@click.argument("device")
@runs_flag
@click.option("--run", help="Only of this run; by default of all.")
@json_flag
def logs(device: str, folder: Path, run: str | None, as_json: bool) -> None:
    """Print the last log lines of DEVICE, as it sent them with each task that it could not do; the newest last."""
    with open_runs(folder) as runs:
        found = runs.read_logs(device, run)
    if as_json:
        print_json(found)
        return
    if not found:
        where = f"run {run!r}" if run else f"any run of {folder}"
        raise ConfigError(
            "FV1610", f"device {device!r} has sent no log in {where}: it failed no task, or runs with --no-logs"
        )
    for log in found:
        click.echo(escape_line(f"{log.at} run {log.run}, round {log.round}, {log.kind}: {log.reason}"))
        for line in log.lines.splitlines():
            click.echo(f"  {escape_line(line)}")
