"""The status of a service, in a small file beside its runs: for `coordinator status` and `submit`."""

import contextlib
import socket
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from coordinator.record.liveness import is_stale

FILE = "service.json"


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A device that has sent a hello since the service began."""

    device: str
    labels: dict[str, str]
    online: bool
    run: str | None  # its current run


class ServiceStatus(Struct, frozen=True, kw_only=True):
    """The status of a service at a time."""

    federation: str
    broker: str
    running: list[str]
    members: list[MemberStatus]
    at: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))  # ISO 8601, UTC
    host: str = msgspec.field(default_factory=socket.gethostname)
    term: int = 0  # in which it leads; 0: it need not lead
    connected: bool = True  # to the broker
    backup: str | None = None  # folder of its backups; None: it makes none

    def is_stale(self) -> bool:
        """Return whether the service has ended, or hangs."""
        return is_stale(self.at)


def write_service_status(out: Path, status: ServiceStatus) -> None:
    """Write the status beside the runs of a folder; an error is ignored, since runs do not depend on the file."""
    fresh = out / f"{FILE}.new"
    with contextlib.suppress(OSError):
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
        fresh.replace(out / FILE)


def read_service_status(out: Path) -> ServiceStatus | None:
    """None if there is no readable status file."""
    try:
        status = msgspec.json.decode((out / FILE).read_bytes(), type=ServiceStatus)
        datetime.fromisoformat(status.at)
    except (OSError, ValueError):
        return None
    return status


def labels_seen(status: ServiceStatus) -> list[str]:
    """Every label, and how many devices have it."""
    counted: dict[str, int] = {}
    for member in status.members:
        for name, value in member.labels.items():
            counted[f"{name}={value}"] = counted.get(f"{name}={value}", 0) + 1
    return [f"{label} ({count} device{'s' if count > 1 else ''})" for label, count in sorted(counted.items())]
