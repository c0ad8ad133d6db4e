"""Signatures of a device's keys by the key of its certificate, which the deployment's authority has issued."""

import hashlib
from contextlib import suppress

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedvit.errors import BadPayload, ConfigError
from fedvit.wire.topics import is_name


class Credentials:
    """The certificate of a device, its key, and the authorities that it trusts (two during a rotation; that of
    the certificate counts). Raises ConfigError for unreadable PEM."""

    def __init__(self, certificate: bytes, key: bytes, authority: bytes) -> None:
        try:
            own = x509.load_pem_x509_certificate(certificate)
            self._authority = _find_issuer(own, x509.load_pem_x509_certificates(authority))
            self.certificate = own.public_bytes(Encoding.DER)
            private = load_pem_private_key(key, password=None)
        except ValueError as error:
            raise ConfigError("FV1309", f"the device's certificate or key cannot be read: {error}") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise ConfigError("FV1309", "the device's key is not P-256")
        self._key = private
        self.authority_digest = hashlib.sha256(self._authority.public_bytes(Encoding.DER)).digest()

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(content, ec.ECDSA(SHA256()))

    def check_peer(self, device: str, certificate: bytes, content: bytes, signature: bytes) -> bytes:
        """Check that a device of this deployment has signed; return its public key, DER.

        The certificate's dates are not checked, since the clock of a device may be wrong. Raises BadPayload.
        """
        return check_signature(device, certificate, content, signature, self._authority)


def check_signature(
    device: str, certificate: bytes, content: bytes, signature: bytes, authority: x509.Certificate | None = None
) -> bytes:
    """Check that a device has signed with the key of its certificate, which `authority` has issued; None: not checked.

    Returns its public key, DER. Raises BadPayload.
    """
    try:
        peer = x509.load_der_x509_certificate(certificate)
        if authority is not None:
            peer.verify_directly_issued_by(authority)
        names = [name.value for name in peer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key = peer.public_key()
        usage = peer.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if ExtendedKeyUsageOID.CLIENT_AUTH not in usage or not is_name(device):
            raise ValueError("it is not the certificate of a device")
        if names != [device] or not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"it is the certificate of {names}")
        key.verify(signature, content, ec.ECDSA(SHA256()))
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        why = str(error) or "wrong signature"
        raise BadPayload("FV2312", f"{device} has not signed as a device of this deployment: {why}") from None
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def _find_issuer(certificate: x509.Certificate, authorities: list[x509.Certificate]) -> x509.Certificate:
    """Return the authority that has issued a certificate, or the first one."""
    for authority in authorities[1:]:
        with suppress(ValueError, TypeError, InvalidSignature):
            certificate.verify_directly_issued_by(authority)
            return authority
    return authorities[0]
