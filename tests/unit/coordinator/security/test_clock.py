"""The server's clock against the reference date of a real registry, which the tests move instead of the clock."""

import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.security import clock
from coordinator.security.authority import DAY_S, Authority
from coordinator.security.clock import ServerClock, confirm_clock, find_doubt
from coordinator.security.folder import Deployment
from fedvit.errors import ConfigError
from tests.support.deployments import make_deployment

HOUR_S = 3600.0
MINUTE_S = 60.0


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return make_deployment(tmp_path / "deployment")


def reference(deployment: Deployment) -> float:
    with deployment.registry.read() as rows:
        return rows.clock_s()


def move_reference(deployment: Deployment, by_s: float) -> None:
    with deployment.registry.change() as rows:
        rows.set_clock(time.time() + by_s)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_difference_of_a_day_is_plausible_in_both_directions(deployment: Deployment, sign: float) -> None:
    move_reference(deployment, sign * 23 * HOUR_S)
    assert ServerClock(deployment).check() is None
    move_reference(deployment, sign * 25 * HOUR_S)
    doubt = ServerClock(deployment).check()
    assert doubt is not None
    assert doubt.endswith("--confirm-clock")


def test_the_reference_follows_a_plausible_clock(deployment: Deployment) -> None:
    """A service that runs for months never asks for a confirmation."""
    move_reference(deployment, -20 * HOUR_S)
    server = ServerClock(deployment)
    assert server.check() is None
    assert reference(deployment) == pytest.approx(time.time(), abs=MINUTE_S)
    before = reference(deployment)
    assert server.check() is None
    assert reference(deployment) == before, "it is written every ten minutes only"


@pytest.mark.parametrize("by_s", [-65 * DAY_S, 700 * DAY_S])
def test_the_reference_does_not_follow_a_wrong_clock(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """It advances by the time that passes, and the clock is believed again when it is right."""
    monkeypatch.setattr(clock, "NOTE_EVERY_S", 0.0)
    server = ServerClock(deployment)
    assert server.check() is None
    move_reference(deployment, by_s)
    assert server.check() is not None
    written = reference(deployment)
    assert server.check() is not None
    assert written < reference(deployment) < written + HOUR_S
    move_reference(deployment, 0.0)  # instead of the clock, which is set right
    assert server.check() is None


def test_the_printed_command_confirms_the_clock(deployment: Deployment) -> None:
    move_reference(deployment, -65 * DAY_S)
    server = ServerClock(deployment)
    doubt = server.check()
    assert doubt is not None
    _, _, command = doubt.rpartition(": ")
    program, *arguments = shlex.split(command)
    assert program == "coordinator"
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert server.check() is None, "without a restart"


def test_a_clock_before_the_deployment_cannot_be_confirmed(deployment: Deployment) -> None:
    later = Authority.create("later", time.time() + 10 * DAY_S)
    deployment.authority_file.write_bytes(later.pem)
    (deployment.folder / "authority.key").write_bytes(later.key_pem)
    doubt = find_doubt(deployment, time.time() + 10 * DAY_S)
    assert doubt is not None
    assert doubt.endswith("set the clock")
    before = reference(deployment)
    with pytest.raises(ConfigError):
        confirm_clock(deployment)
    assert reference(deployment) == before
