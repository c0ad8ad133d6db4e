"""`fleet`: a whole fleet on one machine."""

import signal

import click

from fedvit import command_line
from fleet.bench.commands import bench_command
from fleet.chaos.commands import chaos_command
from fleet.demo import demo_command
from fleet.experiment import experiment_command
from fleet.fuzz.command import fuzz_command
from fleet.host import host_command
from fleet.partition import partition_command
from fleet.pentest.command import pentest_command
from fleet.run import run_command


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Partition data over devices, run fleets on one machine, compare methods, see the demo."""


cli.add_command(bench_command)
cli.add_command(chaos_command)
cli.add_command(demo_command)
cli.add_command(experiment_command)
cli.add_command(host_command)
cli.add_command(fuzz_command)
cli.add_command(partition_command)
cli.add_command(pentest_command)
cli.add_command(run_command)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that child processes are stopped on the way out
    command_line.run(cli, "fleet")
