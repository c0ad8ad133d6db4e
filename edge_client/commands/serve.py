"""`edge-client serve`: answers pictures with the promoted model."""

import contextlib
import logging
import signal
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.sandbox.confine import confine_server
from edge_client.settings import DeviceSettings
from edge_client.storage.models import DeviceModels
from edge_client.storage.state import read_device_id, state_folder
from fedvit.command_line import Command
from fedvit.errors import ConfigError, FedvitError
from fedvit.files import private_files
from fedvit.hosts import is_loopback
from fedvit.logs import configure_logging
from fedvit.passwords import read_password
from fedvit.quantities import parse_seconds
from fedvit.small_server import parse_listen
from fedvit.systemd import Notifier

log = logging.getLogger(__name__)

PORT = 8093
TOKEN = "FEDVIT_SERVE_TOKEN"
TICK_S = 1.0
CLOCK_JUMP_S = 60.0


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
    help="Answer pictures of a camera (its number or device), a stream, a video file, or Frigate's clips.",
)
@click.option("--every", default="1s", metavar="TIME", help="Time between two pictures of a camera or stream.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the predictions of --watch and --source to this file as JSON lines; - is standard output.",
)
@click.option("--former", is_flag=True, help="Go back to the former model first.")
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
    every_s = parse_seconds(every)
    configure_logging(level=logging.WARNING if settings.quiet else logging.INFO)
    if former:
        click.echo(f"edge-client: {DeviceModels(state).roll_back('by --former').name} answers again", err=True)

    from edge_client.serving.models import ModelServer  # onnxruntime takes seconds
    from edge_client.serving.pipeline import Pipeline
    from edge_client.serving.results import ResultFile
    from edge_client.serving.server import PredictServer
    from edge_client.serving.sources import FolderSource, check_folder, open_source

    opened = [FolderSource(check_folder(folder, "--watch")) for folder in folders]
    every_source = [*opened, *(open_source(text, every_s) for text in sources)]
    if not confine_server():  # before threads start
        log.warning("a model that is an attack could start programs: this system has no seccomp")
    notifier, stop = Notifier.from_environment(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with private_files(), contextlib.ExitStack() as stack:
        server = ModelServer(state, settings.threads)
        web = PredictServer(address, server, token)
        stack.callback(web.server_close)
        server.start()
        stack.callback(server.close)
        entry = _open_home(settings, state) if settings.home else None
        if entry:
            entry.start()
            stack.callback(entry.close)
        pipeline = Pipeline(server, ResultFile(results) if results else None, entry, top)
        threading.Thread(target=web.serve_forever, name="web", daemon=True).start()
        stack.callback(web.shutdown)
        pipeline.start(every_source, stop)
        current = server.current
        log.info("serving", extra={"address": web.address, "model": current.name if current else None})
        notifier.ready()
        _wait(stop, notifier)
        notifier.stopping()


def _wait(stop: threading.Event, notifier: Notifier) -> None:
    """Wait for the end, and log when the clock was set meanwhile: days of statistics may then be wrong."""
    offset_s = time.time() - time.monotonic()
    while not stop.wait(TICK_S):
        notifier.alive()
        now_s = time.time() - time.monotonic()
        if abs(now_s - offset_s) > CLOCK_JUMP_S:
            log.warning("the clock was set", extra={"by_s": round(now_s - offset_s)})
            offset_s = now_s


def _open_home(settings: DeviceSettings, state: Path) -> Any:
    """Return the entries on the home's broker. Raises ConfigError for a device without a name."""
    from edge_client.link.device_link import DeviceIdentity
    from edge_client.link.endpoint import endpoint_of
    from edge_client.serving.home import PredictionEntry
    from profiles.probes.host import device_profile

    assert settings.home is not None
    endpoint = endpoint_of(settings)
    device = endpoint.device
    if device is None:
        try:
            device = read_device_id(state / "device-id")
        except (OSError, FedvitError) as error:
            raise ConfigError("FV1412", f"no device has run with the state {state}: name it with --id") from error
    profile = device_profile(settings.threads, state)
    identity = DeviceIdentity(
        device=device, federation=endpoint.federation, software=version("fedvit"), profile=profile
    )
    return PredictionEntry(settings.home, identity)
