"""The ends of the certificates of a deployment, for metrics."""

from typing import NamedTuple

from coordinator.security.authority import DAY_S
from coordinator.security.folder import Deployment
from coordinator.security.own_certificates import BROKER, COORDINATOR_FILES, read_end_s
from coordinator.security.registry import now

SOON_S = 14 * DAY_S
"""A device renews its certificate 30 days before the end, so that one with 14 days left was away for weeks."""


class CertificateEnds(NamedTuple):
    """Seconds until certificates end, negative afterwards. Revoked devices are left out."""

    left_s: dict[str, float]  # authority, broker, coordinator, and device: the soonest of all
    ending_devices: int  # devices whose certificate ends within SOON_S, or has ended


def read_certificate_ends(deployment: Deployment) -> CertificateEnds:
    """Raise ConfigError, Damaged or StorageFailed if the registry cannot be read."""
    now_s, folder = now(), deployment.folder
    files = {"authority": "authority", "broker": BROKER, "coordinator": COORDINATOR_FILES}
    found = {name: read_end_s(folder / f"{file}.pem") for name, file in files.items()}
    with deployment.registry.read() as rows:
        devices = [device.expires_at - now_s for device in rows.read_devices() if device.revoked_at is None]
    left_s = {name: end_s - now_s for name, end_s in found.items() if end_s is not None}
    if devices:
        left_s["device"] = min(devices)
    return CertificateEnds(left_s, sum(left <= SOON_S for left in devices))
