"""A new authority of the deployment: a device accepts it only if an authority that it trusts has signed its key.

In a module of its own, since cryptography takes 7 MB: it is imported while a rotation is under way.
"""

from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from fedvit.errors import BadPayload


def find_issuer(certificate: bytes, authorities: Sequence[bytes]) -> bytes | None:
    """Return which of these authorities has signed a certificate, all DER; None if none has."""
    try:
        issued = x509.load_der_x509_certificate(certificate)
        return next((one for one in authorities if _has_signed(x509.load_der_x509_certificate(one), issued)), None)
    except ValueError:
        return None


def check_successor(successor: bytes, endorsement: bytes, trusted: Sequence[bytes]) -> bytes:
    """Check that a trusted authority has signed the key and the name of its successor; return that authority.

    All are certificates, DER. The dates are not checked, since the clock of a device may be wrong. Raises BadPayload.
    """
    try:
        new, signed = x509.load_der_x509_certificate(successor), x509.load_der_x509_certificate(endorsement)
        for certificate in (new, signed):
            _check_is_authority(certificate)
        if not _has_signed(new, new):
            raise ValueError("it has not signed itself")
        if (signed.subject, signed.public_key()) != (new.subject, new.public_key()):
            raise ValueError("the endorsement is for another authority")
    except (ValueError, UnsupportedAlgorithm, x509.ExtensionNotFound) as error:
        raise BadPayload("FV1323", f"the new authority cannot be used: {error}") from error
    signer = find_issuer(endorsement, trusted)
    if signer is None:
        raise BadPayload("FV1323", "the new authority is not signed by the one that this device trusts")
    return signer


def _check_is_authority(certificate: x509.Certificate) -> None:
    """Raise ValueError or ExtensionNotFound for a certificate that may not sign others."""
    extensions, key = certificate.extensions, certificate.public_key()
    may_sign = extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    if not (may_sign and extensions.get_extension_for_class(x509.BasicConstraints).value.ca):
        raise ValueError("it is not the certificate of an authority")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its key is not P-256")


def _has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
