"""`fleet host`: virtual devices in one process, for an existing coordinator."""

import logging
import os
import resource
import secrets
import signal
import threading
from importlib.metadata import version
from pathlib import Path

import click

from edge_client.commands.options import BROKER_VARIABLE
from edge_client.link.session import RETURN_SPREAD_S
from edge_client.storage.state import lock_state
from fedvit import command_line
from fedvit.command_line import Command, log_format_flag
from fedvit.files import make_private, private_files
from fedvit.logs import configure_logging
from fedvit.wire.topics import check_name
from fleet.devices import virtual_devices
from profiles.probes.host import usable_cores

log = logging.getLogger(__name__)


@click.command(
    "host",
    cls=Command,
    context_settings={"show_default": True},
    examples=[
        "fleet host --broker SERVER --parts parts --devices 500 --state state",
    ],
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
def host_command(
    broker: str,
    ca_file: Path | None,
    federation: str,
    parts: Path,
    devices: int,
    number: int,
    hosts: int,
    state: Path,
    threads: int,
    at_once: int | None,
    once: bool,
    quiet: bool,
) -> None:
    """Host virtual devices in this process, each with its own name, vault and connection."""
    from paho.mqtt.enums import MQTTProtocolVersion

    from fedvit.transport.address import Address
    from fedvit.transport.mqtt import MqttTransport
    from fedvit.transport.mqtt_loop import MqttLoop
    from fleet.virtual import Host, share

    configure_logging(level=logging.WARNING if quiet else logging.INFO)
    if number >= hosts:
        raise click.BadParameter(f"{number} of {hosts} hosts, which count from 0", param_hint="--number")
    address = Address.parse(broker, ca_file=ca_file)
    mine = share(virtual_devices(parts, devices), number, hosts)
    lock = lock_state(state / f"host-{number}")
    make_private([state / f"host-{number}", *(state / name for name in mine)])
    _allow_sockets(len(mine))
    loop = MqttLoop()
    host = Host(
        mine,
        federation=check_name(federation, "federation"),
        transport=lambda name, inbox: MqttTransport(
            inbox,
            address,
            f"{name}-{secrets.token_hex(4)}",
            versions=(MQTTProtocolVersion.MQTTv311,),
            return_spread_s=RETURN_SPREAD_S,
            loop=loop,
        ),
        state=state,
        blobs=state / f"host-{number}" / "blobs",
        threads=threads,
        at_once=at_once or max(1, usable_cores() // (threads * hosts)),
        software=version("fedvit"),
        watches=True,
    )
    stop = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop.set())
    log.info("devices ready", extra={"count": len(mine)})
    try:
        host.serve(stop, once=once)
    finally:
        loop.close()
    log.info("devices left", extra={"count": len(mine)})
    os.close(lock)


def _allow_sockets(devices: int) -> None:
    """Raise the limit on open files, if it is too low for a socket per device, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * devices + 256
    if soft < wanted and (hard == resource.RLIM_INFINITY or soft < hard):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """Entry point that does not import the coordinator, unlike `fleet`."""
    command_line.run(host_command, "fleet host")
