"""A task is followed through real programs: by its name in the logs of both sides, by `coordinator trace`, and by spans
that a receiver of OTLP gets."""

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from fedvit.task_names import TaskName
from tests.support.forked import Forked
from tests.support.otlp import receive_spans
from tests.support.programs import CONFIG, DEVICES, Stage, program

KINDS = ("train", "evaluate")
VALUES: dict[str, Any] = {**CONFIG, "variants": {}, "devices": len(DEVICES), "rounds": 1}
SINGLE = "device-1"
"""The device of a process of its own; `fleet host` has the others."""
COORDINATOR, DEVICE = "fedvit-coordinator", "fedvit-device"


def host(stage: Stage) -> "subprocess.Popen[bytes]":
    """All devices but SINGLE."""
    command = [*program("fleet.cli"), "host", "--broker", f"127.0.0.1:{stage.port}", "--parts", str(stage.parts)]
    command += ["--devices", str(len(DEVICES)), "--number", "0", "--hosts", "2", "--once"]
    return stage.start("host", [*command, "--state", str(stage.folder / "hosted")])


def serve(stage: Stage) -> None:
    """Serve the run to its end; all programs log in JSON."""
    stage.environment["FEDVIT_LOG_FORMAT"] = "json"
    coordinator = stage.coordinator(values=VALUES)
    processes: dict[str, subprocess.Popen[bytes] | Forked] = {"host": host(stage), SINGLE: stage.device(SINGLE)}
    assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
    for name, process in processes.items():
        assert stage.finish(process, name) == 0, stage.log(name)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def list_messages(lines: list[dict[str, Any]], task: str) -> list[str]:
    return [line["message"] for line in lines if line.get("task") == task]


def test_task_has_one_name_in_the_logs_of_both_sides(stage: Stage, tmp_path: Path) -> None:
    """And `coordinator trace` puts them on one time line."""
    serve(stage)
    coordinator = lines_of((stage.out / "run" / "coordinator.log").read_text())
    by_program = {name: lines_of(stage.log(name)) for name in ("host", SINGLE)}
    names = {str(TaskName("run", 1, device, kind, 1)) for device in DEVICES for kind in KINDS}
    assert {line["task"] for line in coordinator if "task" in line} == names
    devices = [line for lines in by_program.values() for line in lines]
    assert {line["task"] for line in devices if "task" in line} == names
    for line in [*coordinator, *devices]:
        if "task" in line:
            assert line["task"] == str(TaskName(*(line[field] for field in TaskName._fields)))
    assert [line["kind"] for line in coordinator if line["message"] == "round opened"] == list(KINDS)
    for name in names:
        expected = ["task asked", "result received", "result accepted"]
        assert list_messages(coordinator, name) == expected
        expected = ["task received", "blobs fetched", "task done", "result accepted"]
        assert list_messages(devices, name) == expected

    found = stage.command("trace", "run.1", "--runs", str(stage.out))
    assert {task["task"] for task in found["tasks"]} == names
    for task in found["tasks"]:
        assert task["outcome"] == "accepted"
        assert 0 <= task["fetch_s"] + task["work_s"] <= task["total_s"]
        assert 0 <= task["accept_s"] <= task["total_s"]
    name = str(TaskName("run", 1, SINGLE, "train", 1))
    arguments = ["trace", name, "--runs", str(stage.out), "--log", str(stage.log_path(SINGLE))]
    [task] = stage.command(*arguments)["tasks"]
    order = [step["event"] for step in task["steps"]]
    expected = ["task asked", "task received", "blobs fetched", "task done", "result received", "result accepted"]
    assert [event for event in order if event in expected][: len(expected)] == expected
    assert {step["source"] for step in task["steps"]} == {"coordinator", "record", "device"}


def test_spans_of_a_round_have_those_of_its_tasks_and_of_devices_below(stage: Stage) -> None:
    with receive_spans() as receiver:
        stage.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
        serve(stage)
        spans = {span.span: span for span in receiver.spans}
    [whole] = [span for span in spans.values() if not span.parent]
    assert (whole.name, whole.service) == ("round 1", COORDINATOR)
    assert whole.attributes == {"fedvit.run": "run", "fedvit.round": 1}
    assert {span.trace for span in spans.values()} == {whole.trace}
    tasks = [span for span in spans.values() if span.parent == whole.span]
    names = {str(TaskName("run", 1, device, kind, 1)) for device in DEVICES for kind in KINDS}
    assert {span.attributes["fedvit.task"] for span in tasks} == names
    assert {span.attributes["fedvit.outcome"] for span in tasks} == {"accepted"}
    for task in tasks:
        kind, device = task.attributes["fedvit.kind"], task.attributes["fedvit.device"]
        steps = sorted((span for span in spans.values() if span.parent == task.span), key=lambda span: span.began_ns)
        assert [span.name for span in steps] == ["fetch", kind, "upload"]
        assert {(span.service, span.attributes["fedvit.device"]) for span in steps} == {(DEVICE, device)}
        assert {span.attributes["fedvit.task"] for span in steps} == {task.attributes["fedvit.task"]}
        assert task.began_ns < steps[0].began_ns <= steps[0].ended_ns <= steps[1].ended_ns
    assert len(spans) == 1 + len(names) * 4
    assert not any(span.is_error for span in spans.values())


def test_collector_that_is_away_or_hangs_delays_nothing(stage: Stage, tmp_path: Path) -> None:
    """One device has a collector that is away, all others one that accepts connections and never answers."""
    with socket.socket() as unused, receive_spans() as receiver:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        receiver.hangs = True
        stage.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.endpoint
        stage.environment["OTEL_BSP_SCHEDULE_DELAY"] = "100"  # ms
        coordinator = stage.coordinator(values=VALUES)
        hosted = host(stage)
        stage.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{unused.getsockname()[1]}"
        device = stage.device(SINGLE)
        assert stage.finish(coordinator, "coordinator") == 0, stage.log("coordinator")
        assert stage.finish(hosted, "host") == 0, stage.log("host")
        assert stage.finish(device, SINGLE) == 0, stage.log(SINGLE)
        assert receiver.asked
        assert not receiver.spans
    assert stage.show()["rounds"][0]["accepted"] == len(DEVICES)
