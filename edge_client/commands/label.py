"""`edge-client label`: gives unlabelled images their class."""

from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.state import read_device_id, split_file, state_folder
from fedvit.command_line import Command
from fedvit.data.folder import DeviceData
from fedvit.data.split import KeptSplit, RandomSplit
from fedvit.errors import ConfigError, DataError, FedvitError


@click.command(
    "label",
    cls=Command,
    params=program_options("data", "state", "threads", "test_share", "vault_key"),
    examples=["edge-client label --data ~/images"],
)
@click.pass_context
def command(context: click.Context, /, **own: Any) -> None:
    """Show the images in FOLDER/unlabelled one by one, and move each into the class folder whose key is pressed.

    The model of the device's newest run guesses the class. In a terminal, also over SSH.
    """

    from edge_client.owner.label import Guesser, Labelling, newest_guesser, run, summary  # onnxruntime takes seconds

    settings = read_settings(context, own)
    data: Path | None = settings.data
    if data is None:
        raise ConfigError("FV1402", "--data is missing: the folder with this device's images")
    labelling = Labelling(data)
    state = state_folder(data, settings.state)
    guesser: Guesser | None = None
    if (state / "device-id").is_file():
        split = KeptSplit.load(split_file(state), settings.test_share) or RandomSplit(settings.test_share)
        try:
            images = DeviceData.open(data, split=split)
        except DataError:
            images = None  # nothing is labelled yet
        try:
            guesser = newest_guesser(
                device=read_device_id(state / "device-id"),
                state=state,
                data=images,
                threads=settings.threads,
                vault_key=settings.vault_key,
            )
        except FedvitError as error:
            click.echo(f"edge-client: there are no guesses: {error}", err=True)
    run(labelling, guesser)
    click.echo(summary(labelling))
