"""A real mosquitto with settings that a fleet may meet: limits, passwords, TLS, access rules."""

import secrets
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from coordinator.rounds.service.router import Router
from coordinator.security.broker.mosquitto import configuration, find_mosquitto, password_line
from coordinator.security.broker.process import FLEET_USER, Broker, BrokerProgram, claim_port
from fedvit.transport.address import Address
from fedvit.transport.mqtt import MqttTransport


@contextmanager
def mosquitto(folder: Path, *lines: str, password: str | None = None, tls: bool = False) -> Iterator[Broker]:
    """As the coordinator configures it, with `lines` added; `address` is that of a device that knows everything."""
    program = find_mosquitto()
    assert program is not None, "the tests need mosquitto"
    folder.mkdir(parents=True, exist_ok=True)
    port = claim_port()
    user = FLEET_USER if password else None
    address = Address("localhost", port, user, password, tls, folder / "cert.pem" if tls else None)
    (folder / "passwords").write_text(password_line(FLEET_USER, password) + "\n" if password else "")
    (folder / "passwords").chmod(0o600)
    given = {line.split()[0] for line in lines}
    base = configuration("127.0.0.1", address, folder / "passwords").splitlines()
    text = [line for line in base if line.split()[0] not in given] + list(lines)
    if tls:
        certificate, key = make_certificate(folder)
        text += [f"certfile {certificate}", f"keyfile {key}"]
    (folder / "mosquitto.conf").write_text("\n".join(text) + "\n")
    command = [str(program), "-c", str(folder / "mosquitto.conf")]
    broker = Broker("mosquitto", address, BrokerProgram(command, {}, folder / "log"))
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def served(address: Address, federation: str = "home") -> Iterator[list[str]]:
    """A service without runs at that broker; the block gets what it says to its operator."""
    said: list[str] = []
    link = MqttTransport(SimpleQueue(), address, f"coordinator-{secrets.token_hex(4)}")
    router = Router(link, federation, has_ended=lambda run: False, operator_log=said.append)
    router.open()
    while not router.connected:
        router.pump(0.05)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            router.pump(0.05)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield said
    finally:
        stop.set()
        serving.join()
        router.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost; return it and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key
