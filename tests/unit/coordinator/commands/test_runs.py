"""`coordinator runs`, `show`, `status` and `report`: all of them say the same of a run."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from coordinator.commands.report import report
from coordinator.commands.runs import runs
from coordinator.commands.show import show
from coordinator.commands.status import status
from coordinator.config import make_config
from coordinator.record.summary import RunHead
from coordinator.run.status import FILE, Status
from tests.support.records import RUN, begun_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run of `begun_run`, which is served, and one that waits, with other settings."""
    store = begun_run(tmp_path)
    config = make_config({"method": "fedavg", "devices": 4, "options": {"lr": 0.1}}, "test").run
    store.create_run("other", msgspec.to_builtins(config))
    store.close()
    for run in (RUN, "other"):
        (tmp_path / run).mkdir()
        doing = Status(at=datetime.now(UTC).isoformat(), doing="training", waiting_for=[], backing_off=[], online=2)
        (tmp_path / run / FILE).write_bytes(msgspec.json.encode(doing))
    return tmp_path


def said(command: click.Command, *arguments: object) -> str:
    done = CliRunner().invoke(command, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("run", [RUN, "other"])
def test_all_commands_agree_on_a_run(folder: Path, run: str) -> None:
    shown = json.loads(said(show, run, "--runs", folder, "--json"))
    [listed] = [entry for entry in json.loads(said(runs, "--runs", folder, "--json")) if entry["run"] == run]
    served = json.loads(said(status, run, "--runs", folder, "--json"))
    reported = json.loads(said(report, run, "--runs", folder, "--json"))
    head = {name: shown[name] for name in RunHead.__struct_fields__}
    assert head == {name: listed[name] for name in head} == {name: served[name] for name in head}
    begun: dict[str, Any] = head | {"started_at": head["created_at"]}
    del begun["created_at"]  # of a report it is the document's own
    assert begun == {name: reported[name] for name in begun}
    assert listed["rounds"] == len(shown["rounds"]) == len(reported["rounds"])
    for entry, told in zip(shown["rounds"], reported["rounds"], strict=True):
        both = entry.keys() & told.keys()
        assert {"round", "cohort", "accepted", "accuracy_mean", "train_loss", "bytes_down", "bytes_up"} <= both
        assert {name: entry[name] for name in both} == {name: told[name] for name in both}
        assert told["devices_s"] == entry["figures"].get("devices_s")
    assert (served["doing"], served["online"], served["stale"]) == ("training", 2, False)


def test_two_runs_are_distinguished_by_their_settings(folder: Path) -> None:
    assert "settings: seed = 7, rounds = 3" in said(show, RUN, "--runs", folder)
    assert 'settings: method = "fedavg", options.lr = 0.1, devices = 4' in said(show, "other", "--runs", folder)
    assert 'settings: method = "fedavg", options.lr = 0.1, devices = 4' in said(report, "other", "--runs", folder)
