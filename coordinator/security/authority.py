"""The deployment's own certificate authority: it decides which devices may use the broker, and under which names.

Keys are P-256. All certificates begin with the authority, whatever the server's clock says: one that was issued while
the clock was ahead would otherwise be refused after its correction. Only the end of a device's certificate follows the
clock.
"""

import datetime as dt
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedvit.errors import BadPayload, ConfigError

DAY_S = 86_400.0
AUTHORITY_DAYS = 3650
DEVICE_DAYS = 90
OWN_DAYS = 1825
"""Validity of a certificate of the broker or of the coordinator. It is renewed after a year, so that a device whose
clock is years ahead still finds the broker's valid."""
AUTHORITY_MARGIN_DAYS = 2
"""An authority begins this long before it is made, so that it is valid for clocks that are a little behind."""
MAX_REQUEST_BYTES = 4096

_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


@dataclass(frozen=True)
class Issued:
    """A certificate and the private key that belongs to it, both PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A self-signed P-256 certificate and its key. Times are seconds since 1970, of this machine."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self._key = key
        self._party = _Party(certificate.subject, key.public_key())

    @classmethod
    def create(cls, name: str, now_s: float) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        own = _Party(_name(name), key.public_key())
        begin, end = now_s - AUTHORITY_MARGIN_DAYS * DAY_S, now_s + AUTHORITY_DAYS * DAY_S
        builder = _builder(own, own, begin, end)
        certificate = _as_authority(builder).sign(key, SHA256())
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate: bytes, key: bytes) -> "Authority":
        """Raise ConfigError if the PEM files were not made by `create`."""
        try:
            private = _load_key(key)
            found = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise ConfigError("FV1310", f"the deployment's authority cannot be read: {error}") from error
        return cls(found, private)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def begin_s(self) -> float:
        """Beginning of the authority, and of all certificates that it issues."""
        return self.certificate.not_valid_before_utc.timestamp()

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the certificate, by which devices and tokens name the authority."""
        return sha256(self.der).digest()

    def server(self, hosts: Sequence[str], now_s: float, key: bytes | None = None) -> Issued:
        """Make the broker's certificate for these names and addresses, and for this key (PEM) or a new one."""
        alternatives = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        return self._issue("broker", now_s, key, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def client(self, name: str, now_s: float, key: bytes | None = None) -> Issued:
        """Make the certificate of the coordinator, which is a client of the broker like any other."""
        return self._issue(name, now_s, key, ExtendedKeyUsageOID.CLIENT_AUTH)

    def own_end_s(self, now_s: float) -> float:
        """Return when a certificate of the broker or the coordinator ends that is issued now."""
        latest_s = self.certificate.not_valid_after_utc.timestamp()
        return min(latest_s, max(now_s, self.begin_s) + OWN_DAYS * DAY_S)

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Tell whether this authority has signed a certificate."""
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    def endorse(self, successor: "Authority") -> bytes:
        """Sign the key of the next authority: a certificate, DER, with its name and key ("newWithOld" of RFC 4210)."""
        new = successor.certificate
        builder = _builder(
            successor._party, self._party,
            new.not_valid_before_utc.timestamp(), new.not_valid_after_utc.timestamp(),
        )  # fmt: skip
        return _as_authority(builder).sign(self._key, SHA256()).public_bytes(Encoding.DER)

    def device(
        self, device: str, request: bytes, now_s: float, days: float = DEVICE_DAYS, *, serial: int | None = None
    ) -> x509.Certificate:
        """A device's certificate for the key in its request; nothing else of the request is used.

        It ends `days` after `now_s`, which must not be before the authority; `serial` repeats an earlier one. Raises
        BadPayload if the request is invalid, not signed by its key, or its key is not P-256.
        """
        key, end = public_key_of(request), now_s + days * DAY_S
        builder = _builder(_Party(_name(device), key), self._party, self.begin_s, end, serial)
        return self._sign(builder, ExtendedKeyUsageOID.CLIENT_AUTH)

    def revocations(self, serials: Iterable[int], number: int, now_s: float) -> bytes:
        """The list of revoked certificates, PEM.

        A broker compares the dates of two lists, in seconds, and uses the newer one: so the date is the begin of the
        authority plus `number` seconds.
        """
        begin = self.certificate.not_valid_before_utc
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(begin + dt.timedelta(seconds=number))
            # brokers refuse all clients if the list has expired
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        for serial in serials:
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_time(now_s)).build()
            builder = builder.add_revoked_certificate(revoked)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def _issue(
        self,
        name: str,
        now_s: float,
        key_pem: bytes | None,
        usage: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1()) if key_pem is None else _load_key(key_pem)
        subject = _Party(_name(name), key.public_key())
        builder = _builder(subject, self._party, self.begin_s, self.own_end_s(now_s))
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return Issued(self._sign(builder, usage).public_bytes(Encoding.PEM), _key_pem(key))

    def _sign(self, builder: x509.CertificateBuilder, usage: x509.ObjectIdentifier) -> x509.Certificate:
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, SHA256())
        )


def public_key_of(request: bytes) -> ec.EllipticCurvePublicKey:
    """The P-256 key that signed a certificate request (PKCS #10, DER). Raises BadPayload."""
    if len(request) > MAX_REQUEST_BYTES:
        raise BadPayload(
            "FV2311", f"a certificate request of {len(request)} bytes, at most {MAX_REQUEST_BYTES} are allowed"
        )
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        signature_valid = parsed.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise BadPayload("FV2311", f"a certificate request cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadPayload("FV2311", "a certificate request must have a P-256 key")
    if not signature_valid:
        raise BadPayload("FV2311", "a certificate request is not signed with its own key")
    return key


class _Party(NamedTuple):
    """A name with its key: the subject of a certificate, or its issuer."""

    name: x509.Name
    key: ec.EllipticCurvePublicKey


def _builder(
    subject: _Party, issuer: _Party, begin_s: float, end_s: float, serial: int | None = None
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject.name)
        .issuer_name(issuer.name)
        .public_key(subject.key)
        .serial_number(serial or x509.random_serial_number())
        .not_valid_before(_time(begin_s))
        .not_valid_after(_time(end_s))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(subject.key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key), critical=False)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in allowed for usage in _USAGES})


def _as_authority(builder: x509.CertificateBuilder) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).add_extension(
        _usage("key_cert_sign", "crl_sign"), critical=True
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Read a P-256 key. Raises ValueError."""
    key = load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("its key is not P-256")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(int(seconds), dt.UTC)
