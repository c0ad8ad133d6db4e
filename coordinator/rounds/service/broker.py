"""The broker of a coordinator and its devices: our own, an existing one, or that of a deployment."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from coordinator.config import BrokerConfig
from coordinator.rounds.status import SEEN_EVERY_S
from coordinator.security.broker import Broker, start_broker
from coordinator.security.expiry import CertificateEnds
from coordinator.security.folder import Deployment
from coordinator.security.service import Service, served
from coordinator.security.signing import GraphSigner
from fedvit.errors import ConfigError, LinkDown
from fedvit.hints import command
from fedvit.transport.address import Address
from profiles.probes.broker import BrokerProbe

REVOKED = "its certificate was revoked"
"""Reason to exclude a device."""
OWN = ("auto", "mosquitto", "embedded")
"""Brokers that we start ourselves."""


class BrokerEndpoint:
    """A reachable broker. `watch` must be called often, from one thread.

    `recorded` is the table [broker] that gives the same broker again, from any folder and environment.
    """

    def __init__(self, address: Address, recorded: BrokerConfig) -> None:
        self.address = address
        self.recorded = recorded
        self.signer: GraphSigner | None = None

    def watch(self) -> None:
        """Restart the broker if necessary, and handle its events."""

    def revoked(self) -> Iterator[str]:
        """Devices that were revoked since the last call."""
        return iter(())

    def revoke(self, device: str, reason: str) -> bool:
        """Revoke a device that harms others; False without certificates."""
        return False

    def all_revoked(self) -> list[str]:
        """Devices that are revoked now."""
        return []

    def read_certificate_ends(self) -> CertificateEnds | None:
        """Return when the certificates of the deployment end; None without one."""
        return None

    def note_seen(self, seen_since: Callable[[float], dict[str, float]], *, at_once: bool = False) -> None:
        """Store when devices were last seen, every SEEN_EVERY_S; see `Presence.seen_since`."""

    def as_record(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self.recorded))


class _Own(BrokerEndpoint):
    def __init__(self, broker: Broker, recorded: BrokerConfig, operator_log: Callable[[str], None]) -> None:
        super().__init__(broker.address, recorded)
        self._broker = broker
        self._operator_log = operator_log

    def watch(self) -> None:
        if done := self._broker.tend():
            self._operator_log(f"broker: {done}")


class _Deployed(BrokerEndpoint):
    def __init__(self, service: Service, recorded: BrokerConfig) -> None:
        super().__init__(service.address, recorded)
        self.signer = service.signer
        self._service = service
        self._noted_at = time.monotonic()

    def watch(self) -> None:
        self._service.watch()

    def revoke(self, device: str, reason: str) -> bool:
        self._service.shut_out(device, reason)
        return True

    def all_revoked(self) -> list[str]:
        return self._service.all_revoked()

    def read_certificate_ends(self) -> CertificateEnds | None:
        return self._service.read_certificate_ends()

    def note_seen(self, seen_since: Callable[[float], dict[str, float]], *, at_once: bool = False) -> None:
        if (now := time.monotonic()) - self._noted_at >= SEEN_EVERY_S or at_once:
            since, self._noted_at = self._noted_at, now
            self._service.note_seen(seen_since(since))

    def revoked(self) -> Iterator[str]:
        queue: SimpleQueue[str] = self._service.revoked
        while True:
            try:
                yield queue.get_nowait()
            except Empty:
                return


@contextmanager
def broker_endpoint(
    settings: BrokerConfig, federation: str, folder: Path, operator_log: Callable[[str], None]
) -> Iterator[BrokerEndpoint]:
    """Provide the broker of `settings` within the block; files of our own broker go into `folder`.

    Raises ConfigError, for example for a busy port, contradictory settings, or a missing deployment.
    """
    recorded = _as_recorded(settings)
    if settings.deployment is not None:
        with _deployed(settings, federation, operator_log) as service:
            kind = service.broker.kind if service.broker else "an external mosquitto"
            operator_log(f"broker: {kind} at {service.address}, only for devices of {settings.deployment}")
            operator_log(
                f"a device joins with `edge-client join TOKEN`, with a token of "
                f"`{command('coordinator', 'enroll', 'NAME', deployment=Path(settings.deployment))}`; "
                f"then start it with `edge-client --data FOLDER`"
            )
            yield _Deployed(service, recorded)
    elif settings.broker in OWN:
        password = recorded.password
        broker = start_broker(settings.broker, folder, settings.listen, settings.port, password)
        try:
            operator_log(f"broker: {broker.kind} at {settings.listen}:{broker.address.port}")
            if password is not None:
                operator_log(
                    "broker: one password for all devices, no encryption; `coordinator init` makes a secured deployment"
                )
            operator_log(f"on each device: {_device_line(settings.listen, broker.address, federation)}")
            yield _Own(broker, msgspec.structs.replace(recorded, port=broker.address.port), operator_log)
        finally:
            broker.stop()
    else:
        address = _address_of(settings)
        operator_log(f"broker: {address.host}:{address.port}")
        operator_log(f"on each device: {_device_line(address.host, address, federation)}")
        yield BrokerEndpoint(address, recorded)


def check_broker(settings: BrokerConfig) -> None:
    """Connect once to a broker that another program runs.

    Raises LinkDown, with the reason, if that fails, and ConfigError if its address or certificates cannot be used.
    """
    if settings.broker in OWN:
        return
    address = _address_of(settings)
    try:
        with BrokerProbe(address, f"coordinator-{secrets.token_hex(4)}", topic=""):
            pass  # it connects
    except LinkDown as error:
        raise LinkDown("FV1208", f"no connection to the broker: {error}") from None


def _address_of(settings: BrokerConfig) -> Address:
    """The address of a broker that another program runs."""
    if settings.deployment is not None:
        given = Address.parse(settings.broker)
        return Deployment.open(Path(settings.deployment)).address_at(given.host, given.port)
    return Address.parse(settings.broker, ca_file=Path(settings.ca_file) if settings.ca_file else None)


def _device_line(listen: str, address: Address, federation: str) -> str:
    """The command for a device, without the password."""
    anywhere = listen in ("0.0.0.0", "::")
    host = socket.gethostname() if anywhere else "localhost" if listen == "127.0.0.1" else listen
    host = f"[{host}]" if ":" in host else host
    user = f"{address.user}:PASSWORD@" if address.user else ""
    scheme = "mqtts://" if address.tls else "mqtt://" if user else ""
    port = "" if address.port == (8883 if address.tls else 1883) else f":{address.port}"
    other = "" if federation == "home" else f" --federation {federation}"
    return f"edge-client --broker {scheme}{user}{host}{port} --data FOLDER{other}"


def _as_recorded(settings: BrokerConfig) -> BrokerConfig:
    """The settings with absolute paths, and with the password of our own broker from the environment."""
    password = settings.password
    if password is None and settings.deployment is None and settings.broker in OWN:
        password = os.environ.get("FEDVIT_BROKER_PASSWORD")
    return msgspec.structs.replace(
        settings, password=password, ca_file=_absolute(settings.ca_file), deployment=_absolute(settings.deployment)
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


@contextmanager
def _deployed(settings: BrokerConfig, federation: str, operator_log: Callable[[str], None]) -> Iterator[Service]:
    """The broker and the enrolment service of a deployment. Raises ConfigError if they do not fit the run."""
    deployment = Deployment.open(Path(settings.deployment or ""))
    deployed = deployment.settings.federation
    if federation != deployed:
        raise ConfigError("FV1214", f"federation = {federation!r}: the deployment is for {deployed!r}")
    if settings.broker == "embedded":
        raise ConfigError("FV1214", "broker = 'embedded' cannot ask for certificates; a deployment needs mosquitto")
    if settings.password is not None or settings.ca_file is not None:
        raise ConfigError(
            "FV1214", "password and ca_file cannot be used with a deployment: it has its own certificates"
        )
    external = None if settings.broker in OWN else _address_of(settings)
    with served(deployment, operator_log, broker=external) as service:
        yield service


def federation_of(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration; a missing federation is taken from the deployment."""
    settings = values.get("broker")
    folder = settings.get("deployment") if isinstance(settings, dict) else None
    if not isinstance(folder, str) or "federation" in values:
        return values
    return {**values, "federation": Deployment.open(Path(folder)).settings.federation}
