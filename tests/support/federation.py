"""A federation of real processes that faults happen to; each device has a link of its own to the broker."""

import os
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from msgspec import Struct

from coordinator.security.broker.process import claim_port
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.processes import last_line
from tests.support.forked import Forked
from tests.support.programs import query_record
from tests.support.proxy import Links, Network
from tests.support.waiting import WAIT_S, wait_until

COORDINATOR, BROKER = "coordinator", "broker"
BROKER_MARKS = ("mosquitto", "coordinator.security.broker.embedded")
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
IMAGES_PER_DEVICE = 50
PATIENCE_S = 300.0
"""Longest wait for a device, for a round after a fault, and for the end of a run."""
CLOCK_RIGHT_AFTER_S = 5.0
FEW_DESCRIPTORS = 4
"""Fewer than any process has open: with this limit a process keeps its open files and cannot open another."""
_ACCEPTED = re.compile(r"result accepted .*\bdevice=(\S+) round=(\d+) kind=(\S+)")


class Fault(Struct, frozen=True):
    """A fault of the coordinator, the broker or a device."""

    kind: str
    target: str
    lasts_s: float = 2.0
    clock_s: float = 0.0  # how far the clock is off


def count_duplicates(log: Path) -> int:
    """Count the results that a coordinator accepted more than once, from its log and the rotated files of it."""
    accepted: Counter[tuple[str, ...]] = Counter()
    for file in log.parent.glob(f"{log.name}*"):
        accepted.update(_ACCEPTED.findall(file.read_text(errors="replace")))
    return sum(count - 1 for count in accepted.values())


def deal_digits(parts: Path, names: Sequence[str]) -> list[Path]:
    """Write a folder of handwritten digits for each device."""
    digits = read_digits(size=32)
    rows = np.arange(IMAGES_PER_DEVICE * len(names))
    samples = replace(digits, images=digits.images[rows], labels=digits.labels[rows])
    shares = partition("dirichlet", samples.labels, len(names), seed=3, alpha=1.0)
    write_device_folders(samples, shares, parts, test_share=0.2, seed=3)
    return [parts / name for name in names]


