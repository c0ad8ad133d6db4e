"""A device's report of a fault has checks and settings, and nothing that its owner keeps private."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli
from edge_client.health.history import LastError
from edge_client.health.status import ClassImages, Doing, Status, Unusable
from tests.support.planted import LINES, WORDS, find_planted, read_report

OWN = [
    "pa55word",
    "h0mely",
    "hedgehog",
    "Füchse am Tag",
    "blackbird",
    "garden-pictures",
    "party",
    "notes of mine",
    "gone.heic",
]
"""Secrets of this test: a password, folders and files of the owner."""


def make_images(folder: Path) -> None:
    for name in ("hedgehog", "Füchse am Tag", "unlabelled"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32)).save(folder / name / f"{number}.png")
    (folder / "hedgehog" / "party 1.jpg").write_bytes(b"\xff\xd8 damaged")
    (folder / "hedgehog" / "notes of mine.txt").write_text("x")
    (folder / "blackbird").mkdir()


def write_status(state: Path, folder: Path) -> None:
    """Write the status that an earlier process of the device left: it names files, and the words of an error."""
    doing = Doing(
        state="waiting for a task",
        last_error=LastError(what=f"cannot read {folder}/hedgehog/gone.heic; {LINES}", at_s=0),
        classes={"hedgehog": ClassImages(3, 0), "Füchse am Tag": ClassImages(2, 1)},
        unusable={"of an unknown type": Unusable(1, ("hedgehog/notes of mine.txt",))},
    )
    status = Status(
        device="pi-1", federation="home", broker="mqtt://127.0.0.1:1", software="0", process=1, started_s=0,
        written_s=0, doing=doing, rss_bytes=1, peak_rss_bytes=None, memory_budget_bytes=None,
    )  # fmt: skip
    (state / "status.json").write_bytes(msgspec.json.encode(status))


def test_report_holds_no_planted_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that a report reads has secrets: environment, options, policy, state, status, journal."""
    images, state = tmp_path / "garden-pictures", tmp_path / "state"
    make_images(images)
    state.mkdir()
    (state / "blobs").mkdir()
    (state / "blobs" / "party 1.jpg").touch()
    write_status(state, images)
    (tmp_path / "policy.toml").write_text("[send]\nlogs = true\n")
    (tmp_path / "password").write_text("pa55word\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "journal").write_text(f"{LINES}read {images}/blackbird/old one.heic; blackbird, 'Füchse am Tag'\n")
    (programs / "journalctl").write_text(f"#!/bin/sh\ncat '{tmp_path}/journal'\n")
    (programs / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("FEDVIT_BROKER", "mqtt://ann:pa55word@127.0.0.1:1")
    monkeypatch.setenv("FEDVIT_HOME_BROKER", "mqtt://ann:h0mely@127.0.0.1:1")
    out = tmp_path / "report.zip"
    command = [
        "--data", str(images), "--state", str(state), "--policy", str(tmp_path / "policy.toml"),
        "--prometheus-password-file", str(tmp_path / "password"), "--prometheus", "9108",
        "bugreport", "--out", str(out),
    ]  # fmt: skip
    shown = CliRunner().invoke(cli, command, catch_exceptions=False).output
    files = read_report(out)
    assert {"versions.json", "settings.json", "doctor.txt", "status.json", "state.txt", "log.txt"} == files.keys()
    assert find_planted(files, [*WORDS, *OWN]) == {}
    assert "joined mqtt://[USER]@broker.lan:1883 again" in files["log.txt"]
    assert "broker" in files["doctor.txt"]
    for name in files:
        assert shown.index(f"  {name}") < shown.index("written: "), "the list comes first"


def test_report_with_a_log_of_its_own(tmp_path: Path) -> None:
    make_images(tmp_path / "garden-pictures")
    log, out = tmp_path / "client.log", tmp_path / "report.zip"
    log.write_text(f"started mqtt://ann:pa55word@127.0.0.1:1 with {tmp_path}/garden-pictures/hedgehog/0.png\n")
    command = ["--broker", "mqtt://ann:pa55word@127.0.0.1:1", "--data", str(tmp_path / "garden-pictures")]
    command += ["--state", str(tmp_path / "state"), "bugreport", "--out", str(out), "--log", str(log)]
    CliRunner().invoke(cli, command, catch_exceptions=False)
    files = read_report(out)
    assert find_planted(files, OWN) == {}
    assert files["log.txt"].startswith("started [SECRET] with [PATH]")
