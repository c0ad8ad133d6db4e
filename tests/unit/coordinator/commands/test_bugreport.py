"""The coordinator's report of a fault: whole for a run, useful without one, and without its secrets."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.operations.bug_report import LOGS
from coordinator.rounds.service.status import ServiceStatus, write_service_status
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.planted import LINES, WORDS, find_planted, read_report
from tests.support.records import RUN, begin_run
from tests.support.runs import Stage


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, ["bugreport", *arguments], catch_exceptions=False).output


def test_report_of_a_run(stage: Stage, tmp_path: Path) -> None:
    stage.fake("a")
    stage.start(devices=1)
    assert stage.finish() == "finished"
    out = tmp_path / "report.zip"
    shown = invoke("--runs", str(stage.out), "--out", str(out))
    files = read_report(out)
    assert json.loads(files["runs.json"])[0]["status"] == "finished"
    assert json.loads(files["show.json"])["method"]
    assert json.loads(files["versions.json"])["packages"]["torch"]
    for name in files:
        assert shown.index(f"  {name}") < shown.index("written: "), "the list comes first"
    with pytest.raises(ConfigError, check=has_code("FV1601", "no-such")):
        invoke("no-such", "--runs", str(stage.out), "--out", str(out))


def test_report_holds_no_planted_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a report reads has secrets: environment, configuration, status, logs, names of files."""
    monkeypatch.setenv("FEDVIT_ALERTS_WEBHOOK", "https://t0pic.example.net/hook")
    runs = tmp_path / "runs"
    store = begin_run(runs)
    values = {"classes": ["tabby", "siamese cat"], "reason": f"a device sent {LINES}"}
    store.runs.update(RUN, status="failed", **values)
    alerts = {"webhook": "https://hooks.example.com/services/T000/XXXX"}
    store.runs.create("older", {"method": "fedavg", "rounds": 1, "alerts": alerts})
    store.runs.update("older", classes=["burmese"])
    store.close()
    status = ServiceStatus(federation="home", broker="mqtt://ann:hunter2@broker.lan", running=[RUN], members=[])
    write_service_status(runs, status)
    own = "posted to https://t0pic.example.net/hook of tabby, burmese and 'siamese cat'\n"
    for name in ("service.log", *(f"{RUN}/{log}" for log in LOGS)):
        (runs / name).parent.mkdir(exist_ok=True)
        (runs / name).write_text(LINES + own)
    (runs / RUN / "tabby").mkdir()
    (runs / RUN / "tabby" / "20260704-party.JPG").touch()
    for run in (RUN, "older"):
        out = tmp_path / f"{run}.zip"
        invoke(run, "--runs", str(runs), "--out", str(out))
        files = read_report(out)
        assert {"show.json", "service.json", "service.log", "problems.json"} <= files.keys()
        assert find_planted(files, [*WORDS, "t0pic", "tabby", "siamese", "burmese", str(tmp_path)]) == {}
        assert "hooks.example.com/[PATH]" in files["service.log"]
    assert {f"run/{log}" for log in LOGS} <= read_report(tmp_path / f"{RUN}.zip").keys()


def test_report_without_a_record_says_so(tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    invoke("--runs", str(tmp_path / "none"), "--out", str(out))
    files = read_report(out)
    assert files["failed.txt"].startswith("FV")
    assert "versions.json" in files
