"""`fleet`: a whole fleet on one machine."""

import signal
from importlib import import_module

import click

from fedvit import command_line

COMMANDS = {
    "demo": "Partition handwritten digits over devices, and train on them with real processes over MQTT.",
    "experiment": "Run the grid that FILE describes, over a network in memory; finished cells are not run again.",
    "host": "Host virtual devices in this process, each with its own name, vault and connection.",
    "partition": "Deal a data set out into one folder per device.",
    "region": "Serve a region: a coordinator whose devices count as one device of another coordinator, the centre.",
    "run": "Run a coordinator and its devices on this machine: a process per device folder, or many virtual devices.",
}
"""Name -> description, so that `--help` imports no command."""


class _Group(command_line.Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module("fleet.region" if cmd_name == "region" else f"fleet.commands.{cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Group,
    context_settings={"show_default": True},
    examples=["fleet demo", "fleet partition --devices 4 --out parts", "fleet run --parts parts --method fedavg"],
)
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Partition data over devices, run fleets on one machine, compare methods, see the demo."""


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that child processes are stopped on the way out
    command_line.run(cli, "fleet")
