"""`coordinator`: starts runs and tells of them."""

import click

from coordinator.commands.costs import boards, plan, profile, report
from coordinator.commands.deployment import devices, enroll, init, revoke
from coordinator.commands.export import export
from coordinator.commands.methods import methods
from coordinator.commands.metrics import metrics
from coordinator.commands.quarantine import quarantine
from coordinator.commands.retention import gc, rm
from coordinator.commands.runs import runs, show, status
from coordinator.commands.service import cancel, serve, submit
from coordinator.commands.start import start
from fedvit import command_line


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Train models on a fleet of devices, round by round."""


for command in (
    boards, cancel, devices, enroll, export, gc, init, methods, metrics, plan, profile, quarantine, report, revoke, rm,
    runs, serve, show, start, status, submit,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "coordinator")
