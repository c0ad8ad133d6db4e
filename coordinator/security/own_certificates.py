"""The certificates of the broker and of the coordinator, in the folder of a deployment.

A renewed certificate is for the same key, so that one rename replaces it. Only another authority brings new keys: a
process that is killed between the two files leaves a pair that does not match, and the next call replaces it.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.security.authority import DAY_S, Authority
from fedvit.files import atomic_write

BROKER, COORDINATOR_FILES = "server", "coordinator"
RENEW_AFTER_S = 365 * DAY_S


def renew_own(
    folder: Path, authority: Authority, coordinator: str, hosts: Sequence[str], now_s: float, *, early: bool = False
) -> list[str]:
    """Renew the certificates that are due or not of `authority`, or both if `early`; return their files' names.

    `coordinator` is the name in the certificate of the coordinator, `hosts` are those in the broker's.
    """
    renewed = []
    for name in (BROKER, COORDINATOR_FILES):
        certificate_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
        current = _read_certificate(certificate_file, key_file)
        is_ours = current is not None and authority.has_issued(current)
        if current is not None and is_ours and not (early or _is_due(current, authority, now_s)):
            continue
        key = key_file.read_bytes() if is_ours else None
        issued = authority.server(hosts, now_s, key) if name == BROKER else authority.client(coordinator, now_s, key)
        if not is_ours:
            atomic_write(key_file, issued.key, private=True)
        atomic_write(certificate_file, issued.certificate)
        renewed.append(certificate_file.name)
    return renewed


def read_end_s(file: Path) -> float | None:
    """Return when the first certificate in a PEM file ends, in seconds since 1970; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.timestamp()
    return None


def _read_certificate(certificate_file: Path, key_file: Path) -> x509.Certificate | None:
    """Read a certificate; None if it cannot be used with its key."""
    with contextlib.suppress(OSError, ValueError):
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        if certificate.public_key() == load_pem_private_key(key_file.read_bytes(), password=None).public_key():
            return certificate
    return None


def _is_due(certificate: x509.Certificate, authority: Authority, now_s: float) -> bool:
    """Tell whether a new certificate would be valid for a year longer, or longer at all in the last year."""
    end_s = certificate.not_valid_after_utc.timestamp()
    gain_s = authority.own_end_s(now_s) - end_s
    return gain_s >= RENEW_AFTER_S or (gain_s >= DAY_S and end_s - now_s < RENEW_AFTER_S)
