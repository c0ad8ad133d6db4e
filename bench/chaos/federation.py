"""Real processes for a long ordeal: a coordinator with its broker, and devices, each behind a link of its own."""

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
from fedvit.errors import FedvitError, LinkDown
from fleet.run import free_port

BROKER_MARKS = ("mosquitto", "coordinator.broker.embedded")
CLOCK_RIGHT_AFTER_S = 5.0
TELL_TWIN_S = 60.0
FEW = 4
"""Descriptors that any process has in use: with no more allowed it opens nothing, and keeps what it has."""
COMMIT_S = 20.0
"""Longest wait for a device to write its vault, before it is killed anyway."""


class Process(Protocol):
    """What is needed of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[str, str, Sequence[str], Path], Process]
"""(name, module with a `main`, arguments, log) -> the process."""


def worker_of(run: Path) -> int | None:
    """The worker process of the coordinator that serves a run, as its log says; None where it says nothing."""
    said: list[str] = re.findall(r"worker process  pid=(\d+)", (run / "coordinator.log").read_text())
    return int(said[-1]) if said else None


class Federation:
    """Devices that serve one run after the other, and the coordinator of the run that is going on."""

    def __init__(
        self, home: Path, folders: Sequence[Path], values: dict[str, Any], *, start: Start, network: Network | None,
        seed: int, broker: str = "auto",
    ) -> None:  # fmt: skip
        self.home = home
        self.runs = home / "runs"
        self.folders = {folder.name: folder for folder in folders}
        self.values = values
        self.run = ""
        self.port = free_port()
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
        """A coordinator for a new run; the devices are there already, or come."""
        self.run = name
        config = self.home / f"{name}.toml"
        config.write_bytes(msgspec.toml.encode({**self.values, "devices": len(self.folders)}))
        self._coordinator(["--config", str(config), "--run", name])

    def start_device(self, name: str, clock_s: float = 0.0) -> None:
        self.processes[name] = self._device(name, name, self.home / "state" / name, clock_s)

    def ready(self) -> bool:
        """Whether a round is under way: there is something to disturb."""
        return self.status() == "running" and self.broker() is not None and self.ended() is None

    def status(self) -> str:
        """Of the run, as its record says; empty while there is none."""
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
        """Of everything that runs."""
        alive = {name: process.pid for name, process in self.processes.items() if process.poll() is None}
        broker = self.broker() if COORDINATOR in alive else None
        return {**alive, BROKER: broker.pid} if broker else alive

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the record while it is written; nothing while there is none."""
        try:
            with closing(sqlite3.connect(f"file:{self.runs / 'fedvit.db'}?mode=ro", uri=True, timeout=5)) as database:
                return database.execute(sql, values).fetchall()
        except sqlite3.OperationalError:
            return []

    def log(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def last_words(self, name: str) -> str:
        lines = self.log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _coordinator(self, arguments: Sequence[str], clock_s: float = 0.0) -> None:
        broker = ["--broker", self._broker, "--broker.port", str(self.port)]
        given = ["start", "--runs", str(self.runs), *broker, *arguments]
        self.processes[COORDINATOR] = self._program(COORDINATOR, "coordinator.cli", given, clock_s)

    def _device(self, log: str, name: str, state: Path, clock_s: float = 0.0) -> Process:
        given = ["--broker", f"127.0.0.1:{self.links.port(name)}", "--data", str(self.folders[name]), "--id", name]
        return self._program(log, "edge_client.cli", [*given, "--state", str(state), "--threads", "1"], clock_s)

    def _program(self, name: str, module: str, arguments: Sequence[str], clock_s: float) -> Process:
        if clock_s:
            arguments = [str(clock_s), str(CLOCK_RIGHT_AFTER_S), module, *arguments]
            module = "bench.chaos.clock"
        return self._start(name, module, arguments, self.log(name))

    # --- faults ---------------------------------------------------------------------------------------

    def suffer(self, fault: Fault) -> None:
        """Do it, for as long as it lasts; afterwards everything that was killed is started again."""
        self._apply[fault.kind](fault)

    def _again(self, target: str, clock_s: float = 0.0) -> None:
        if target == COORDINATOR:
            if self.status() != "finished":  # in its very last moment
                self._coordinator(["--resume", self.run], clock_s)
        else:
            self.start_device(target, clock_s)

    def _end(self, target: str) -> None:
        process = self.processes[target]
        process.kill()
        process.wait(20)

    def _kill(self, fault: Fault) -> None:
        if fault.target == BROKER:
            self._signal_broker(signal.SIGKILL)  # its coordinator starts it again
            return
        self._end(fault.target)
        self._again(fault.target)

    def _kill_worker(self, _fault: Fault) -> None:
        with suppress(OSError, ProcessLookupError):  # it is only being started
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
        lose = self.links.cut if fault.kind == "drop" else self.links.fall_silent
        lose(fault.target)
        time.sleep(fault.lasts_s)
        self.links.mend(fault.target)

    def _twin(self, fault: Fault) -> None:
        """It is told that its id is taken, and leaves when it is asked to. Raises FedvitError when nobody tells it."""
        name = f"twin-{fault.number}"
        twin = self._device(name, fault.target, self.home / "state" / name)
        until = time.monotonic() + TELL_TWIN_S
        try:
            while "is online already" not in self.log(name).read_text():
                if twin.poll() is not None or time.monotonic() > until:
                    raise FedvitError(f"a second {fault.target} was not told that its id is taken; {self.log(name)}")
                time.sleep(0.1)
        finally:
            twin.send_signal(signal.SIGTERM)
            twin.wait(30)

    def _limit(self, fault: Fault) -> None:
        """Nothing that the process writes may grow, or nothing can be opened by it: as on a full disk, or with all
        descriptors in use."""
        pid = self.processes[fault.target].pid
        what, limit = (resource.RLIMIT_FSIZE, 0) if fault.kind == "full" else (resource.RLIMIT_NOFILE, FEW)
        try:
            _, hard = resource.prlimit(pid, what)
            resource.prlimit(pid, what, (limit, hard))
            time.sleep(fault.lasts_s)
            resource.prlimit(pid, what, (hard, hard))
        except ProcessLookupError:
            pass  # its run ended meanwhile

    def _wrong_clock(self, fault: Fault) -> None:
        self._end(fault.target)
        self._again(fault.target, fault.clock_s)

    def _cut_power(self, fault: Fault) -> None:
        """kill -9 while a round is being written into the vault."""
        vault = self.home / "state" / fault.target / "vault" / self.run
        before = set(os.listdir(vault)) if vault.is_dir() else set()
        until = time.monotonic() + COMMIT_S
        while time.monotonic() < until:
            if vault.is_dir() and set(os.listdir(vault)) - before:
                break
            time.sleep(0.0005)
        self._end(fault.target)
        self._again(fault.target)

    # --- the end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask all to end; raises LinkDown naming those that do not."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        stuck = []
        for name, process in self.processes.items():
            try:
                process.wait(30)
            except Exception:  # noqa: BLE001 - a process of another kind has an exception of its own for this
                stuck.append(name)
                process.kill()
        if stuck:
            raise LinkDown(f"{', '.join(stuck)} did not end when asked to")
