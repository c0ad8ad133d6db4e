"""`coordinator runs`, `show`, `status` and `report`: all of them say the same of a run."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
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
from coordinator.record.liveness import STALE_S, STATUS_FILE
from coordinator.record.record import open_record
from coordinator.rounds.status import LiveStatus
from coordinator.run_view import RunHead, list_progress
from coordinator.views.dashboard.reader import RecordReader
from tests.support.records import RUN, begin_run
from tests.support.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run of `begin_run`, which is served, and one that waits, with other settings."""
    store = begin_run(tmp_path)
    config = make_config({"method": "fedavg", "devices": 4, "options": {"lr": 0.1}}, "test").run
    store.runs.create("other", msgspec.to_builtins(config))
    store.close()
    for run in (RUN, "other"):
        (tmp_path / run).mkdir()
        doing = LiveStatus(at=datetime.now(UTC).isoformat(), doing="training", waiting_for=[], backing_off=[], online=2)
        (tmp_path / run / STATUS_FILE).write_bytes(msgspec.json.encode(doing))
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


def test_run_whose_coordinator_was_killed_is_interrupted_everywhere(folder: Path) -> None:
    """The record still says that it runs; its status file is old."""
    file = folder / RUN / STATUS_FILE
    written = msgspec.json.decode(file.read_bytes(), type=LiveStatus)
    old = datetime.now(UTC) - timedelta(seconds=STALE_S + 5)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(written, at=old.isoformat())))
    told = {
        "show": json.loads(said(show, RUN, "--runs", folder, "--json"))["status"],
        "report": json.loads(said(report, RUN, "--runs", folder, "--json"))["status"],
        "status": json.loads(said(status, RUN, "--runs", folder, "--json"))["status"],
        "runs": {entry["run"]: entry["status"] for entry in json.loads(said(runs, "--runs", folder, "--json"))}[RUN],
    }
    with open_record(folder, check=False, reads_only=True) as store:
        told["dashboard"] = {entry.run: entry.status for entry in list_progress(store)}[RUN]
        assert store.runs.read(RUN).status == "running"
    assert told == dict.fromkeys(told, "interrupted")
    assert f"run {RUN}: interrupted" in said(status, RUN, "--runs", folder)


def test_pages_notice_a_killed_coordinator_although_the_record_does_not_change(folder: Path) -> None:
    store = open_record(folder, check=False, reads_only=True)
    reader = RecordReader(store, folder)

    def listed() -> str:
        return {entry.run: entry.status for entry in asyncio.run(reader(list_progress))}[RUN]

    assert listed() == "running"
    wait_until(lambda: listed() == "interrupted", "the run to be interrupted")
    store.close()


@pytest.mark.parametrize("command", [show, report])
def test_newest_run_is_shown_if_none_is_named(folder: Path, command: click.Command) -> None:
    with open_record(folder) as store:
        newest = next(record.id for record in store.runs.read_all())
        store.runs.submit("later", {})
    assert json.loads(said(command, "--runs", folder, "--json"))["run"] == newest
