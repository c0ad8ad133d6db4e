"""The release of a device from quarantine."""

from coordinator.record.record import Record
from fedvit.errors import ConfigError


def release(store: Record, run: str, device: str) -> None:
    """End a device's quarantines and reset its strikes. Raises ConfigError if it has neither."""
    with store.database.together():
        if not store.strikes.release(run, device):
            raise ConfigError("FV1622", f"device {device!r} has neither strikes nor a quarantine in run {run!r}")
        store.audit.add("release", device, f"run {run}")
