"""A report of a fault holds no secret, whatever file it comes from."""

import json
import os
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from fedvit.bug_report import MAX_FILE_BYTES, MAX_REPORT_BYTES, BugReport, print_and_write
from fedvit.errors import StorageFailed
from tests.support.codes import has_code
from tests.support.planted import KEY, SECRETS, read_report


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
    report = BugReport(
        {"/home/ann/pets", "tabby", "cat", "7", "token"},
        {"FEDVIT_BROKER": "mqtt://ann:p%40w7@x", "HOME": "/root", "FEDVIT_ALERTS_WEBHOOK": "http://h.example/hook"},
        secrets=["s3cret!"],
    )
    hidden = report.hide("mqtt://ann:p%40w7@x trains /home/ann/pets/tabby: 7 of cat, category 7")
    assert hidden == "[SECRET] trains /home/[NAME]/pets/[NAME]: 7 of [NAME], category 7"
    assert report.hide("p@w7 at http://h.example/hook, xs3cret!x, token=abc") == (
        "[SECRET] at [SECRET], x[SECRET]x, [NAME]=[SECRET]"
    )


def test_names_are_found_in_all_forms() -> None:
    names = {"Füchse am Tag", 'a"b c', "it's", "IMG 1 (2).heic", "x.notes", "B\udcffr"}
    report = BugReport(names, {})
    for name in names:
        for text in (
            repr(name),
            json.dumps(name),
            quote(os.fsencode(name)),
            os.fsencode(name).decode(errors="replace"),
        ):
            assert "[NAME]" in report.hide(f"of {text}: x"), text
    assert BugReport({"cat"}, {}).hide("cat cats concat cat_7 cat-7") == "[NAME] cats concat cat_7 [NAME]-7"


def test_paths_in_a_folder_are_removed_whole_and_what_helps_stays() -> None:
    report = BugReport(environment={}, folders=[Path("/srv/my pets")])
    line = "not read  path='/srv/my pets/old cat/was removed.txt' reason=damaged"
    assert report.hide(line) == "not read  path='[PATH] reason=damaged"
    assert report.hide('{"a": "/srv/my pets/old \\" cat", "b": 1}') == '{"a": "[PATH]", "b": 1}'
    line = "2026-11-26 08:00:01 E round closed  round=7 version=1.2.3 broker=127.0.0.1:1883 FV1203 blake3:0a1b2c"
    assert BugReport(environment={}).hide(line) == line


def test_a_cut_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    """The rest of a line, or of a key, could be a secret whose name was cut off."""
    log = tmp_path / "long.log"
    log.write_text(f"{KEY}\npassword = abc\n{'x' * (MAX_FILE_BYTES - 50)}\nlast\n")
    report = BugReport(environment={})
    report.add_file("long.log", log)
    report.add("key.txt", f"{KEY[30:]}\nafter")
    report.write(tmp_path / "report.zip")
    files = read_report(tmp_path / "report.zip")
    assert files["long.log"].endswith("\nlast\n")
    assert "abc" not in files["long.log"]
    assert files["key.txt"] == "[PRIVATE KEY]\nafter"


def test_report_is_bounded(tmp_path: Path) -> None:
    report = BugReport(environment={})
    for number in range(15):
        report.add(f"{number}.txt", "ä line\n" * (MAX_FILE_BYTES // 7))
    report.write(tmp_path / "report.zip")
    sizes = [len(text.encode()) for text in read_report(tmp_path / "report.zip").values()]
    assert max(sizes) <= MAX_FILE_BYTES
    assert sum(sizes) <= MAX_REPORT_BYTES
    assert len(sizes) == 15


def test_files_are_shown_before_the_report_is_written(tmp_path: Path) -> None:
    report = BugReport(environment={})
    report.add("log.txt", "a line\n")
    shown: list[str] = []

    def write() -> None:
        with CliRunner().isolation() as (out, *_):
            try:
                print_and_write(report, tmp_path / "no folder" / "x.zip")
            finally:
                shown.append(out.getvalue().decode())

    (tmp_path / "no folder").write_text("a file in the way")
    with pytest.raises(StorageFailed, check=has_code("FV0010")):
        write()
    assert "log.txt  7 B" in shown[0]
    assert "written" not in shown[0]


def test_files_that_are_missing_or_too_long(tmp_path: Path) -> None:
    long = tmp_path / "long.log"
    long.write_text("first\n" + "x" * MAX_FILE_BYTES + "\nlast\n")
    report = BugReport(environment={})
    report.add_file("long.log", long)
    report.add_file("none.log", tmp_path / "none.log")
    report.add_machine()
    report.add_folder("files.txt", tmp_path)
    report.write(tmp_path / "report.zip")
    assert list(read_report(tmp_path / "report.zip")) == ["long.log", "none.log", "versions.json", "files.txt"]
    assert (tmp_path / "report.zip").stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        text = archive.read("long.log").decode()
        assert text.endswith("last\n")
        assert "first" not in text
        assert "cannot be read" in archive.read("none.log").decode()
        assert '"fedvit"' in archive.read("versions.json").decode()
        assert "long.log" in archive.read("files.txt").decode()
