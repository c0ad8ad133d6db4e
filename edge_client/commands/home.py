"""`edge-client home`: how this device appears on the home's own broker."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from edge_client.commands.options import program_options, read_settings
from edge_client.health.home import remove_entities, try_connection
from edge_client.health.home_entities import HomeTopics, list_entities
from edge_client.link.endpoint import endpoint_of
from edge_client.storage.state import default_state, read_device_id
from fedvit.command_line import Command
from fedvit.errors import ConfigError
from profiles.probes.meter import Sensors


@click.command(
    "home",
    cls=Command,
    params=program_options("home", "broker", "data", "device", "state", "federation"),
    examples=[
        "edge-client home --home mqtt://USER@HOST --data ~/images",
        "edge-client home --home mqtt://USER@HOST --data ~/images --remove",
    ],
)
@click.option("--remove", is_flag=True, help="Remove the device from Home Assistant, and what the broker keeps of it.")
@click.pass_context
def command(context: click.Context, /, *, remove: bool, **own: Any) -> None:
    """Show how this device appears in Home Assistant, or remove it from there.

    It tries the connection to the broker of --home. A running `edge-client --home` shows the device.
    """
    settings = read_settings(context, own)
    if settings.home is None:
        raise ConfigError("FV1471", "--home is missing: the address of this home's broker")
    endpoint = endpoint_of(settings)
    device = endpoint.device or _read_device(settings.state or default_state(settings.data_folder))
    topics = HomeTopics(endpoint.federation, device)
    if remove:
        remove_entities(settings.home, topics)
        click.echo(f"{device} is removed from {settings.home}; start edge-client without --home from now on")
        return
    try_connection(settings.home)
    click.echo(f"{settings.home} accepts fedvit {version('fedvit')}; edge-client --home shows there:")
    for entity in list_entities(Sensors.find()):
        click.echo(f"  {entity.settings['name']:<12}  {topics.config(entity)}")


def _read_device(state: Path) -> str:
    """Return the name of the device. Raises ConfigError if none has run with this state."""
    file = state / "device-id"
    if not file.is_file():
        raise ConfigError("FV1412", f"there is no {file}: no device has run with this state; --state names another")
    return read_device_id(file)
