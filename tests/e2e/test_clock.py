"""A server's clock that jumps, with the fleet that is connected to it: real processes, real certificates."""

import json
import signal
import subprocess
import time
from datetime import datetime
from typing import Any

import pytest

from coordinator.security.broker.process import claim_port
from tests.support.programs import Stage, program, said, wait_for
from tests.support.shifted_clock import ShiftedClock

pytestmark = pytest.mark.slow

DAY_S = 86_400.0
AHEAD_S, BEHIND_S = 65 * DAY_S, -730 * DAY_S
"""By 65 days ahead every certificate of 90 days is due for renewal."""
DEVICES = ("device-0", "device-1")


class Fleet:
    """A deployment, its service, and devices that stay."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._clock = ShiftedClock(stage.folder)
        self._service: subprocess.Popen[bytes] | None = None
        self.folder = str(stage.folder / "deployment")
        ports = [str(claim_port()) for _ in range(2)]
        said(
            stage, "coordinator.cli", "init", self.folder, "--listen", "127.0.0.1", "--host", "localhost",
            "--port", ports[0], "--enrolment-port", ports[1],
        )  # fmt: skip

    def join(self) -> None:
        for name in DEVICES:
            token = said(self._stage, "coordinator.cli", "enroll", name, "--deployment", self.folder, "--no-wait")
            said(self._stage, "edge_client.cli", "join", token.split()[-1], "--state", self.state(name))
            command = [*program("edge_client.cli"), "--data", str(self._stage.parts / name), "--threads", "1"]
            self._stage.start(name, [*command, "--state", self.state(name)])

    def state(self, name: str) -> str:
        return str(self._stage.folder / "state" / name)

    def serve(self, shift_s: float = 0.0) -> None:
        """Restart the service, and with it the broker, under another date."""
        if self._service is not None:
            self._service.send_signal(signal.SIGTERM)
            assert self._stage.finish(self._service, "service") == 130, self._stage.log("service")
        given = ["serve", "--runs", str(self._stage.out), "--broker.deployment", self.folder]
        self._shift_s, self._served_at_s = shift_s, time.time() + shift_s
        environment = self._clock.environment(shift_s) if shift_s else {}
        self._service = self._stage.start("service", [*program("coordinator.cli"), *given], environment)

    def command(self, *arguments: str) -> Any:
        """JSON of a command of the coordinator at the server, with its date."""
        done = subprocess.run(
            [*program("coordinator.cli"), *arguments, "--deployment", self.folder, "--json"],
            env={**self._stage.environment, **self._clock.environment(self._shift_s)},
            capture_output=True,
            check=True,
        )
        return json.loads(done.stdout)

    def wait_until_connected(self) -> None:
        """Wait until each device has connected to this service."""

        def last_seen() -> list[float]:
            return [datetime.fromisoformat(entry["last_seen"]).timestamp() for entry in self.command("devices")]

        # dates are listed in whole seconds
        wait_for(lambda: all(seen_s > self._served_at_s - 1 for seen_s in last_seen()), "every device to connect")

    def wait_for_words(self, words: str, log: str = "service", count: int = 1) -> None:
        wait_for(lambda: self._stage.log(log).count(words) >= count, f"{count} times {words!r} in {log}")


def test_a_server_clock_that_jumps_locks_nobody_out(stage: Stage) -> None:
    """Two months ahead, unconfirmed and then confirmed by mistake; right; two years behind; right. All devices connect
    again without anybody's help, and train."""
    fleet = Fleet(stage)
    fleet.serve()
    fleet.wait_for_words("broker: mosquitto")
    fleet.join()
    for name in DEVICES:
        fleet.wait_for_words(" joined ", log=name)

    fleet.serve(AHEAD_S)
    fleet.wait_until_connected()
    fleet.wait_for_words("65 days ahead of the newest date")
    service_log = stage.out / "service.log"
    for name in DEVICES:
        refused = f"certificate not renewed: the clock may be wrong  device={name}"
        wait_for(lambda words=refused: words in service_log.read_text(), refused)
    assert "got its next certificate" not in stage.log("service")
    [ahead] = {entry["clock_in_doubt"] for entry in fleet.command("devices")}
    assert "65 days ahead" in ahead

    fleet.command("devices", "--confirm-clock")  # by mistake: now certificates are made with wrong dates
    fleet.serve(AHEAD_S)
    for name in DEVICES:
        fleet.wait_for_words(f"{name} got its next certificate")
        fleet.wait_for_words("certificate renewed", log=name)

    fleet.serve()
    fleet.wait_until_connected()
    fleet.wait_for_words("65 days behind the newest date")
    fleet.command("devices", "--confirm-clock")
    fleet.wait_for_words("plausible again")

    fleet.serve(BEHIND_S)
    for name in DEVICES:
        fleet.wait_for_words("closed without an MQTT answer", log=name)
    fleet.wait_for_words("730 days behind the newest date")
    doctor = [*program("edge_client.cli"), "doctor", "--state", fleet.state("device-0")]
    found = subprocess.run(doctor, env=stage.environment, capture_output=True, text=True, check=False)
    assert found.returncode == 2, found.stdout
    assert "set the clock of the server" in found.stdout

    fleet.serve()
    fleet.wait_until_connected()
    stage.submit("run", devices=2)
    wait_for(lambda: stage.query("select 1 from runs where status = 'finished'"), "the run")
    assert stage.query("select distinct device from results order by device") == [(name,) for name in DEVICES]
    assert "Traceback" not in "".join(stage.log(name) for name in ("service", *DEVICES))
