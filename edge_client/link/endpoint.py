"""The broker and the federation of a device, and its name there."""

import secrets
from pathlib import Path
from typing import NamedTuple

from edge_client.link.identity import Identity
from edge_client.settings import DeviceSettings
from edge_client.storage.state import default_state, identity_folder, read_device_id
from fedvit.errors import ConfigError
from fedvit.transport.address import Address
from fedvit.wire.topics import check_name


class Endpoint(NamedTuple):
    """The way from this device to its coordinator."""

    address: Address
    federation: str
    device: str | None  # its name, if it is known
    identity: Identity | None


def find_endpoint(
    broker: str | None, *, ca_file: Path | None, federation: str | None, device: str | None, state: Path | None
) -> Endpoint:
    """Return the broker of the device's deployment, unless mqtt://, a user or an authority selects another one.

    Raises ConfigError when name or federation are not those of its certificate.
    """
    elsewhere = ca_file is not None or (broker is not None and (broker.startswith("mqtt://") or "@" in broker))
    identity = None if elsewhere else Identity.find(identity_folder(state))
    if identity is None:
        address = Address.parse(broker or "localhost", ca_file=ca_file)
        return Endpoint(address, check_name(federation or "home", "federation"), device, None)
    member = identity.membership
    for flag, value, joined in (("--id", device, member.device), ("--federation", federation, member.federation)):
        if value not in (None, joined):
            raise ConfigError(
                "FV1309",
                f"{flag} {value!r}: this device has joined as {member.device!r} in {member.federation!r}; "
                "join again with another token, or name a broker by mqtt://",
            )
    return Endpoint(identity.address(broker), member.federation, member.device, identity)


def endpoint_of(settings: DeviceSettings) -> Endpoint:
    """Return the endpoint that the settings select. Raises ConfigError."""
    return find_endpoint(
        settings.broker,
        ca_file=settings.ca_file,
        federation=settings.federation,
        device=settings.device,
        state=settings.state,
    )


def state_and_name(settings: DeviceSettings, endpoint: Endpoint) -> tuple[Path | None, str]:
    """Return the state folder of the device, if it is known, and its name."""
    state = settings.state or (default_state(settings.data) if settings.data else None)
    if endpoint.device:
        return state, check_name(endpoint.device, "--id")
    file = state / "device-id" if state else None
    if file and file.is_file():
        return state, read_device_id(file)
    return state, f"new-{secrets.token_hex(4)}"
