"""`edge-client label`: gives unlabelled images their class."""

from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.storage.state import read_device_id, state_folder
from fedvit.command_line import Command
from fedvit.errors import FedvitError
from fedvit.quantities import format_count


@click.command(
    "label",
    cls=Command,
    params=program_options("data", "state", "threads", "test_share", "vault_key"),
    examples=["edge-client label --data ~/images"],
)
@click.option("--least-sure", is_flag=True, help="Begin with the images of which the model that serves is least sure.")
@click.pass_context
def command(context: click.Context, /, *, least_sure: bool, **own: Any) -> None:
    """Show the images in FOLDER/unlabelled one by one, and move each into the class folder whose key is pressed.

    The model of the device's newest run guesses the class, with --least-sure the model that serves. In a terminal,
    also over SSH.
    """

    from edge_client.owner.guessing import (  # onnxruntime
        MOST_SORTED,
        Guesser,
        newest_guesser,
        serving_guesser,
        sort_least_sure,
    )
    from edge_client.owner.label import run, summary
    from edge_client.owner.labelling import Labelling, open_images

    settings = read_settings(context, own)
    data = settings.data_folder
    state = state_folder(data, settings.state)
    guesser: Guesser | None = serving_guesser(state, settings.threads) if least_sure else None
    labelling = Labelling(data)
    if guesser:
        count = f"the newest {MOST_SORTED} of " if len(labelling) > MOST_SORTED else ""
        click.echo(f"edge-client: the model answers {count}{format_count(len(labelling), 'image')} first", err=True)
        labelling.sort(sort_least_sure(labelling.waiting, guesser))
    elif (state / "device-id").is_file():
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
