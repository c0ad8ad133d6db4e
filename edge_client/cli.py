"""`edge-client`: one device of a fleet. Nothing here or below imports a deep-learning framework."""

from importlib import import_module
from importlib.metadata import version
from typing import Any

import click

from edge_client.commands.options import OPTIONS, make_settings
from fedvit import command_line

COMMANDS = {
    "bugreport": "Write a ZIP file for the report of a fault: versions, settings, status, checks, the last log lines.",
    "certify": "Try this board: checks, speed, three training programs, a limit of memory, heat, kill -9 and resume.",
    "doctor": "Check whether this device can take part, with a hint for each problem.",
    "export": "Write this device's own model of RUN as ONNX files that work without the coordinator.",
    "gc": "Remove the vaults of finished runs except the newest, blobs that no run needs, and incomplete files.",
    "home": "Show how this device appears in Home Assistant, or remove it from there.",
    "join": "Join a deployment with the one-time TOKEN of coordinator enroll.",
    "label": "Show the images in FOLDER/unlabelled one by one, and move each into the class folder whose key is "
    "pressed.",
    "ledger": "List what has left this device, and the tasks that it refused.",
    "models": "List the models of this device, or change which one answers pictures.",
    "page": "Serve the owner's page: what this device does, what left it, labels for its pictures, a pause.",
    "predict": "Answer each of IMAGES with the model of a bundle: probabilities, a number, or shares of classes.",
    "profile": "Measure this device: speed, memory, disk, temperature, power, the connection to the broker.",
    "rm": "Remove the vaults of RUNS, also of the newest.",
    "serve": "Answer pictures with the model of this device that is promoted, also while another one is promoted.",
    "status": "Show what this device is doing: its last round, images, files that cannot be used, memory, last error.",
    "update": "Install a newer version from SOURCE, a folder or URL of coordinator release, if its signature is right.",
}
"""The commands and the first sentences of their help. Each is in the module of its name."""


@click.group(
    cls=command_line.LazyGroup,
    package="edge_client.commands",
    lazy=COMMANDS,
    params=list(OPTIONS),
    invoke_without_command=True,
    context_settings={"show_default": True},
    examples=[
        "edge-client --broker SERVER --data ~/images",
        "edge-client --data ~/images --memory-budget 512MB --quiet-hours 22:00-06:30",
        "edge-client doctor --data ~/images",
    ],
)
@click.version_option(version("fedvit"))
@click.pass_context
def cli(context: click.Context, /, **options: Any) -> None:
    """Train on this device's own images as the coordinator asks, within the policy of its owner."""
    if context.invoked_subcommand is None:
        import_module("edge_client.commands.train").take_part(make_settings(options))


def main() -> None:
    """Entry point of the console script."""
    command_line.run(cli, "edge-client")


if __name__ == "__main__":  # as the starter of an installation does
    main()
