"""Logs of devices: sent with a failure, recorded, and shown."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.record.devices import LOGS_KEPT
from coordinator.record.record import Record
from coordinator.record.tables import DeviceLog
from fedvit.errors import ConfigError
from fedvit.wire.messages import Failed
from tests.support.codes import has_code
from tests.support.records import RUN, begin_run
from tests.support.runs import Fake, Stage, Task, honest


def fails_with_log(device: Fake, task: Task) -> None:
    device.on_task = honest
    device.say(Failed(task.run, task.round, task.kind, "disk full", log="one\n\x1b[31mtwo"))


def test_log_of_a_device_that_failed_is_recorded_and_shown(stage: Stage) -> None:
    stage.fake("a", fails_with_log)
    stage.fake("b")
    stage.start(devices=2)
    assert stage.finish() == "finished"
    [log] = stage.store.devices.read_logs("a")
    assert (log.run, log.round, log.kind, log.reason) == ("r", 1, "train", "disk full")
    shown = CliRunner().invoke(cli, ["logs", "a", "--runs", str(stage.out)], catch_exceptions=False).output
    assert shown.splitlines() == [f"{log.at} run r, round 1, train: disk full", "  one", r"  \u001b[31mtwo"]
    arguments = ["logs", "a", "--run", "r", "--json", "--runs", str(stage.out)]
    [entry] = json.loads(CliRunner().invoke(cli, arguments, catch_exceptions=False).output)
    assert (entry["device"], entry["lines"]) == ("a", "one\n\x1b[31mtwo")
    with pytest.raises(ConfigError, check=has_code("FV1610")):
        CliRunner().invoke(cli, ["logs", "b", "--runs", str(stage.out)], catch_exceptions=False)


def test_only_the_newest_logs_of_a_device_stay(tmp_path: Path) -> None:
    store: Record = begin_run(tmp_path)
    for number in range(LOGS_KEPT + 5):
        for device in ("a", "b"):
            store.devices.add_log(DeviceLog(RUN, number, device, "train", "why", "2026-11-22T12:00:00+00:00", "line"))
    assert [log.round for log in store.devices.read_logs("a", RUN)] == list(range(5, LOGS_KEPT + 5))
    store.runs.remove(RUN)
    assert store.devices.read_logs("a") == []
    store.close()
