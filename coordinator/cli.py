"""`coordinator`: starts runs and reports on them."""

import os
from importlib import import_module
from pathlib import Path

import click

from fedvit import command_line
from fedvit.errors import ConfigError

COMMANDS = {
    "adopt": "Admit devices that ask for it in the local network, each after its code was typed here.",
    "audit": "Show who changed runs or devices, when, and from where.",
    "backup": "Keep copies of runs and a deployment, also while they are served.",
    "boards": "List the boards that costs can be predicted for, or all data of one.",
    "bugreport": "Write a ZIP file for the report of a fault: versions, configuration, rounds, problems and logs.",
    "cancel": "Cancel a run; it cannot be resumed.",
    "dashboard": "Show runs and devices in a browser, as they happen.",
    "devices": "List the devices of a deployment.",
    "enroll": "Print a token with which one device can join, once; for several names one for each.",
    "evaluate": "Ask all devices for scores of a run's model, without training.",
    "export": "Write a model of a run as ONNX files that work without this software.",
    "gc": "Remove runs and details beyond the policy, and unreferenced files.",
    "init": "Make a deployment: an authority, certificates, the configuration of a broker.",
    "label": "Set labels of devices in all runs, or list them.",
    "logs": "Print the log lines that a device sent with its failures.",
    "methods": "List all methods, or describe one.",
    "models": "List the models that devices have compared or use; promote, roll back or retire one.",
    "pause": "Pause a run after its open round.",
    "plan": "Choose the configuration of a method that fits the budgets of boards.",
    "profile": "Predict what a method costs on boards.",
    "quarantine": "List devices with strikes or in quarantine, or release some.",
    "release": "Offer PACKAGES of one version in FOLDER, and sign the list that devices read.",
    "renew": "Renew the certificates of the broker and the coordinator.",
    "report": "Report a run: accuracy, bytes, time, memory, energy; predicted beside measured.",
    "restore": "Write the runs and the deployment of a backup to new folders.",
    "retry": "Let a service serve a failed run again.",
    "revoke": "Revoke devices: their connections end at once.",
    "rm": "Remove runs: their rows of the record, their folders and their mirrors.",
    "rotate-authority": "Replace the authority of a deployment while it is served.",
    "runs": "List all runs, newest first.",
    "serve": "Keep a broker and its devices connected, and serve submitted runs.",
    "show": "Print a run: accuracy by round, devices, refusals.",
    "sign": "Make a publisher's key, or sign graphs with it.",
    "start": "Start a run: a broker unless one is given, its devices, and its rounds.",
    "status": "Show what a run or the service is waiting for.",
    "submit": "Put a run into the queue of a service.",
    "token": "Manage tokens of the HTTP API: make, list and remove them.",
    "trace": "Print what happened to a task, or to a round's tasks, and when.",
    "unpause": "Let a paused run open rounds again.",
    "wait": "Wait until a run has ended.",
}
"""Name -> description."""
REMOTE = {
    "audit", "backup", "cancel", "devices", "gc", "label", "logs", "models", "pause", "quarantine", "retry", "revoke",
    "rm", "runs", "show", "status", "submit", "unpause", "wait",
}  # fmt: skip
"""Commands that also work on the service of another machine."""


@click.group(
    cls=command_line.LazyGroup,
    package="coordinator.commands",
    lazy=COMMANDS,
    elsewhere=dict.fromkeys(("cancel", "pause", "unpause", "retry"), "coordinator.commands.run_change"),
    context_settings={"show_default": True},
    examples=["coordinator start --config run.toml", "coordinator show RUN", "coordinator runs --json"],
)
@click.version_option(package_name="fedvit")
@click.option(
    "--server",
    metavar="URL",
    help="Work on the service of another machine by its HTTP API, http(s)://HOST:PORT; or set FEDVIT_SERVER.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token for --server; or set FEDVIT_TOKEN.",
)
@click.option(
    "--server-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    help="authority.pem of the deployment that signed the certificate of --server; or set FEDVIT_SERVER_CA.",
)
@click.pass_context
def cli(context: click.Context, server: str | None, token_file: Path | None, server_ca: Path | None) -> None:
    """Train models on a fleet of devices, round by round."""
    url = server or os.environ.get("FEDVIT_SERVER")
    if not url:
        return
    if context.invoked_subcommand in REMOTE:
        context.meta["fedvit.service"] = import_module("coordinator.commands.server").connect(
            url, token_file, server_ca
        )
    elif server:
        raise ConfigError(
            "FV1817", f"coordinator {context.invoked_subcommand} works on this machine only: leave out --server"
        )


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "coordinator")
