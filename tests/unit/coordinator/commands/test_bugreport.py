"""The coordinator's report of a fault: whole for a run, useful without one, and without its secrets."""

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.runs import Stage


def read_report(file: Path) -> dict[str, str]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_report_of_a_run(stage: Stage, tmp_path: Path) -> None:
    stage.fake("a")
    stage.start(devices=1)
    assert stage.finish() == "finished"
    (stage.out / "service.log").write_text('{"message": "calls https://hooks.example.com/T1", "password": "pw-77"}\n')
    out = tmp_path / "report.zip"
    CliRunner().invoke(cli, ["bugreport", "--runs", str(stage.out), "--out", str(out)], catch_exceptions=False)
    files = read_report(out)
    assert json.loads(files["runs.json"])[0]["status"] == "finished"
    assert json.loads(files["show.json"])["method"]
    assert json.loads(files["versions.json"])["packages"]["torch"]
    assert "pw-77" not in files["service.log"]
    assert "hooks.example.com/[PATH]" in files["service.log"]
    assert str(tmp_path) not in "".join(files.values())
    with pytest.raises(ConfigError, check=has_code("FV1601", "no-such")):
        CliRunner().invoke(
            cli, ["bugreport", "no-such", "--runs", str(stage.out), "--out", str(out)], catch_exceptions=False
        )


def test_report_without_a_record_says_so(tmp_path: Path) -> None:
    out = tmp_path / "report.zip"
    CliRunner().invoke(cli, ["bugreport", "--runs", str(tmp_path / "none"), "--out", str(out)], catch_exceptions=False)
    files = read_report(out)
    assert files["failed.txt"].startswith("FV")
    assert "versions.json" in files
