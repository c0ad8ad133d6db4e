"""Deployments on free ports, and certificates of every kind: enrolled, expired, foreign."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from coordinator.security.authority import Authority
from coordinator.security.broker.mosquitto import find_mosquitto, run_mosquitto
from coordinator.security.broker.process import Broker, claim_port
from coordinator.security.folder import Deployment, Settings
from coordinator.security.registry import Certificate
from coordinator.security.service import Service, served
from fedvit.transport.address import Address


def make_deployment(folder: Path, *, federation: str = "home") -> Deployment:
    """Make a deployment on free ports of this machine."""
    settings = Settings(
        federation=federation,
        listen="127.0.0.1",
        port=claim_port(),
        enrolment_port=claim_port(),
        hosts=("127.0.0.1", "localhost"),
    )
    return Deployment.create(folder, settings)


@contextmanager
def run_broker(deployment: Deployment) -> Iterator[Broker]:
    """Run a deployment's broker, without enrolment."""
    program = find_mosquitto()
    assert program is not None, "the tests need mosquitto"
    log = deployment.run / "mosquitto.log"
    broker = run_mosquitto(program, deployment.configuration, deployment.address, log)
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def serve_deployment(deployment: Deployment, operator_log: Callable[[str], None] = lambda _: None) -> Iterator[Service]:
    """Serve a deployment within the block, as `coordinator start` does."""
    ended = threading.Event()
    with served(deployment, operator_log) as service:

        def watch() -> None:
            while not ended.wait(0.02):
                service.watch()

        thread = threading.Thread(target=watch, name="watch")
        thread.start()
        try:
            yield service
        finally:
            ended.set()
            thread.join()


def make_request(
    key: ec.EllipticCurvePrivateKey | None = None, name: str | None = None
) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Make a P-256 key and its certificate request (DER) for the subject `name`."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)] if name else [])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    return key, request.public_bytes(Encoding.DER)


def change_beginning(authority: Authority, certificate: x509.Certificate, begin_s: float) -> x509.Certificate:
    """Make the same certificate with another beginning, as the authority never issues it."""
    key = load_pem_private_key(authority.key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    builder = x509.CertificateBuilder(
        certificate.issuer,
        certificate.subject,
        certificate.public_key(),
        certificate.serial_number,
        datetime.fromtimestamp(int(begin_s), UTC),
        certificate.not_valid_after_utc,
        list(certificate.extensions),
    )
    return builder.sign(key, SHA256())


def write_identity(
    deployment: Deployment, folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> Address:
    """Write this certificate into `folder`; returns the broker's address with it."""
    folder.mkdir(parents=True, exist_ok=True)
    pem, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    pem.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    address = deployment.address
    authority_file = deployment.folder / "authority.pem"
    return Address(address.host, address.port, tls=True, ca_file=authority_file, cert_file=pem, key_file=key_file)


def make_device(
    deployment: Deployment,
    folder: Path,
    name: str,
    *,
    authority: Authority | None = None,
    issued_s: float | None = None,
    days: float = 90.0,
    begin_s: float | None = None,
    registered: bool = True,
) -> Address:
    """Make the broker's address with a certificate for `name`, by default of the deployment's own authority.

    `issued_s` and `days` set its end, `begin_s` its beginning, by default that of the authority. The deployment's
    registry lists its own certificates, unless they are not `registered`.
    """
    signer = authority or deployment.authority
    issued_s = time.time() if issued_s is None else issued_s
    key, request = make_request()
    certificate = signer.device(name, request, issued_s, days)
    if begin_s is not None:
        certificate = change_beginning(signer, certificate, begin_s)
    if authority is None and registered:
        end = certificate.not_valid_after_utc.timestamp()
        entry = Certificate(f"{certificate.serial_number:x}", issued_s, end)
        with deployment.change() as rows:
            if rows.find_device(name) is None:
                rows.put_device(name, entry, issued_s)
            else:
                rows.add_certificate(name, entry)
    return write_identity(deployment, folder, name, key, certificate)
