"""Brokers that the coordinator starts itself: mosquitto if it is installed, else amqtt."""

import os
import sys
from pathlib import Path

from coordinator.security.broker.mosquitto import find_mosquitto, start_mosquitto
from coordinator.security.broker.process import FLEET_USER, Broker, BrokerProgram, claim_port
from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import name_failure
from fedvit.hosts import is_loopback
from fedvit.transport.address import Address

__all__ = ["FLEET_USER", "Broker", "start_broker"]

PASSWORD_VARIABLE = "FEDVIT_EMBEDDED_PASSWORD"
EMBEDDED = "coordinator.security.broker.embedded"
"""Module of the embedded broker's process."""


def start_broker(
    choice: str, folder: Path, listen: str = "127.0.0.1", port: int = 1883, password: str | None = None
) -> Broker:
    """Start a broker and wait until it accepts connections; its files and its log go into `folder`.

    `choice` is auto, mosquitto or embedded; port 0 takes a free one. With a password, clients log in as
    user `fedvit`. Raises ConfigError if the choice, the address, the port or the password cannot be used.
    """
    if choice not in ("auto", "mosquitto", "embedded"):
        raise ConfigError("FV1204", f"broker {choice!r} is unknown; expected auto, mosquitto or embedded")
    if password is None and not is_loopback(listen):
        raise ConfigError(
            "FV1205",
            f"a broker on {listen} can be reached from other machines and needs a password; "
            "set one, or listen on 127.0.0.1",
        )
    if password is not None and not password:
        raise ConfigError("FV1205", "the password of the broker is empty")
    program = None if choice == "embedded" else find_mosquitto()
    if program is None and choice == "mosquitto":
        raise ConfigError(
            "FV1202", "mosquitto was not found on this machine; install it, or choose the embedded broker"
        )
    with name_failure(f"cannot make folder {folder}", StorageFailed, "FV1701"):
        folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    user = FLEET_USER if password is not None else None
    address = Address(_reachable(listen), claim_port(listen, port), user, password)
    if program is not None:
        return start_mosquitto(program, folder, listen, address)
    return Broker(
        "embedded amqtt",
        address,
        BrokerProgram(
            [
                sys.executable,
                "-P",
                "-m",
                EMBEDDED,
                "--listen",
                listen,
                "--port",
                str(address.port),
            ],
            {**os.environ, PASSWORD_VARIABLE: password or ""},
            folder / "amqtt.log",
        ),
    )


def _reachable(listen: str) -> str:
    """The address that clients on this machine connect to, also where the broker listens on all addresses."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)
