"""Real processes for a scenario: a coordinator with its broker, and devices, each behind its own link."""

import os
import re
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil

from bench.chaos.network import Links, Network
from bench.chaos.schedule import BROKER, COORDINATOR, Fault
from coordinator.security.broker.process import claim_port
from fedvit.errors import FedvitError, LinkDown
from fleet.processes import last_line

BROKER_MARKS = ("mosquitto", "coordinator.security.broker.embedded")
CLOCK_RIGHT_AFTER_S = 5.0
TWIN_REFUSED_S = 60.0
FEW_DESCRIPTORS = 4
"""Fewer than any process has open: with this limit a process keeps its open files and cannot open another."""
COMMIT_S = 20.0
"""Longest wait for a device to write its vault; afterwards it is killed anyway."""


class CoordinatorEnded(Exception):
    """It ended with its run before a fault had its effect, for which a coordinator is needed."""


class Process(Protocol):
    """The part of `subprocess.Popen` that a federation uses."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[str, str, Sequence[str], Path], Process]
"""(name, module with a `main`, arguments, log) -> the process."""


def worker_of(run: Path) -> int | None:
    """The pid of the worker process of a run's coordinator, from its log; None before the log names one."""
    pids: list[str] = re.findall(r"worker process  pid=(\d+)", (run / "coordinator.log").read_text())
    return int(pids[-1]) if pids else None


