"""`edge-client label`: gives unlabelled images their class."""

from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.state import read_device_id, state_folder
from fedvit.command_line import Command
from fedvit.errors import FedvitError


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

    from edge_client.owner.guessing import Guesser, newest_guesser  # onnxruntime takes seconds
    from edge_client.owner.label import run, summary
    from edge_client.owner.labelling import Labelling, open_images

    settings = read_settings(context, own)
    data = settings.data_folder
    labelling = Labelling(data)
    state = state_folder(data, settings.state)
    guesser: Guesser | None = None
    if (state / "device-id").is_file():
        images = open_images(settings, state)
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
