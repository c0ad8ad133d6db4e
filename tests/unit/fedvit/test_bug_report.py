"""A report of a fault holds no secret, whatever file it comes from."""

import zipfile
from pathlib import Path

import pytest

from fedvit.bug_report import MAX_FILE_BYTES, BugReport

KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIHh4eHh4eHh4\n-----END PRIVATE KEY-----"
SECRETS = {
    "broker": ("joined mqtt://fedvit:hunter2@broker.lan:1883 again", ["hunter2"]),
    "record": ("postgresql+psycopg://ann:s3cr%t@db:5432/fedvit", ["s3cr%t"]),
    "token": ("edge-client join fedvit1-abcDEF_123-xyz --state x", ["abcDEF_123-xyz"]),
    "webhook": ('url = "https://hooks.example.com/services/T000/B000/XXXX"', ["T000", "XXXX"]),
    "signed": ("GET https://s3.example.com/b/k?X-Amz-Signature=deadbeef&x=1 403", ["deadbeef"]),
    "toml": ('password = "open sesame"\nport = 1', ["open sesame"]),
    "json": ('{"aws_secret_access_key": "wJalrXUtnFEMI", "n": 1}', ["wJalrXUtnFEMI"]),
    "environment": ("FEDVIT_BROKER_PASSWORD=abc123 coordinator serve", ["abc123"]),
    "header": ("Authorization: Bearer-eyJhbGciOi", ["eyJhbGciOi"]),
    "key": (f"found {KEY} in a file", ["MC4CAQ"]),
    "cut key": (KEY[:50], ["MC4CAQ"]),
    "account": ("key id AKIAIOSFODNN7EXAMPLE was refused", ["AKIAIOSFODNN7EXAMPLE"]),
    "people": ("mail ann.b@example.org from 192.168.7.21, b8:27:eb:12:34:56", ["ann.b", "192.168.7.21", "b8:27:eb"]),
}


@pytest.mark.parametrize(("text", "secrets"), SECRETS.values(), ids=SECRETS)
def test_secrets_of_every_form_are_removed(tmp_path: Path, text: str, secrets: list[str]) -> None:
    report = BugReport(environment={})
    report.add("log.txt", f"before\n{text}\nafter\n")
    report.add_object("log.json", {"line": text})
    report.write(tmp_path / "report.zip")
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        for name in archive.namelist():
            content = archive.read(name).decode()
            assert not [secret for secret in secrets if secret in content], content
        assert archive.read("log.txt").decode().startswith("before\n"), "what is no secret stays"


def test_values_of_the_environment_and_own_words_are_removed() -> None:
    report = BugReport({"/home/ann/pets", "tabby", "cat", "7"}, {"FEDVIT_BROKER": "mqtt://ann:pw@x", "HOME": "/root"})
    hidden = report.hide("mqtt://ann:pw@x trains /home/ann/pets/tabby: 7 of cat, category 7")
    assert hidden == "[SECRET] trains [NAME]/[NAME]: 7 of [NAME], category 7"


def test_what_helps_stays() -> None:
    line = "2026-11-26 08:00:01 E round closed  round=7 version=1.2.3 broker=127.0.0.1:1883 FV1203 blake3:0a1b2c"
    assert BugReport(environment={}).hide(line) == line


def test_files_that_are_missing_or_too_long(tmp_path: Path) -> None:
    long = tmp_path / "long.log"
    long.write_text("first\n" + "x" * MAX_FILE_BYTES + "\nlast\n")
    report = BugReport(environment={})
    report.add_file("long.log", long)
    report.add_file("none.log", tmp_path / "none.log")
    report.add_machine()
    report.add_folder("files.txt", tmp_path)
    assert report.write(tmp_path / "report.zip") == ["long.log", "none.log", "versions.json", "files.txt"]
    assert (tmp_path / "report.zip").stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        text = archive.read("long.log").decode()
        assert text.endswith("last\n")
        assert "first" not in text
        assert "cannot be read" in archive.read("none.log").decode()
        assert '"fedvit"' in archive.read("versions.json").decode()
        assert "long.log" in archive.read("files.txt").decode()
