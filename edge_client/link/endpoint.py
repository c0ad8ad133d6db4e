"""How a device reaches its coordinator."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_client.storage.state import default_state, identity_folder, kept_device_id
from fedvit.errors import ConfigError
from fedvit.wire.topics import check_name

if TYPE_CHECKING:
    from edge_client.link.identity import Identity
    from fedvit.transport.address import Address


class Endpoint(NamedTuple):
    """How this device reaches its coordinator."""

    address: "Address"
    federation: str
    device: str | None  # its name, if it is known
    identity: "Identity | None"


def find_endpoint(
    broker: str | None, *, ca_file: Path | None, federation: str | None, device: str | None, state: Path | None
) -> Endpoint:
    """The broker of the device's deployment, unless mqtt://, a user or an authority selects another one.

    Raises ConfigError when name or federation are not those of its certificate.
    """
    from edge_client.link.identity import Identity
    from fedvit.transport.address import Address

    elsewhere = ca_file is not None or (broker is not None and (broker.startswith("mqtt://") or "@" in broker))
    identity = None if elsewhere else Identity.find(identity_folder(state))
    if identity is None:
        address = Address.parse(broker or "localhost", ca_file=ca_file)
        return Endpoint(address, check_name(federation or "home", "federation"), device, None)
    known = identity.membership
    for what, given, joined in (("--id", device, known.device), ("--federation", federation, known.federation)):
        if given not in (None, joined):
            raise ConfigError(
                f"{what} {given!r}: this device has joined as {known.device!r} in {known.federation!r}; "
                "join again with another token, or name a broker by mqtt://"
            )
    return Endpoint(identity.address(broker), known.federation, known.device, identity)


def state_and_name(given: Mapping[str, Any], endpoint: Endpoint) -> tuple[Path | None, str]:
    """The state folder of the device, if it is known, and its name."""
    data: Path | None = given["data"]
    state: Path | None = given["state"] or (default_state(data) if data else None)
    if endpoint.device:
        return state, check_name(endpoint.device, "--id")
    file = state / "device-id" if state else None
    if file and file.is_file():
        return state, kept_device_id(file)
    return state, f"new-{secrets.token_hex(4)}"


def endpoint_of(given: Mapping[str, Any]) -> Endpoint:
    """As `find_endpoint`, from the options of the program."""
    return find_endpoint(**{name: given[name] for name in ("broker", "ca_file", "federation", "device", "state")})
