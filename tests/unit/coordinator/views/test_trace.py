"""`coordinator trace`: tasks from the record alone, with the coordinator's log, and with a device's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from fedvit.errors import ConfigError
from fedvit.logs import json_line
from fedvit.task_names import TaskName
from tests.support.codes import has_code
from tests.support.runs import Stage, fails_once


def run_trace(*arguments: object) -> str:
    return CliRunner().invoke(cli, ["trace", *map(str, arguments)], catch_exceptions=False).output


def read_trace(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(run_trace(*arguments, "--json")))


@pytest.fixture
def run_stage(stage: Stage) -> Stage:
    """A run of a round: one device is honest, the other fails to train."""
    stage.fake("a")
    stage.fake("b", fails_once)
    stage.start(devices=2, rounds=1)
    assert stage.finish() == "finished"
    return stage


def test_tasks_of_a_round_from_the_record_alone(run_stage: Stage) -> None:
    found = read_trace("r.1", "--runs", run_stage.out)
    tasks = {(task["device"], task["kind"]): task for task in found["tasks"]}
    assert tasks.keys() == {("a", "train"), ("b", "train"), ("a", "evaluate"), ("b", "evaluate")}
    accepted, failed = tasks["a", "train"], tasks["b", "train"]
    assert (accepted["outcome"], accepted["reason"]) == ("accepted", None)
    assert accepted["steps"][0]["event"] == "task asked"
    assert accepted["steps"][-1]["event"] == "result accepted"
    assert {step["source"] for step in accepted["steps"]} == {"record"}
    assert accepted["total_s"] >= 0
    assert (failed["outcome"], failed["reason"]) == ("failed", "its disk is full")
    assert "refused" in [step["event"] for step in failed["steps"]]
    assert tasks["b", "evaluate"]["outcome"] == "accepted"
    assert not found["has_log"]
    text = run_trace("r.1", "--runs", run_stage.out)
    assert "its disk is full" in text
    assert "--log-format json" in text


def test_lines_of_logs_are_put_between_the_steps(run_stage: Stage, tmp_path: Path) -> None:
    """A line of the coordinator's log replaces the same step of the record."""
    before = read_trace("r.1.a.train", "--runs", run_stage.out)["tasks"][0]
    of_task = TaskName("r", 1, "a", "train", 1).fields()
    folder = run_stage.out / "r"
    folder.mkdir(exist_ok=True)
    lines = [
        json_line("info", "round opened", {"run": "r", "round": 1, "kind": "train", "cohort": 2}),
        json_line("info", "task asked", of_task),
        json_line("info", "task asked", {**of_task, "round": 11, "task": "r.11.a.train.1"}),
        "not in JSON",
        '{"cut off',
    ]
    (folder / "coordinator.log").write_text("\n".join(lines))
    device = tmp_path / "a.log"
    device.write_text(json_line("info", "task received", of_task) + "\n")
    found = read_trace("r.1.a.train.1", "--runs", run_stage.out, "--log", device)
    assert found["has_log"]
    assert [step["event"] for step in found["steps"]] == ["round opened"]
    [task] = found["tasks"]
    sources = {step["event"]: step["source"] for step in task["steps"]}
    assert sources["task asked"] == "coordinator"
    assert sources["task received"] == "device"
    assert len(task["steps"]) == len(before["steps"]) + 1
    assert "task received" in run_trace("r.1.a", "--runs", run_stage.out, "--log", device)


@pytest.mark.parametrize(
    "text", ["r", "r.x", "r.1.a.sleep", "r.1.a.train.x", "r.1.a.train.1.2", "../r.1", "r.99999999999999999999"]
)
def test_name_that_is_no_task_is_refused(run_stage: Stage, text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1629")):
        run_trace(text, "--runs", run_stage.out)


def test_lines_of_other_programs_are_left_out(run_stage: Stage, tmp_path: Path) -> None:
    lines = ({}, {"date": "2026-11-29"}, {"date": "soon", "message": "x"}, {"message": "x"})
    other = tmp_path / "other.log"
    other.write_text("".join(f"{json.dumps({'run': 'r', 'round': 1, **line})}\n" for line in lines))
    assert read_trace("r.1", "--runs", run_stage.out, "--log", other) == read_trace("r.1", "--runs", run_stage.out)


def test_run_round_device_and_log_must_exist(run_stage: Stage, tmp_path: Path) -> None:
    for text, code in (("other.1", "FV1601"), ("r.9", "FV1623"), ("r.1.c", "FV1629")):
        with pytest.raises(ConfigError, check=has_code(code)):
            run_trace(text, "--runs", run_stage.out)
    with pytest.raises(ConfigError, check=has_code("FV1629", "none.log")):
        run_trace("r.1", "--runs", run_stage.out, "--log", tmp_path / "none.log")


def test_nothing_of_opentelemetry_is_imported_while_nobody_traces() -> None:
    """Neither by a device nor by a coordinator."""
    code = (
        "import sys; import edge_client.agent, coordinator.rounds.coordinator; "
        "from fedvit.tracing import open_tracing; assert open_tracing('x') is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
