"""`coordinator start --check` tries the broker that is named, and refuses a budget that no device can keep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.security.broker import start_broker
from coordinator.security.broker.process import claim_port
from fedvit.errors import ConfigError, LinkDown
from tests.support.waiting import WAIT_S, wait_until

PROGRAM = [sys.executable, "-c", "from coordinator.cli import main; main()"]


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, "start", "--check", "--quiet", "--runs", str(folder / "runs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_a_dead_broker_is_an_error(tmp_path: Path) -> None:
    done = check(tmp_path, "--broker", f"mqtt://127.0.0.1:{claim_port()}")
    assert done.returncode == LinkDown.exit_code
    assert "no connection to the broker: 127.0.0.1:" in done.stderr
    assert "can begin" not in done.stdout


@pytest.mark.slow
def test_a_broker_that_answers_is_none(tmp_path: Path) -> None:
    broker = start_broker("mosquitto", tmp_path / "broker", "127.0.0.1", 0, None)
    try:
        done = check(tmp_path, "--broker", f"mqtt://127.0.0.1:{broker.address.port}")
    finally:
        broker.stop()
    assert done.returncode == 0, done.stderr
    assert "can begin" in done.stdout


@pytest.mark.parametrize("command", [["start", "--check"], ["start"], ["submit"]])
def test_a_budget_below_the_program_itself_is_an_error(tmp_path: Path, command: list[str]) -> None:
    given = [*PROGRAM, *command, "--runs", str(tmp_path / "runs"), "--budget.memory-budget", "60MB"]
    done = subprocess.run(given, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == ConfigError.exit_code
    assert "memory_budget = '60MB': a device's program and its engine alone take about 91 MB" in done.stderr


def test_a_run_says_at_once_that_its_broker_is_dead(tmp_path: Path) -> None:
    """Before the model is built, for which the run needs torch; then the run goes on."""
    log = tmp_path / "log"
    command = [*PROGRAM, "start", "--runs", str(tmp_path / "runs"), "--broker", f"mqtt://127.0.0.1:{claim_port()}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "COLUMNS": "200"})
    try:
        wait_until(lambda: "on each device:" in log.read_text(), log.read_text())
    finally:
        process.terminate()
        process.wait(WAIT_S)
    text = log.read_text()
    assert text.index("no connection to the broker: 127.0.0.1:") < text.index("server on")
