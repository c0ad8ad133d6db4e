"""Where a coordinator and its devices meet: a broker of our own, one that is there, or a deployment."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from coordinator.broker import Broker, start_broker
from coordinator.config import BrokerConfig
from coordinator.deployment.folder import Deployment
from coordinator.deployment.service import Service, served
from fedvit.errors import ConfigError
from fedvit.transport.mqtt import Address

OWN = ("auto", "mosquitto", "embedded")
"""Brokers that we start ourselves."""


class MeetingPoint:
    """A broker that can be reached. `watch` must be called often, from one thread.

    `recorded` is the table [broker] with which the same broker is served again, from any folder and environment.
    """

    def __init__(self, address: Address, recorded: BrokerConfig) -> None:
        self.address = address
        self.recorded = recorded

    def watch(self) -> None:
        """See to the broker."""

    def revoked(self) -> Iterator[str]:
        """Devices that were revoked since this was asked last."""
        return iter(())

    def as_record(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self.recorded))


class _Own(MeetingPoint):
    def __init__(self, broker: Broker, recorded: BrokerConfig, say: Callable[[str], None]) -> None:
        super().__init__(broker.address, recorded)
        self._broker = broker
        self._say = say

    def watch(self) -> None:
        if done := self._broker.tend():
            self._say(f"broker: {done}")


class _Deployed(MeetingPoint):
    def __init__(self, service: Service, recorded: BrokerConfig) -> None:
        super().__init__(service.address, recorded)
        self._service = service

    def watch(self) -> None:
        self._service.watch()

    def revoked(self) -> Iterator[str]:
        queue: SimpleQueue[str] = self._service.revoked
        while True:
            try:
                yield queue.get_nowait()
            except Empty:
                return


@contextmanager
def meeting_point(
    settings: BrokerConfig, federation: str, folder: Path, say: Callable[[str], None]
) -> Iterator[MeetingPoint]:
    """Bring up what `settings` ask for, till the end of the block; files of a broker of our own go into `folder`.

    Raises ConfigError when it cannot be: a busy port, settings that do not go together, no such deployment.
    """
    recorded = _as_recorded(settings)
    if settings.deployment is not None:
        with _deployed(settings, federation, say) as service:
            kind = service.broker.kind if service.broker else "one that runs by itself"
            say(f"broker: {kind} at {service.address}, for devices of {settings.deployment} alone")
            say(
                f"a device joins by `edge-client join TOKEN`, with a token of `coordinator enroll NAME --deployment "
                f"{settings.deployment}`; then it is started by `edge-client --data FOLDER`"
            )
            yield _Deployed(service, recorded)
    elif settings.broker in OWN:
        password = recorded.password
        broker = start_broker(settings.broker, folder, settings.listen, settings.port, password)
        try:
            say(f"broker: {broker.kind} at {settings.listen}:{broker.address.port}")
            if password is not None:
                say("broker: one password for all, and nothing is encrypted; `coordinator init` does better")
            say(f"on each device: {_device_line(settings.listen, broker.address, federation)}")
            yield _Own(broker, msgspec.structs.replace(recorded, port=broker.address.port), say)
        finally:
            broker.stop()
    else:
        address = Address.parse(settings.broker, ca_file=Path(settings.ca_file) if settings.ca_file else None)
        say(f"broker: {address.host}:{address.port}")
        say(f"on each device: {_device_line(address.host, address, federation)}")
        yield MeetingPoint(address, recorded)


def _device_line(listen: str, address: Address, federation: str) -> str:
    """What to type on a device; never a password."""
    anywhere = listen in ("0.0.0.0", "::")
    host = socket.gethostname() if anywhere else "localhost" if listen == "127.0.0.1" else listen
    user = f"{address.user}:PASSWORD@" if address.user else ""
    scheme = "mqtts://" if address.tls else "mqtt://" if user else ""
    port = "" if address.port == (8883 if address.tls else 1883) else f":{address.port}"
    other = "" if federation == "home" else f" --federation {federation}"
    return f"edge-client --broker {scheme}{user}{host}{port} --data FOLDER{other}"


def _as_recorded(settings: BrokerConfig) -> BrokerConfig:
    """As it is meant from any folder; the password of a broker of our own may stand in the environment."""
    password = settings.password
    if password is None and settings.deployment is None and settings.broker in OWN:
        password = os.environ.get("FEDVIT_BROKER_PASSWORD")
    return msgspec.structs.replace(
        settings, password=password, ca_file=_absolute(settings.ca_file), deployment=_absolute(settings.deployment)
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


@contextmanager
def _deployed(settings: BrokerConfig, federation: str, say: Callable[[str], None]) -> Iterator[Service]:
    """The broker and the enrolment service of a deployment. Raises ConfigError when they do not go with the run."""
    deployment = Deployment.open(Path(settings.deployment or ""))
    theirs_is = deployment.settings.federation
    if federation != theirs_is:
        raise ConfigError(f"federation = {federation!r}: the deployment is for {theirs_is!r}")
    if settings.broker == "embedded":
        raise ConfigError("broker = 'embedded' cannot ask for certificates; a deployment needs mosquitto")
    if settings.password is not None or settings.ca_file is not None:
        raise ConfigError("password and ca_file do not go with a deployment: it has certificates of its own")
    theirs = None
    if settings.broker not in ("auto", "mosquitto"):
        given = Address.parse(settings.broker)
        theirs = deployment.address_at(given.host, given.port)
    with served(deployment, say, broker=theirs) as service:
        yield service


def federation_of(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a configuration, with the federation that their deployment says, where they say none themselves."""
    settings = values.get("broker")
    folder = settings.get("deployment") if isinstance(settings, dict) else None
    if not isinstance(folder, str) or "federation" in values:
        return values
    return {**values, "federation": Deployment.open(Path(folder)).settings.federation}
