"""One round with a real broker, a real coordinator and a real `edge-client`."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.edge import make_edge_command
from coordinator.record.record import Record, open_record
from coordinator.record.tables import ResultRecord
from coordinator.security.broker import start_broker
from fedvit.errors import FedvitError
from fleet.processes import Fleet, last_line, program

RUN = "bench"
POLL_S = 0.1
REPORT_EVERY_S = 30.0


@dataclass
class OneRound:
    """A round under way."""

    home: Path
    broker: str  # its kind
    store: Record
    coordinator: subprocess.Popen[bytes]
    device: subprocess.Popen[bytes]
    began: float  # time.monotonic()

    @property
    def results(self) -> dict[str, ResultRecord]:
        """The accepted results by kind: "train", "evaluate"."""
        return {result.kind: result for result in self.store.tasks.read_results(RUN)}

    def wait(
        self,
        patience_s: float,
        *,
        died: Callable[[int], str | None] = lambda code: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> str | None:
        """Wait until the run is over; returns the reason if it cannot finish.

        `died` may give a better reason for the device's exit code. Raises FedvitError when the coordinator fails, for
        instance because settings do not fit method or model.
        """
        reported = self.began
        while self.coordinator.poll() is None:
            if (code := self.device.poll()) not in (None, 0):
                last = f"the device ended with code {code}: {last_line(self.home / 'device.log')}"
                return died(int(code or 0)) or last
            if refusals := self.store.devices.read_refusals(RUN):
                return f"{refusals[0].kind}: {refusals[0].reason}"
            now = time.monotonic()
            if now - self.began > patience_s:
                return f"not done within {patience_s:.0f} s"
            if now - reported >= REPORT_EVERY_S:
                reported = now
                report(f"{now - self.began:.0f} s: {last_line(self.home / 'device.log')}")
            time.sleep(POLL_S)
        if self.coordinator.returncode != 0:
            raise FedvitError(
                "FV0001",
                f"the coordinator ended with code {self.coordinator.returncode}: "
                f"{last_line(self.home / 'coordinator.log')}",
            )
        return None


@contextlib.contextmanager
def start_round(
    home: Path,
    run: dict[str, Any],
    data: Path,
    *,
    command: Callable[[Sequence[str]], Sequence[str]] = lambda plain: plain,
    extra: Sequence[str] = (),
) -> Iterator[OneRound]:
    """Start a run with the configuration `run` in folder `home`; all processes have ended after it.

    `command` may wrap the device's command line, to which the flags `extra` are added.
    """
    with contextlib.ExitStack() as stack:
        broker = start_broker("auto", home / "broker", port=0)
        stack.callback(broker.stop)
        store = open_record(home / "runs")
        stack.callback(store.close)
        address = f"mqtt://{broker.address}"
        file = home / "run.toml"
        file.write_bytes(msgspec.toml.encode({**run, "broker": {"broker": address}}))
        fleet = stack.enter_context(Fleet())
        started = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(home / "runs")]
        coordinator = fleet.start("coordinator", [*started, "--run", RUN], log=home / "coordinator.log")
        edge = [*make_edge_command(address, data, home / "state"), *extra]
        device = fleet.start("device", command(edge), log=home / "device.log")
        yield OneRound(home, broker.kind, store, coordinator, device, time.monotonic())
