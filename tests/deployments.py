"""A deployment with its own mosquitto for tests, and devices of every kind: joined, expired, revoked, foreign."""

import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.broker.mosquitto import find_mosquitto, run_mosquitto
from coordinator.broker.process import Broker, claim_port
from coordinator.deployment.authority import Authority
from coordinator.deployment.folder import Deployment, Settings
from coordinator.deployment.registry import Certificate, Device
from fedvit.transport.mqtt import Address

WAIT_S = 30.0


def make_deployment(folder: Path, *, federation: str = "home") -> Deployment:
    """On free ports of this machine."""
    settings = Settings(
        federation=federation,
        listen="127.0.0.1",
        port=claim_port("127.0.0.1", 0),
        enrolment_port=claim_port("127.0.0.1", 0),
        hosts=("127.0.0.1", "localhost"),
    )
    return Deployment.create(folder, settings)


@contextmanager
def running(deployment: Deployment) -> Iterator[Broker]:
    """Its broker alone, without an enrolment desk."""
    program = find_mosquitto()
    assert program is not None, "the tests need mosquitto"
    log = deployment.run / "mosquitto.log"
    broker = run_mosquitto(program, deployment.configuration, deployment.address, log)
    try:
        yield broker
    finally:
        broker.stop()


def make_request(key: ec.EllipticCurvePrivateKey | None = None) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A P-256 key and its certificate request, DER."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    return key, request.public_bytes(Encoding.DER)


def device_address(
    deployment: Deployment,
    folder: Path,
    name: str,
    *,
    authority: Authority | None = None,
    issued_s: float | None = None,
    days: float = 90.0,
) -> Address:
    """A device's way to the broker, with a certificate for `name`; by default of the deployment's own authority.

    With `issued_s` and `days` it is of another time. The registry knows it.
    """
    signer = authority or deployment.authority
    begin = time.time() if issued_s is None else issued_s
    key, request = make_request()
    certificate = signer.device(name, request, begin, days)
    if authority is None:
        with deployment.change() as registry:
            end = certificate.not_valid_after_utc.timestamp()
            entry = Certificate(f"{certificate.serial_number:x}", begin, end)
            registry.devices.setdefault(name, Device(name, begin, [])).certificates.append(entry)
    folder.mkdir(parents=True, exist_ok=True)
    pem, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    port = deployment.settings.port
    authority_file = deployment.folder / "authority.pem"
    return Address("127.0.0.1", port, tls=True, ca_file=authority_file, cert_file=pem, key_file=key_file)


class Client:
    """A plain client of the client library, that knows nothing of fedvit."""

    def __init__(self, address: Address, client_id: str, filters: Sequence[str] = ()) -> None:
        self.seen: list[tuple[str, bytes]] = []
        self.outcome: list[str] = []
        self._subscribed = 0
        self._client = paho.Client(CallbackAPIVersion.VERSION2, client_id, reconnect_on_failure=False)
        self._client.on_connect = lambda *given: self.outcome.append(str(given[3]))
        self._client.on_disconnect = lambda *given: self.outcome.append(f"disconnected: {given[3]}")
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = lambda _client, _data, message: self.seen.append((message.topic, message.payload))
        if address.user is not None:
            self._client.username_pw_set(address.user, address.password)
        if address.tls:
            self._client.tls_set_context(context_of(address))
        try:
            self._client.connect(address.host, address.port)
        except OSError as error:
            self.outcome.append(f"failed: {error}")
            return
        self._client.loop_start()
        wait_for(lambda: self.outcome, "an answer of the broker")
        if self.connected and filters:
            self.granted: list[Any] = []
            self._client.subscribe([(name, 1) for name in filters])
            wait_for(lambda: self._subscribed, "the subscriptions")

    def _on_subscribe(self, _client: Any, _data: Any, _id: int, reasons: list[Any], _more: Any) -> None:
        self.granted = [str(reason) for reason in reasons]
        self._subscribed += 1

    @property
    def connected(self) -> bool:
        return self.outcome[-1:] == ["Success"]

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Returns when the broker has it."""
        self._client.publish(topic, payload, qos, retain).wait_for_publish(WAIT_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def context_of(address: Address) -> ssl.SSLContext:
    """As any client would set it up."""
    context = ssl.create_default_context(cafile=address.ca_file)
    if address.ca_file is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if address.cert_file is not None:
        context.load_cert_chain(address.cert_file, address.key_file)
    return context


def wait_for(holds: Any, what: str) -> Any:
    until = time.monotonic() + WAIT_S
    while not (value := holds()):
        assert time.monotonic() < until, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.01)
    return value
