"""`fleet`: a whole fleet on one machine."""

import shlex
import signal

import click

from fedvit import command_line
from fedvit.errors import ConfigError
from fleet.demo import demo_command
from fleet.experiment import experiment_command
from fleet.host import host_command
from fleet.partition import partition_command
from fleet.run import run_command


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Partition data over devices, run fleets on one machine, compare methods, see the demo."""


cli.add_command(demo_command)
cli.add_command(experiment_command)
cli.add_command(host_command)
cli.add_command(partition_command)
cli.add_command(run_command)

MOVED = {
    "bench": "python -m bench",
    "chaos": "python -m bench chaos",
    "fuzz": "python -m bench fuzz",
    "pentest": "python -m bench pentest",
}
"""Commands that were part of `fleet` once, and what runs them now."""


def _moved(name: str, now: str) -> click.Command:
    """A command that only says, as a ConfigError, what runs it now."""

    @click.command(name, hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def moved(arguments: tuple[str, ...]) -> None:
        line = f"{now} {shlex.join(arguments)}".rstrip()
        raise ConfigError(f"`fleet {name}` is no longer installed; run this in a checkout of the source: {line}")

    return moved


for name, now in MOVED.items():
    cli.add_command(_moved(name, now))


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes are stopped on the way out
    command_line.run(cli, "fleet")
