"""`fleet host`: virtual devices in one process, for an existing coordinator."""

import logging
import os
import resource
import secrets
import signal
import threading
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import click
from paho.mqtt.enums import MQTTProtocolVersion

from edge_client.commands.options import BROKER_VARIABLE
from edge_client.link.session import RETURN_SPREAD_S
from edge_client.storage.state import lock_state
from fedvit import command_line
from fedvit.command_line import Command, log_format_flag
from fedvit.files import make_private, private_files
from fedvit.logs import configure_logging
from fedvit.tracing import open_tracing
from fedvit.transport.address import Address
from fedvit.transport.base import Transport
from fedvit.transport.mqtt import MqttTransport
from fedvit.transport.mqtt_loop import MqttLoop
from fedvit.wire.topics import check_name
from fleet.devices import virtual_devices
from fleet.virtual import Host, HostSettings, share
from profiles.probes.host import usable_cores

log = logging.getLogger(__name__)


class HostFlags(NamedTuple):
    """The command's flags, without those that select the devices."""

    broker: str
    ca_file: Path | None
    federation: str
    parts: Path
    state: Path
    threads: int
    at_once: int | None
    once: bool
    quiet: bool


@click.command(
    "host",
    cls=Command,
    context_settings={"show_default": True},
    examples=["fleet host --broker SERVER --parts parts --devices 500 --state state"],
)
@click.option(
    "--broker",
    envvar=BROKER_VARIABLE,
    metavar="HOST[:PORT]",
    default="localhost",
    help=f"MQTT broker, as for `edge-client`. Or set {BROKER_VARIABLE}, which nobody else on this machine can read.",
)
@click.option("--ca-file", type=click.Path(path_type=Path), help="Certificate authority of an mqtts:// broker.")
@click.option("--federation", default="home", help="Name of the federation.")
@click.option(
    "--parts", type=click.Path(path_type=Path), default=Path("parts"), help="Folder that `fleet partition` made."
)
@click.option(
    "--devices",
    type=click.IntRange(min=1),
    required=True,
    help="Devices of the whole fleet; with fewer folders, several train on the same images.",
)
@click.option("--number", type=click.IntRange(min=0), default=0, help="Number of this host, from 0.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, help="Number of host processes.")
@click.option("--state", type=click.Path(path_type=Path), required=True, help="Folder for the devices' states.")
@click.option("--threads", type=click.IntRange(min=1), default=1, help="Threads of a device that computes.")
@click.option(
    "--at-once", type=click.IntRange(min=1), help="Devices that compute at a time; by default as the cores allow."
)
@click.option("--once", is_flag=True, help="End with the run instead of waiting for the next.")
@click.option("--quiet", is_flag=True, help="Log warnings only.")
@log_format_flag
@private_files()
def host_command(devices: int, number: int, hosts: int, **flags: Any) -> None:
    """Host virtual devices in this process, each with its own name, vault and connection."""
    own = HostFlags(**flags)
    configure_logging(level=logging.WARNING if own.quiet else logging.INFO)
    if number >= hosts:
        raise click.BadParameter(f"{number} of {hosts} hosts, which count from 0", param_hint="--number")
    address = Address.parse(own.broker, ca_file=own.ca_file)
    folders = share(virtual_devices(own.parts, devices), number, hosts)
    home = own.state / f"host-{number}"
    lock = lock_state(home)
    make_private([home, *(own.state / name for name in folders)])
    _allow_sockets(len(folders))
    loop = MqttLoop()

    def connect(name: str, inbox: SimpleQueue[object]) -> Transport:
        client = f"{name}-{secrets.token_hex(4)}"
        versions = (MQTTProtocolVersion.MQTTv311,)
        return MqttTransport(inbox, address, client, versions=versions, return_spread_s=RETURN_SPREAD_S, loop=loop)

    settings = HostSettings(
        federation=check_name(own.federation, "federation"),
        state=own.state,
        blobs=home / "blobs",
        threads=own.threads,
        at_once=own.at_once or max(1, usable_cores() // (own.threads * hosts)),
        software=version("fedvit"),
        watches=True,
    )
    tracing = open_tracing("fedvit-device")
    host = Host(folders, connect, settings, tracing=tracing)
    stop = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    log.info("devices ready", extra={"count": len(folders)})
    try:
        host.serve(stop, once=own.once)
    finally:
        loop.close()
        if tracing:
            tracing.close()
    log.info("devices left", extra={"count": len(folders)})
    os.close(lock)


def _allow_sockets(devices: int) -> None:
    """Raise the limit on open files, if it is too low for a socket per device, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * devices + 256
    if soft < needed and (hard == resource.RLIM_INFINITY or soft < hard):
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """Entry point that does not import the coordinator, unlike `fleet`."""
    command_line.run(host_command, "fleet host")
