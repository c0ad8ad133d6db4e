"""`coordinator`: starts runs and reports on them."""

import click

from coordinator.commands.boards import boards
from coordinator.commands.cancel import cancel
from coordinator.commands.dashboard import dashboard
from coordinator.commands.devices import devices
from coordinator.commands.enroll import enroll
from coordinator.commands.export import export
from coordinator.commands.gc import gc
from coordinator.commands.init import init
from coordinator.commands.label import label
from coordinator.commands.logs import logs
from coordinator.commands.methods import methods
from coordinator.commands.pause import pause, unpause
from coordinator.commands.plan import plan
from coordinator.commands.profile import profile
from coordinator.commands.quarantine import quarantine
from coordinator.commands.report import report
from coordinator.commands.revoke import revoke
from coordinator.commands.rm import rm
from coordinator.commands.runs import runs
from coordinator.commands.serve import serve
from coordinator.commands.show import show
from coordinator.commands.start import start
from coordinator.commands.status import status
from coordinator.commands.submit import submit
from fedvit import command_line


@click.group(
    cls=command_line.Group,
    context_settings={"show_default": True},
    examples=["coordinator start --config run.toml", "coordinator show RUN", "coordinator runs --json"],
)
@click.version_option(package_name="fedvit")
def cli() -> None:
    """Train models on a fleet of devices, round by round."""


for command in (
    boards, cancel, dashboard, devices, enroll, export, gc, init, label, logs, methods, pause, plan, profile,
    quarantine, report, revoke, rm, runs, serve, show, start, status, submit, unpause,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "coordinator")
