"""The status file of a service, and what it says about the process that writes it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.record.liveness import STALE_S
from coordinator.rounds.service.status import ServiceStatus, read_service_status, write_service_status


@pytest.mark.parametrize(
    ("age_s", "stale"),
    [
        (0.0, False),
        (STALE_S + 5, True),
        (-STALE_S / 2, False),  # of another host, whose clock differs
        (-STALE_S - 3600, True),  # written before the clock was set back
    ],
)
def test_service_that_writes_no_more_has_ended(tmp_path: Path, age_s: float, stale: bool) -> None:
    at = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(timespec="seconds")
    write_service_status(tmp_path, ServiceStatus(federation="f", broker="b", running=[], members=[], at=at))
    status = read_service_status(tmp_path)
    assert status is not None
    assert status.is_stale() is stale
