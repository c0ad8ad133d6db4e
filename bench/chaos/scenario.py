"""A federation trains run after run while faults are injected; its tensors must be those of an undisturbed run."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.chaos.federation import CoordinatorEnded, Federation, Start
from bench.chaos.network import Network
from bench.chaos.outcome import InjectedFault, Outcome, count_duplicates
from bench.chaos.schedule import COORDINATOR, Fault
from bench.chaos.watch import Watch
from fedvit.errors import FedvitError, LinkDown
from fleet.request import RunRequest
from fleet.simulate import simulate

SCENARIO: dict[str, Any] = {
    "method": "eftvit",
    "rounds": 6,
    "seed": 5,
    "options": {"epochs": 12, "batch_size": 8, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
    "model_options": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2},
    "accelerator": "cpu",
    # each round waits for every device: otherwise tensors could not be compared
    "deadline_s": 600.0,
    "rejoin_grace_s": 300.0,
}
"""A run whose rounds take seconds; it still sends and stores every kind of blob and tensor."""
PATIENCE_S = 300.0
"""Longest wait for a device, for a round after a fault, and for the end of a run."""
SIGNS = {
    "kill": "X", "hang": "h", "drop": "d", "silence": "s", "twin": "t", "full": "f", "descriptors": "o", "clock": "c",
    "power": "P", "worker": "w",
}  # fmt: skip


class ScenarioRun:
    """One execution of a schedule."""

    def __init__(self, federation: Federation, watch: Watch, reference: bytes, report: Callable[[str], None]) -> None:
        self.federation = federation
        self.watch = watch
        self._reference = reference
        self._report = report
        self._finished: list[str] = []
        self._equal = self._compared = 0

    def run(self, schedule: Sequence[Fault], duration_s: float) -> list[InjectedFault]:
        """Inject all faults in turn, then wait until `duration_s` is over and a run has ended and been compared."""
        for name in self.federation.devices:
            self.federation.start_device(name)
        self._next_run()
        injected = []
        for fault in schedule:
            self._until_s(fault.at_s)
            self._until(self.federation.ready, PATIENCE_S)
            injected.append(self._inject(fault))
        self._until_s(duration_s)
        current = len(self._finished)
        # one more run if a full disk made a device miss a round in each of them
        self._until(lambda: len(self._finished) > current and self._compared > 0, 2 * PATIENCE_S)
        return injected

    def _inject(self, fault: Fault) -> InjectedFault:
        self._report(str(fault))
        self.watch.note(fault.target, SIGNS[fault.kind])
        while True:
            try:
                self.federation.inject(fault)
                break
            except CoordinatorEnded:
                self._until(self.federation.ready, PATIENCE_S)
        over_at_s, rounds = self.watch.now_s, self.watch.complete_rounds()
        try:
            # the current round may close without a device whose disk was full; the next one has all devices
            self._until(lambda: self.watch.complete_rounds() > rounds, PATIENCE_S)
        except LinkDown as error:
            self._report(f"     not recovered: {error}")
            return InjectedFault(fault, over_at_s, None)
        recovered_s = self.watch.now_s - over_at_s
        self._report(f"     recovered: a round with all devices closed {recovered_s:.1f} s later")
        return InjectedFault(fault, over_at_s, round(recovered_s, 2))

    def _until_s(self, at_s: float) -> None:
        self._until(lambda: self.watch.now_s >= at_s, at_s + PATIENCE_S)

    def _until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait, and start a new run when one has ended. Raises LinkDown, and FedvitError when a program ended."""
        until = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until:
                raise LinkDown(f"waited {timeout_s:.0f} s; the coordinator's last line: {self._last_line()}")
            self._check_processes()
            time.sleep(0.1)

    def _check_processes(self) -> None:
        for name in self.federation.devices:
            if (code := self.federation.processes[name].poll()) is not None:
                raise FedvitError(f"{name} ended with code {code}: {self.federation.last_line(name)}")
        if (code := self.federation.ended()) is None:
            return
        if self.federation.status() != "finished":
            raise FedvitError(f"the coordinator ended with code {code}: {self._last_line()}")
        self._compare()
        self._next_run()

    def _next_run(self) -> None:
        self.federation.start_run(f"chaos-{len(self._finished) + 1}")

    def _compare(self) -> None:
        """Compare the finished run with the undisturbed one, if every device answered in every round."""
        run = self.federation.run
        self._finished.append(run)
        accepted = self.federation.query(
            "select json_extract(figures, '$.accepted') from rounds where run = ? order by round", run
        )
        if any(number != len(self.federation.devices) for (number,) in accepted):
            self._report(f"{run} finished; a device missed a round, so its tensors are not compared")
            return
        self._compared += 1
        equal = (self.federation.runs / run / "model.safetensors").read_bytes() == self._reference
        self._equal += equal
        self._report(f"{run} finished; its tensors are {'' if equal else 'NOT '}those of the undisturbed run")

    def _last_line(self) -> str:
        return self.federation.last_line(COORDINATOR)

    def outcome(self, seed: int, injected: list[InjectedFault]) -> Outcome:
        query, watch = self.federation.query, self.watch
        [(closed,)] = query("select count(*) from rounds where closed_at is not null")
        [(accepted,)] = query("select count(*) from results")
        [(refused,)] = query("select count(*) from refusals")
        [(blob_bytes,)] = query(
            "select sum(coalesce(json_extract(use, '$.fetched_bytes'), 0)"
            " + coalesce(json_extract(use, '$.upload_bytes'), 0)) from results"
        )
        seconds = query(
            "select json_extract(figures, '$.devices_s') + json_extract(figures, '$.server_s') from rounds"
            " where json_extract(figures, '$.accepted') = ?",
            float(len(self.federation.devices)),
        )
        up_bytes, down_bytes = self.federation.links.carried_bytes()
        logs = [self.federation.runs / run / "coordinator.log" for run in (*self._finished, self.federation.run)]
        return Outcome(
            seed=seed,
            seconds=round(watch.now_s, 1),
            injected=injected,
            runs=len(self._finished),
            runs_compared=self._compared,
            runs_equal=self._equal,
            rounds_closed=closed,
            rounds_complete=watch.complete_rounds(),
            round_s=round(median(value for (value,) in seconds), 2) if seconds else None,
            results_accepted=accepted,
            results_refused=refused,
            duplicates_applied=sum(count_duplicates(log) for log in dict.fromkeys(logs)),
            longest_standstill_s=round(watch.longest_standstill_s, 1),
            memory=watch.memory,
            carried_up_bytes=up_bytes,
            carried_down_bytes=down_bytes,
            blob_bytes=blob_bytes or 0,
            moments=watch.moments,
        )


def undisturbed_run(folders: list[Path], values: dict[str, Any], out: Path, cache: Path | None = None) -> bytes:
    """The final tensors of a run without faults, in this process."""
    outcome = simulate(RunRequest(folders, values, out=out, run="calm", graph_cache=cache))
    return (outcome.folder / "model.safetensors").read_bytes()


def run_scenario(
    home: Path,
    folders: list[Path],
    schedule: Sequence[Fault],
    *,
    values: dict[str, Any],
    reference: bytes,
    duration_s: float,
    seed: int,
    start: Start,
    network: Network | None = None,
    broker: str = "auto",
    report: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run a whole scenario in the folder `home`. Raises FedvitError when a program ends unexpectedly."""
    home.mkdir(parents=True, exist_ok=True)
    federation = Federation(home, folders, values, start=start, network=network, seed=seed, broker=broker)
    with federation.links, Watch(federation) as watch:
        scenario = ScenarioRun(federation, watch, reference, report)
        try:
            injected = scenario.run(schedule, duration_s)
            return scenario.outcome(seed, injected)
        finally:
            federation.stop()
