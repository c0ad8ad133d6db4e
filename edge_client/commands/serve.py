"""`edge-client serve`: answers pictures with the promoted model."""

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.serving.request import ServeRequest
from edge_client.storage.models import DeviceModels
from edge_client.storage.state import state_folder
from fedvit.command_line import Command
from fedvit.errors import ConfigError, StorageFailed
from fedvit.hosts import is_loopback
from fedvit.logs import configure_logging
from fedvit.passwords import read_password
from fedvit.quantities import parse_seconds
from fedvit.small_server import parse_listen

PORT = 8093
TOKEN = "FEDVIT_SERVE_TOKEN"
SOURCES = "FEDVIT_SERVE_SOURCES"


@click.command(
    "serve",
    cls=Command,
    params=program_options("data", "state", "threads", "home", "broker", "device", "federation", "policy"),
    examples=[
        "edge-client serve --data ~/images",
        "edge-client serve --data ~/images --watch ~/camera --results predictions.jsonl",
        "edge-client serve --data ~/images --source rtsp://CAMERA/stream --home mqtt://USER@HOST",
    ],
)
@click.option(
    "--listen",
    default=str(PORT),
    metavar="[HOST:]PORT|unix:PATH",
    help="Address of POST /predict and GET /health; one that other machines reach needs a token.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File with the token that requests need; or set {TOKEN}.",
)
@click.option(
    "--watch", "folders", multiple=True, type=click.Path(path_type=Path), help="Answer new pictures in this folder."
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="CAMERA|URL|FILE|frigate:FOLDER",
    help="Answer pictures of a camera (its number or device), a stream, a video file, or Frigate's clips. An address "
    f"with a password belongs in {SOURCES}, separated by spaces: other users can read a command line.",
)
@click.option("--every", default="1s", metavar="TIME", help="Time between two pictures of a camera or stream.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the predictions of --watch and --source to this file as JSON lines; - is standard output.",
)
@click.option("--former", is_flag=True, help="Go back to the former model first, if there is one.")
@click.option("--top", type=click.IntRange(1, 100), default=3, help="Classes in a line of --results.")
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    listen: str,
    token_file: Path | None,
    folders: tuple[Path, ...],
    sources: tuple[str, ...],
    every: str,
    results: Path | None,
    former: bool,
    top: int,
    **own: Any,
) -> None:
    """Answer pictures with the model of this device that is promoted, also while another one is promoted.

    Pictures arrive by HTTP, in a folder, or from a camera. They stay where they are.
    """
    settings = read_settings(context, own)
    state = state_folder(settings.data, settings.state)
    address, token = parse_listen(listen, "--listen", "FV1493"), read_password(token_file, TOKEN, "server", "FV1493")
    if token is None and address.socket_path is None and not is_loopback(address.host):
        raise ConfigError(
            "FV1493",
            f"{address.host} can be reached from other machines and needs a token: set {TOKEN} or --token-file, or "
            "listen on 127.0.0.1",
        )
    sources += tuple(os.environ.get(SOURCES, "").split())
    request = ServeRequest(
        settings, state, address, token, folders, sources, every_s=parse_seconds(every), results=results, top=top
    )
    configure_logging(level=logging.WARNING if settings.quiet else logging.INFO)
    if former:
        try:
            click.echo(f"edge-client: {DeviceModels(state).roll_back('by --former').name} answers again", err=True)
        except (ConfigError, StorageFailed) as error:  # as on the second start of a service with this option
            click.echo(f"edge-client: --former: {error}; the model in use answers", err=True)
    import_module("edge_client.serving.program").serve_pictures(request)  # late: onnxruntime takes seconds
