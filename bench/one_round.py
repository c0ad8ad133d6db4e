"""One round of one device, all of it real: a broker, a coordinator and an `edge-client`, watched until it is over."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.edge import edge_command, last_line
from coordinator.broker import start_broker
from coordinator.record.store import Store
from coordinator.record.tables import ResultRecord
from fedvit.errors import FedvitError
from fleet.processes import Fleet, program

RUN = "bench"
POLL_S = 0.1
SAY_EVERY_S = 30.0


@dataclass
class OneRound:
    """A round under way."""

    home: Path
    broker: str  # its kind
    store: Store
    coordinator: subprocess.Popen[bytes]
    device: subprocess.Popen[bytes]
    began: float  # time.monotonic()

    @property
    def results(self) -> dict[str, ResultRecord]:
        """What the coordinator accepted: "train", "evaluate"."""
        return {result.kind: result for result in self.store.results(RUN)}

    def wait(
        self,
        patience_s: float,
        *,
        died: Callable[[int], str | None] = lambda code: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> str | None:
        """Until the run is over: None, or the reason why it will never be.

        `died` may know better why the device ended with a code. Raises FedvitError when the coordinator fails,
        also when the settings do not fit method or model.
        """
        said = self.began
        while self.coordinator.poll() is None:
            if (code := self.device.poll()) not in (None, 0):
                last = f"the device ended with code {code}: {last_line(self.home / 'device.log')}"
                return died(int(code or 0)) or last
            if refusals := self.store.refusals(RUN):
                return f"{refusals[0].kind}: {refusals[0].reason}"
            now = time.monotonic()
            if now - self.began > patience_s:
                return f"not done within {patience_s:.0f} s"
            if now - said >= SAY_EVERY_S:
                said = now
                say(f"{now - self.began:.0f} s: {last_line(self.home / 'device.log')}")
            time.sleep(POLL_S)
        if self.coordinator.returncode != 0:
            raise FedvitError(
                f"the coordinator ended with code {self.coordinator.returncode}: "
                f"{last_line(self.home / 'coordinator.log')}"
            )
        return None


@contextlib.contextmanager
def one_round(
    home: Path,
    run: dict[str, Any],
    data: Path,
    *,
    command: Callable[[Sequence[str]], Sequence[str]] = lambda plain: plain,
    extra: Sequence[str] = (),
) -> Iterator[OneRound]:
    """Start a run with the configuration `run` in folder `home`; all processes are gone when it ends.

    `command` may wrap the device's command line, to which `extra` flags are added.
    """
    with contextlib.ExitStack() as stack:
        broker = start_broker("auto", home / "broker", port=0)
        stack.callback(broker.stop)
        store = Store.in_folder(home / "runs")
        stack.callback(store.close)
        address = f"mqtt://{broker.address.host}:{broker.address.port}"
        file = home / "run.toml"
        file.write_bytes(msgspec.toml.encode({**run, "broker": {"broker": address}}))
        fleet = stack.enter_context(Fleet())
        started = [*program("coordinator.cli"), "start", "--config", str(file), "--runs", str(home / "runs")]
        coordinator = fleet.start("coordinator", [*started, "--run", RUN], log=home / "coordinator.log")
        edge = [*edge_command(address, data, home / "state"), *extra]
        device = fleet.start("device", command(edge), log=home / "device.log")
        yield OneRound(home, broker.kind, store, coordinator, device, time.monotonic())