class Federation:
    """Devices that serve one run after the other, and the coordinator of the current run."""

    def __init__(
        self, home: Path, folders: Sequence[Path], values: dict[str, Any], *, start: Start, network: Network | None,
        seed: int, broker: str = "auto",
    ) -> None:  # fmt: skip
        self.home = home
        self.runs = home / "runs"
        self.folders = {folder.name: folder for folder in folders}
        self.values = values
        self.run = ""
        self.port = claim_port()
        self.links = Links(self.port, network, seed)
        self.processes: dict[str, Process] = {}
        self._start = start
        self._broker = broker
        self._apply: dict[str, Callable[[Fault], None]] = {
            "kill": self._kill, "hang": self._hang, "drop": self._lose_link, "silence": self._lose_link,
            "twin": self._twin, "full": self._limit, "descriptors": self._limit,
            "clock": self._wrong_clock, "power": self._cut_power, "worker": self._kill_worker,
        }  # fmt: skip

    @property
    def devices(self) -> list[str]:
        return list(self.folders)

    # --- programs -------------------------------------------------------------------------------------

    def start_run(self, name: str) -> None:
        """Start a coordinator for a new run; devices may be started before or after it."""
        self.run = name
        config = self.home / f"{name}.toml"
        config.write_bytes(msgspec.toml.encode({**self.values, "devices": len(self.folders)}))
        self._coordinator(["--config", str(config), "--run", name])

    def start_device(self, name: str, clock_s: float = 0.0) -> None:
        self.processes[name] = self._device(name, name, self.home / "state" / name, clock_s)

    def ready(self) -> bool:
        """Whether a round is under way, so that a fault can disturb it."""
        return self.status() == "running" and self.broker() is not None and self.ended() is None

    def status(self) -> str:
        """Of the run, from its record; empty while there is none."""
        found = self.query("select status from runs where id = ?", self.run)
        return str(found[0][0]) if found else ""

    def ended(self) -> int | None:
        """The coordinator's exit code."""
        return self.processes[COORDINATOR].poll()

    def broker(self) -> psutil.Process | None:
        """The coordinator's child; None while there is none."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.processes[COORDINATOR].pid).children():
                if any(mark in part for part in child.cmdline() for mark in BROKER_MARKS):
                    return child
        return None

    def pids(self) -> dict[str, int]:
        """Pid of each running process by name."""
        alive = {name: process.pid for name, process in self.processes.items() if process.poll() is None}
        broker = self.broker() if COORDINATOR in alive else None
        return {**alive, BROKER: broker.pid} if broker else alive

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the record while it is written; no rows while there is none."""
        try:
            with closing(sqlite3.connect(f"file:{self.runs / 'fedvit.db'}?mode=ro", uri=True, timeout=5)) as database:
                return database.execute(sql, values).fetchall()
        except sqlite3.OperationalError:
            return []

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def last_line(self, name: str) -> str:
        return last_line(self.log(name))

    def _coordinator(self, arguments: Sequence[str], clock_s: float = 0.0) -> None:
        broker = ["--broker", self._broker, "--broker.port", str(self.port)]
        flags = ["start", "--runs", str(self.runs), *broker, *arguments]
        self.processes[COORDINATOR] = self._program(COORDINATOR, "coordinator.cli", flags, clock_s)

    def _device(self, log: str, name: str, state: Path, clock_s: float = 0.0) -> Process:
        flags = ["--broker", f"127.0.0.1:{self.links.port(name)}", "--data", str(self.folders[name]), "--id", name]
        return self._program(log, "edge_client.cli", [*flags, "--state", str(state), "--threads", "1"], clock_s)

    def _program(self, name: str, module: str, arguments: Sequence[str], clock_s: float) -> Process:
        if clock_s:
            arguments = [str(clock_s), str(CLOCK_RIGHT_AFTER_S), module, *arguments]
            module = "bench.chaos.clock"
        return self._start(name, module, arguments, self.log(name))

    # --- faults ---------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Inject a fault for as long as it lasts; afterwards every killed process has been started again.

        Raises CoordinatorEnded when it is to be injected again, into the next run.
        """
        self._apply[fault.kind](fault)

    def _restart(self, target: str, clock_s: float = 0.0) -> None:
        if target == COORDINATOR:
            if self.status() != "finished":  # the run may have finished just before the kill
                self._coordinator(["--resume", self.run], clock_s)
        else:
            self.start_device(target, clock_s)

    def _kill_process(self, target: str) -> None:
        process = self.processes[target]
        process.kill()
        process.wait(20)

    def _kill(self, fault: Fault) -> None:
        if fault.target == BROKER:
            self._signal_broker(signal.SIGKILL)  # its coordinator starts it again
            return
        self._kill_process(fault.target)
        self._restart(fault.target)

    def _kill_worker(self, _fault: Fault) -> None:
        with suppress(OSError, ProcessLookupError):  # the worker may be starting
            if pid := worker_of(self.runs / self.run):
                os.kill(pid, signal.SIGKILL)

    def _hang(self, fault: Fault) -> None:
        pid = self.pids().get(fault.target)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(fault.lasts_s)
            os.kill(pid, signal.SIGCONT)

    def _signal_broker(self, number: int) -> None:
        if broker := self.broker():
            with suppress(psutil.Error):
                broker.send_signal(number)

    def _lose_link(self, fault: Fault) -> None:
        lose = self.links.cut if fault.kind == "drop" else self.links.silence
        lose(fault.target)
        time.sleep(fault.lasts_s)
        self.links.mend(fault.target)

    def _twin(self, fault: Fault) -> None:
        """Start a second process with a device's id, which must be refused.

        Raises FedvitError when it is not, CoordinatorEnded when nobody is left to refuse it.
        """
        name = f"twin-{fault.number}"
        twin = self._device(name, fault.target, self.home / "state" / name)
        until = time.monotonic() + TWIN_REFUSED_S
        try:
            while "is online already" not in self.log(name).read_text():
                if self.ended() == 0:
                    raise CoordinatorEnded
                if twin.poll() is not None or time.monotonic() > until:
                    raise FedvitError(f"a second {fault.target} was not refused for its id; log: {self.log(name)}")
                time.sleep(0.1)
        finally:
            twin.send_signal(signal.SIGTERM)
            twin.wait(30)

    def _limit(self, fault: Fault) -> None:
        """Let no file of the process grow, as on a full disk, or let it open none, as with all descriptors in use."""
        pid = self.processes[fault.target].pid
        kind, limit = (resource.RLIMIT_FSIZE, 0) if fault.kind == "full" else (resource.RLIMIT_NOFILE, FEW_DESCRIPTORS)
        with suppress(ProcessLookupError):  # the process may end with its run
            _, hard = resource.prlimit(pid, kind)
            resource.prlimit(pid, kind, (limit, hard))
            time.sleep(fault.lasts_s)
            resource.prlimit(pid, kind, (hard, hard))

    def _wrong_clock(self, fault: Fault) -> None:
        self._kill_process(fault.target)
        self._restart(fault.target, fault.clock_s)

    def _cut_power(self, fault: Fault) -> None:
        """Kill a device (kill -9) while it writes a round into its vault."""
        vault = self.home / "state" / fault.target / "vault" / self.run
        before = set(os.listdir(vault)) if vault.is_dir() else set()
        until = time.monotonic() + COMMIT_S
        while time.monotonic() < until:
            if vault.is_dir() and set(os.listdir(vault)) - before:
                break
            time.sleep(0.0005)
        self._kill_process(fault.target)
        self._restart(fault.target)

    # --- the end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Terminate all processes. Raises LinkDown naming those that had to be killed."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        stuck = []
        for name, process in self.processes.items():
            try:
                process.wait(30)
            except Exception:  # noqa: BLE001 - each implementation of Process raises its own timeout
                stuck.append(name)
                process.kill()
        if stuck:
            raise LinkDown(f"{', '.join(stuck)} did not end on SIGTERM and was killed")
