"""`fleet`: a whole fleet on one machine."""

import signal

import click

from fedvit import command_line

COMMANDS = {
    "bugreport": "Write a ZIP file for the report of a fault: versions, configuration, rounds, logs of coordinator and "
    "devices.",
    "contracts": "Check the plugins of an installed package: every law that fedvit's own parts of each kind obey.",
    "demo": "Partition handwritten digits over devices, and train on them with real processes over MQTT.",
    "experiment": "Run the grid that FILE describes, over a network in memory; finished cells are not run again.",
    "host": "Host virtual devices in this process, each with its own name, vault and connection.",
    "partition": "Deal a data set out into one folder per device.",
    "region": "Serve a region: a coordinator whose devices count as one device of another coordinator, the centre.",
    "results": "Write the results of an experiment as CSV, LaTeX tables and figures; without flags show them.",
    "run": "Run a coordinator and its devices on this machine: a process per device folder, or many virtual devices.",
}
"""The commands and the first sentences of their help."""


@click.group(
    cls=command_line.LazyGroup,
    package="fleet.commands",
    lazy=COMMANDS,
    elsewhere={"region": "fleet.region"},
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
