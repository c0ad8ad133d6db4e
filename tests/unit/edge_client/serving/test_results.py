import json
import os
import resource
import sys
from pathlib import Path

import pytest

from edge_client.serving import results
from edge_client.serving.models import Classification
from edge_client.serving.results import ResultFile, make_line
from export.bundle.read import ClassProbability
from fedvit.errors import StorageFailed
from fedvit.terminal import GuardedStream


def predict(*, is_unsure: bool = False) -> Classification:
    answers = [ClassProbability("cat", 0.75), ClassProbability("dog", 0.25)]
    return Classification("street-1", "cat", 0.75, is_unsure, answers, 0.01)


def test_lines_of_answers_and_errors(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "lines")
    file.write(make_line("camera", "1.jpg", predict()))
    file.write(make_line("camera", "2.jpg", predict(is_unsure=True)))
    file.write(make_line("camera", "3.jpg", None, "damaged"))
    sure, unsure, error = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (sure["label"], sure["confidence"], sure["model"]) == ("cat", 0.75, "street-1")
    assert sure["answers"] == [{"label": "cat", "confidence": 0.75}, {"label": "dog", "confidence": 0.25}]
    assert "label" not in unsure
    assert (error["picture"], error["error"]) == ("3.jpg", "damaged")


def test_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_RESULTS_BYTES", 1000)
    file = ResultFile(tmp_path / "lines")
    for number in range(50):
        file.write(make_line("camera", f"{number}.jpg", predict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "lines.1"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert "49.jpg" in (tmp_path / "lines").read_text()


def test_line_that_does_not_fit_leaves_no_half(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "lines")
    file.write(make_line("camera", "1.jpg", predict()))
    room, before = (tmp_path / "lines").stat().st_size + 10, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(StorageFailed):
            file.write(make_line("camera", "2.jpg", predict()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.write(make_line("camera", "3.jpg", predict()))
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["picture"] for line in lines] == ["1.jpg", "3.jpg"]


def test_full_disk_is_reported() -> None:
    with pytest.raises(StorageFailed):
        ResultFile(Path("/dev/full")).write(make_line("camera", "1.jpg", predict()))


def test_standard_output_of_the_program_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", GuardedStream(sys.stdout))
    ResultFile(Path("-")).write(make_line("camera", "\u202e1.jpg", predict()))
    line = capsys.readouterr().out
    assert line.rstrip("\n").isprintable()
    assert json.loads(line)["picture"] == "\u202e1.jpg"


def test_name_that_is_not_utf8_has_a_line(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    file = ResultFile(tmp_path / "lines")
    file.write(make_line("camera", name, predict()))
    file.write(make_line("camera", name, None, f"cannot read image /camera/{name}"))
    answer, error = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (answer["picture"], answer["label"]) == (r"caf\udce9.jpg", "cat")
    assert error["error"].endswith(r"caf\udce9.jpg")
