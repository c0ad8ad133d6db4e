"""`fleet host`: virtual devices in one process, for an existing coordinator."""

import logging
import os
import resource
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import click
from paho.mqtt.enums import MQTTProtocolVersion

from edge_client.commands.options import BROKER_VARIABLE
from edge_client.link.identity import Identity
from edge_client.link.session import RETURN_SPREAD_S
from edge_client.storage.state import lock_state
from fedvit import command_line
from fedvit.command_line import Command, log_format_flag
from fedvit.errors import ConfigError
from fedvit.files import make_private, private_files
from fedvit.labels import parse_label
from fedvit.logs import configure_logging
from fedvit.signals import stop_on_signals
from fedvit.tracing import open_tracing
from fedvit.transport.address import Address
from fedvit.transport.base import Transport
from fedvit.transport.mqtt import MqttTransport
from fedvit.transport.mqtt_loop import MqttLoop
from fedvit.wire.topics import check_name
from fleet.devices import virtual_devices
from fleet.identities import find_identities, join_devices, make_tokens, read_tokens
from fleet.virtual import Host, HostSettings, share
from profiles.probes.host import usable_cores

log = logging.getLogger(__name__)


class HostFlags(NamedTuple):
    """The command's flags, without those that select the devices."""

    broker: str | None
    ca_file: Path | None
    federation: str | None
    deployment: Path | None
    tokens: Path | None
    labels: tuple[str, ...]
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
    examples=[
        "fleet host --broker SERVER --parts parts --devices 500 --state state",
        "fleet host --deployment deployment --parts parts --devices 200 --state state --label site=berlin,munich",
    ],
)
@click.option(
    "--broker",
    envvar=BROKER_VARIABLE,
    metavar="HOST[:PORT]",
    help=f"MQTT broker, as for `edge-client`. Or set {BROKER_VARIABLE}, which nobody else on this machine can read. By "
    "default the broker of the joined deployment, else localhost.",
)
@click.option("--ca-file", type=click.Path(path_type=Path), help="Certificate authority of an mqtts:// broker.")
@click.option("--federation", help="Name of the federation; by default that of the deployment, else home.")
@click.option(
    "--deployment",
    type=click.Path(path_type=Path),
    help="Folder of a deployment that is being served on this machine: devices that have not joined get a token, and "
    "join.",
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path),
    help="File with tokens of `coordinator enroll device --count 200 --no-wait`, with which the devices join.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE[,VALUE]...",
    help="Label of the devices; several values are given to them in turn. Repeatable.",
)
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
    everyone = virtual_devices(own.parts, devices)
    folders = share(everyone, number, hosts)
    labels = share(assign_labels(own.labels, list(everyone)), number, hosts)
    home = own.state / f"host-{number}"
    lock = lock_state(home)
    make_private([home, *(own.state / name for name in folders)])
    _allow_sockets(len(folders))
    identities = _find_identities(own, folders)
    plain = None if identities else Address.parse(own.broker or "localhost", ca_file=own.ca_file)
    loop = MqttLoop()

    def connect(name: str, inbox: SimpleQueue[object]) -> Transport:
        client = f"{name}-{secrets.token_hex(4)}"
        address = plain or identities[name].address(own.broker)
        versions = (MQTTProtocolVersion.MQTTv311,)
        return MqttTransport(inbox, address, client, versions=versions, return_spread_s=RETURN_SPREAD_S, loop=loop)

    settings = HostSettings(
        federation=_find_federation(own.federation, identities),
        state=own.state,
        blobs=home / "blobs",
        threads=own.threads,
        at_once=own.at_once or max(1, usable_cores() // (own.threads * hosts)),
        software=version("fedvit"),
        watches=True,
        identities=identities,
        labels=labels,
    )
    tracing = open_tracing("fedvit-device")
    host = Host(folders, connect, settings, tracing=tracing)
    stop = stop_on_signals()
    log.info("devices ready", extra={"count": len(folders)})
    try:
        host.serve(stop, once=own.once)
    finally:
        loop.close()
        if tracing:
            tracing.close()
    log.info("devices left", extra={"count": len(folders)})
    os.close(lock)


def _find_identities(own: HostFlags, devices: Collection[str]) -> dict[str, Identity]:
    """Return the identities of the devices, which join if they have not; none without a deployment.

    Raises ConfigError, and what `join` raises.
    """
    if own.deployment and own.tokens:
        raise click.UsageError("--deployment and --tokens exclude each other")
    if own.deployment:
        tokens = make_tokens(own.deployment, own.state, devices)
    elif own.tokens:
        tokens = read_tokens(own.tokens)
    elif _is_elsewhere(own) or not find_identities(own.state, devices):
        return {}
    else:
        tokens = {}  # a later start of devices that have joined
    log.info("devices join", extra={"count": len(devices)})
    return join_devices(own.state, devices, tokens, own.broker)


def _is_elsewhere(own: HostFlags) -> bool:
    """Tell whether the flags name another broker than that of a deployment, as for `edge-client`."""
    broker = own.broker or ""
    return own.ca_file is not None or broker.startswith("mqtt://") or "@" in broker


def _find_federation(given: str | None, identities: Mapping[str, Identity]) -> str:
    """Raise ConfigError if the devices belong to another federation."""
    joined = {identity.membership.federation for identity in identities.values()}
    for federation in joined:
        if given not in (None, federation) or len(joined) > 1:
            raise ConfigError("FV1309", f"--federation {given!r}: devices have joined {', '.join(sorted(joined))}")
    return check_name(given or next(iter(joined), "home"), "federation")


def assign_labels(texts: Iterable[str], devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Give labels KEY=VALUE,VALUE,... to devices, the values in turn. Raises ConfigError.

    >>> assign_labels(["site=a,b"], ["device-0", "device-1", "device-2"])
    {'device-0': {'site': 'a'}, 'device-1': {'site': 'b'}, 'device-2': {'site': 'a'}}
    """
    labels = {device: dict[str, str]() for device in devices}
    for text in texts:
        key, _, values = text.partition("=")
        read = [parse_label(f"{key}={value}") for value in values.split(",")]
        for number, device in enumerate(devices):
            name, value = read[number % len(read)]
            labels[device][name] = value
    return labels


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
