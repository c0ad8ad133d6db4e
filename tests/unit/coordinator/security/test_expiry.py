"""Ends of certificates: a device is counted once its certificate should have been renewed long ago, however short it
is valid."""

from pathlib import Path

import pytest

from coordinator.security.authority import DAY_S
from coordinator.security.expiry import read_certificate_ends
from coordinator.security.registry import Certificate, now
from tests.support.deployments import make_deployment


@pytest.mark.parametrize(("valid_days", "left_days", "ending"), [(90, 16, 0), (90, 14, 1), (6, 5, 0), (6, -1, 1)])
def test_devices_that_were_not_renewed_in_time(tmp_path: Path, valid_days: int, left_days: int, ending: int) -> None:
    deployment, now_s = make_deployment(tmp_path / "made"), now()
    end_s = now_s + left_days * DAY_S
    with deployment.registry.change() as rows:
        rows.put_device("pi", Certificate("1", end_s - valid_days * DAY_S, end_s), now_s)
        rows.put_device("new", Certificate("2", now_s, now_s + 90 * DAY_S), now_s)
    ends = read_certificate_ends(deployment)
    assert ends.ending_devices == ending
    assert ends.left_s["device"] == pytest.approx(left_days * DAY_S, abs=60)
