"""Devices that follow a rotation of the authority as `edge-client` does, in threads of a test."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.security.folder import Deployment, make_token
from edge_client.link.identity import Identity, Renewal
from edge_client.link.join import join
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.topics import Topics

HOME = Topics("home")


def join_device(deployment: Deployment, folder: Path, name: str) -> Identity:
    """Let a device join a deployment that is being served."""
    joined = join(make_token(deployment, name, 60.0), folder / name / "identity")
    assert joined.trouble is None
    return joined.identity


@contextlib.contextmanager
def run_device(identity: Identity) -> Iterator[MqttTransport]:
    """Keep a device connected within the block, and renew its certificate."""
    inbox: SimpleQueue[object] = SimpleQueue()
    renewal, ended = Renewal(identity, HOME), threading.Event()
    transport = MqttTransport(inbox, identity.address(), client_id=f"{identity.membership.device}-test")
    transport.subscribe(renewal.answers, 1)

    def follow() -> None:
        connected = False
        while not ended.is_set():
            with contextlib.suppress(queue.Empty):
                match inbox.get(timeout=0.05):
                    case Connected(certificate=certificate):
                        connected = True
                        renewal.note_connected(transport, certificate)
                    case Received(payload=payload):
                        renewal.on_answer(payload)
            if connected:
                renewal.tick(transport)

    thread = threading.Thread(target=follow, name=identity.membership.device)
    transport.open()
    thread.start()
    try:
        yield transport
    finally:
        ended.set()
        thread.join()
        transport.close()


def list_trusted(identity: Identity) -> list[str]:
    """Return the digests of the authorities that a device trusts, hexadecimal, that of its certificate first."""
    return [digest.hex() for digest in identity.list_digests()]


def check_files(deployment: Deployment) -> None:
    """Check that keys and certificates of a deployment belong together, and that each authority has its list."""
    folder, trusted = deployment.folder, x509.load_pem_x509_certificates(deployment.authority_file.read_bytes())
    for name in ("authority", "server", "coordinator"):
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        certificate.verify_directly_issued_by(deployment.authority.certificate)
        key = load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        assert certificate.public_key() == key.public_key()
    footer = b"-----END X509 CRL-----\n"
    pieces = (folder / "revoked.pem").read_bytes().split(footer)[:-1]
    lists = [x509.load_pem_x509_crl(piece + footer) for piece in pieces]
    assert {one.subject for one in trusted} <= {one.issuer for one in lists}