class Federation:
    """Devices that serve one run after the other, and the coordinator of the current run."""

    def __init__(self, home: Path, folders: Sequence[Path], values: dict[str, Any], network: Network | None) -> None:
        self.runs = home / "runs"
        self.devices = [folder.name for folder in folders]
        self.run = ""
        self.processes: dict[str, Forked] = {}
        self.port = claim_port()
        self.links = Links(self.port, network)
        self._home = home
        self._folders = {folder.name: folder for folder in folders}
        self._values = {**values, "devices": len(folders)}
        self._faults: dict[str, Callable[[Fault], None]] = {
            "hang": self._hang,
            "drop": self._lose_link,
            "silence": self._lose_link,
            "descriptors": self._use_up_descriptors,
            "clock": self._restart,
            "power": self._cut_power,
        }

    # --- programs -------------------------------------------------------------------------------------

    def start_run(self, name: str) -> None:
        """Start a coordinator for a new run."""
        self.run = name
        config = self._home / f"{name}.toml"
        config.write_bytes(msgspec.toml.encode(self._values))
        self._start_coordinator(["--config", str(config), "--run", name])

    def evaluate(self, run: str, name: str, *flags: str) -> None:
        """Start a coordinator that lets devices test an earlier run."""
        self.run = name
        arguments = ["evaluate", run, "--run", name, "--runs", str(self.runs), *flags]
        self.processes[COORDINATOR] = self._start(COORDINATOR, "coordinator.cli", arguments, 0.0)

    def start_device(self, name: str, clock_s: float = 0.0) -> None:
        self.processes[name] = self.start_process(name, name, clock_s)

    def start_process(self, log: str, name: str, clock_s: float = 0.0) -> Forked:
        """Start a device's process whose log and state have the name `log`."""
        flags = ["--broker", f"127.0.0.1:{self.links.port(name)}", "--data", str(self._folders[name]), "--id", name]
        flags += ["--state", str(self._home / "state" / log), "--threads", "1"]
        return self._start(log, "edge_client.cli", flags, clock_s)

    def is_ready(self) -> bool:
        """Tell whether a round is under way, so that a fault can disturb it."""
        return self.status() == "running" and self._find_broker() is not None and self.exit_code() is None

    def status(self) -> str:
        """Read the run's status from its record; empty without one."""
        rows = self.query("select status from runs where id = ?", self.run)
        return str(rows[0][0]) if rows else ""

    def exit_code(self) -> int | None:
        return self.processes[COORDINATOR].poll()

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Read the record while it is written; no rows before it exists."""
        return query_record(self.runs, sql, *values)

    def count_complete_rounds(self) -> int:
        """Count the rounds of all runs in which every device's result was accepted."""
        sql = "select count(*) from rounds where closed_at is not null and json_extract(figures, '$.accepted') = ?"
        rows = self.query(sql, float(len(self.devices)))
        return int(rows[0][0]) if rows else 0

    def log(self, name: str) -> Path:
        return self._home / f"{name}.log"

    def check_processes(self) -> None:
        """Fail if a device has ended, or the coordinator before its run was finished."""
        for name in self.devices:
            code = self.processes[name].poll()
            assert code is None, f"{name} ended with code {code}: {last_line(self.log(name))}"
        code = self.exit_code()
        assert code is None or self.status() == "finished", f"code {code}: {last_line(self.log(COORDINATOR))}"

    def close(self) -> None:
        """Terminate all processes; fail if one had to be killed."""
        for process in self.processes.values():
            process.terminate()
        stuck = []
        for name, process in self.processes.items():
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                stuck.append(name)
                process.kill()
        assert not stuck, f"{stuck} did not end on SIGTERM"

    def _start_coordinator(self, arguments: Sequence[str], clock_s: float = 0.0) -> None:
        flags = ["start", "--runs", str(self.runs), "--broker", "auto", "--broker.port", str(self.port), *arguments]
        self.processes[COORDINATOR] = self._start(COORDINATOR, "coordinator.cli", flags, clock_s)

    def _start(self, name: str, module: str, arguments: Sequence[str], clock_s: float) -> Forked:
        if clock_s:
            arguments = [str(clock_s), str(CLOCK_RIGHT_AFTER_S), module, *arguments]
            module = "tests.support.wrong_clock"
        return Forked(module, list(arguments), self.log(name), dict(os.environ))

    def _find_broker(self) -> psutil.Process | None:
        with suppress(psutil.Error):
            for child in psutil.Process(self.processes[COORDINATOR].pid).children():
                if any(mark in part for part in child.cmdline() for mark in BROKER_MARKS):
                    return child
        return None

    # --- faults ---------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Inject a fault for as long as it lasts; afterwards every killed process has been started again."""
        self._faults[fault.kind](fault)

    def _hang(self, fault: Fault) -> None:
        broker = self._find_broker()
        pid = broker.pid if broker and fault.target == BROKER else self.processes[COORDINATOR].pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(fault.lasts_s)
            os.kill(pid, signal.SIGCONT)

    def _lose_link(self, fault: Fault) -> None:
        lose = self.links.cut if fault.kind == "drop" else self.links.silence
        lose(fault.target)
        time.sleep(fault.lasts_s)
        self.links.mend(fault.target)

    def _use_up_descriptors(self, fault: Fault) -> None:
        pid = self.processes[fault.target].pid
        with suppress(ProcessLookupError):  # the process may end with its run
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, hard))
            time.sleep(fault.lasts_s)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))

    def _restart(self, fault: Fault) -> None:
        """Kill a process, and start it again with the fault's clock."""
        self.processes[fault.target].kill()
        self.processes[fault.target].wait(20)
        if fault.target != COORDINATOR:
            self.start_device(fault.target, fault.clock_s)
        elif self.status() != "finished":  # the run may have finished just before
            self._start_coordinator(["--resume", self.run], fault.clock_s)

    def _cut_power(self, fault: Fault) -> None:
        """Kill a device while it writes a round into its vault."""
        vault = self._home / "state" / fault.target / "vault" / self.run
        before = set(os.listdir(vault)) if vault.is_dir() else set()
        wait_until(
            lambda: (vault.is_dir() and set(os.listdir(vault)) - before) or self.exit_code() is not None,
            f"{fault.target} wrote nothing into its vault",
            pause_s=0.0005,
        )
        self._restart(fault)
