"""A device's signature below what it says of itself, with the key that it joined with."""

import base64
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID
from msgspec import Struct

from edge_client.link.identity import Identity
from fedvit.errors import ConfigError


class Signature(Struct, frozen=True):
    """An ECDSA signature over SHA-256, and the certificate of its key, which the deployment's authority issued."""

    certificate: str  # PEM
    value: str  # base64


def sign(content: bytes, identity: Identity) -> Signature:
    """Sign with the device's key. Raises ConfigError if its files cannot be used."""
    try:
        key = load_pem_private_key(identity.key.read_bytes(), None)
        certificate = identity.certificate.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError("FV1309", f"the identity in {identity.folder} cannot be read ({error}); join again") from None
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # `join` makes no other
    return Signature(certificate, base64.b64encode(key.sign(content, ec.ECDSA(SHA256()))).decode())


def find_signer(content: bytes, signature: Signature, authority: Path | None = None) -> str | None:
    """Return the name of the device that signed; None if the signature is wrong.

    With the certificate of an `authority` (PEM), its certificate must also be issued by that.
    """
    try:
        certificate = x509.load_pem_x509_certificate(signature.certificate.encode())
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return None
        key.verify(base64.b64decode(signature.value, validate=True), content, ec.ECDSA(SHA256()))
        if authority:
            certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except (InvalidSignature, ValueError, TypeError):
        return None
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else None
