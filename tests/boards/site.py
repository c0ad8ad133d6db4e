"""The server of virtual boards: a deployment on this machine's loopback, driven by the commands that a person types."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from coordinator.security.broker.process import claim_port
from tests.boards.board import HOST, Board
from tests.support.federation import count_duplicates
from tests.support.programs import query_record, toml
from tests.support.waiting import wait_until

BIN = Path(sys.executable).parent
RUN: dict[str, Any] = {
    "method": "fedper",
    "rounds": 1,
    "seed": 5,
    "devices": 1,
    "options": {"batch_size": 8, "epochs": 1, "lr": 0.05, "momentum": 0.9},
    "model_options": {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2},
    "deadline_s": 3600.0,
    "rejoin_grace_s": 1800.0,
}
"""A method with personal tensors, so that each round is written into the vault."""
ROUND_S = 3600.0
"""Longest wait for a round: a board trains a hundred times slower than this machine, and starts again meanwhile."""


class Site:
    """A deployment, its runs, and what a person typed for it."""

    def __init__(self, home: Path, cache: Path) -> None:
        home.mkdir()
        self.home = home
        self.runs = home / "runs"
        self.typed: list[str] = []
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self._coordinator: subprocess.Popen[bytes] | None = None

    def init(self) -> None:
        ports = ("--port", str(claim_port()), "--enrolment-port", str(claim_port()))
        self.type("coordinator", "init", "deployment", "--host", HOST, "--listen", "127.0.0.1", *ports)

    def enroll(self, board: Board, package: Path, *more: str) -> None:
        """Write a token and the package onto a board's card."""
        name = board.home.name
        where = ("--boot", str(board.boot_folder), "--package", str(package))
        self.type("coordinator", "enroll", name, "--deployment", "deployment", *where, "--no-wait", *more)

    def make_token(self, name: str, *more: str) -> str:
        """Make a token for a device."""
        return self.type("coordinator", "enroll", name, "--deployment", "deployment", "--no-wait", *more).split()[-1]

    def start_run(self, run: str, values: dict[str, Any]) -> None:
        """Start a coordinator with a new run."""
        (self.home / f"{run}.toml").write_text(toml(values))
        command = ["coordinator", "start", "--config", f"{run}.toml", "--run", run]
        command += ["--broker.deployment", "deployment"]
        self.typed.append(" ".join(command))
        with (self.home / f"{run}.log").open("ab") as log:
            self._coordinator = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], cwd=self.home, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def type(self, *command: str) -> str:
        """Run a command that a person types; return its output."""
        self.typed.append(" ".join(command))
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=self.home, env=self._environment, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def count_rounds(self, run: str) -> int:
        """Count the closed rounds of a run."""
        rows = query_record(self.runs, "select count(*) from rounds where run = ? and closed_at is not null", run)
        return int(rows[0][0]) if rows else 0

    def wait_for_rounds(self, run: str, count: int, wait_s: float = ROUND_S) -> None:
        """Wait until a run has so many closed rounds."""

        def is_there() -> bool:
            assert self._coordinator
            ended = self._coordinator.poll()
            assert not ended, (self.home / f"{run}.log").read_text()[-4000:]
            return self.count_rounds(run) >= count

        wait_until(is_there, lambda: f"round {count} of {run}: {self.read_log(run)}", wait_s=wait_s, pause_s=0.5)

    def wait_for_end(self, run: str, wait_s: float = ROUND_S) -> int:
        """Wait for the end of a run; return the coordinator's exit code."""
        assert self._coordinator
        try:
            return self._coordinator.wait(wait_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{run} has not ended: {self.read_log(run)}") from None

    def finish(self, run: str, wait_s: float = ROUND_S) -> dict[str, Any]:
        """Wait for the end of a run; return what `coordinator show` says."""
        code = self.wait_for_end(run, wait_s)
        assert code == 0, f"{code}: {self.read_log(run)}"
        return self.show(run)

    def show(self, run: str) -> dict[str, Any]:
        """Return what `coordinator show` says of a run that has ended; check that no result counted twice."""
        assert count_duplicates(self.runs / run / "coordinator.log") == 0
        done = subprocess.run(
            [str(BIN / "coordinator"), "show", run, "--runs", str(self.runs), "--json"], cwd=self.home,
            env=self._environment, capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        shown: dict[str, Any] = json.loads(done.stdout)
        assert shown["status"] == "finished"
        return shown

    def read_log(self, run: str) -> str:
        """Return the end of a coordinator's log."""
        return (self.home / f"{run}.log").read_text()[-3000:]

    def close(self) -> None:
        """End the coordinator."""
        if self._coordinator and self._coordinator.poll() is None:
            self._coordinator.terminate()
            try:
                self._coordinator.wait(60)
            except subprocess.TimeoutExpired:
                self._coordinator.kill()
                self._coordinator.wait()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def read_s(self) -> float:
        return time.monotonic() - self._began
