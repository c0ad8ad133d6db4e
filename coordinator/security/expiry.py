"""The ends of the certificates of a deployment, for metrics."""

from typing import NamedTuple

from coordinator.security.folder import Deployment
from coordinator.security.own_certificates import BROKER, COORDINATOR_FILES, read_end_s
from coordinator.security.registry import JoinedDevice, now

ENDING_SHARE = 1 / 6
"""A certificate with a smaller share of its validity left should have been renewed; devices renew below a third."""


class CertificateEnds(NamedTuple):
    """Seconds until certificates end, negative afterwards. Revoked devices are left out."""

    left_s: dict[str, float]  # authority, broker, coordinator, and device: the soonest of all
    ending_devices: int  # devices whose certificate has ended, or was not renewed in time


def read_certificate_ends(deployment: Deployment) -> CertificateEnds:
    """Raise ConfigError, Damaged or StorageFailed if the registry cannot be read."""
    now_s, folder = now(), deployment.folder
    files = {"authority": "authority", "broker": BROKER, "coordinator": COORDINATOR_FILES}
    found = {name: read_end_s(folder / f"{file}.pem") for name, file in files.items()}
    with deployment.registry.read() as rows:
        devices = [device for device in rows.read_devices() if device.revoked_at is None]
    left_s = {name: end_s - now_s for name, end_s in found.items() if end_s is not None}
    if devices:
        left_s["device"] = min(device.expires_at for device in devices) - now_s
    return CertificateEnds(left_s, sum(is_ending(device, now_s) for device in devices))


def is_ending(device: JoinedDevice, now_s: float) -> bool:
    """Return whether a device's newest certificate should have been renewed long ago."""
    newest = max(device.certificates, key=lambda certificate: certificate.expires_at, default=None)
    return newest is not None and newest.expires_at - now_s < ENDING_SHARE * (newest.expires_at - newest.issued_at)
