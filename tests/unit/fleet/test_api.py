"""Runs from Python: docs/python.md is executed, and what its code made is looked at."""

import io
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

from coordinator.cli import cli
from coordinator.record.record import open_record
from coordinator.rounds.display import Display
from fedvit.errors import ConfigError, FedvitError
from fleet import api
from fleet.api import FinishedRun, run
from tests.support.codes import has_code

PAGE = Path(__file__).parents[3] / "docs" / "python.md"


class Executed(NamedTuple):
    """What the page's code made, said and left."""

    names: dict[str, Any]
    printed: str
    progress: str
    folder: Path

    @property
    def result(self) -> FinishedRun:
        found = self.names["result"]
        assert isinstance(found, FinishedRun)
        return found


@pytest.fixture(scope="module", autouse=True)
def page(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Executed]:
    """The page's code, run block after block; whatever it shows of the output has the words of what was printed."""
    names: dict[str, Any] = {}
    everything, progress = "", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("notebook")
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        printed = ""
        for language, text in re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
            if language == "text":
                for line in text.splitlines():
                    assert words(line) <= words(printed), line
                continue
            assert language == "python"
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(progress):
                exec(text, names)
            printed = out.getvalue()
            everything += printed
        yield Executed(names, everything, progress.getvalue(), folder)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{2,}", text))


@pytest.mark.slow
def test_page_shows_the_tables_of_its_run(page: Executed) -> None:
    assert "run first: fedper on vit_small_images, finished, 3 of 3 rounds, seed 0" in page.printed
    assert page.printed.count("run(): unknown method 'fedav'; did you mean 'fedavg'") == 1
    assert page.result.accuracy is not None
    assert list(page.names["reached"]) == ["fedavg", "fedper"]
    assert len(page.names["losses"]) == 3


@pytest.mark.slow
def test_progress_is_that_of_the_commands_and_can_be_left_out(page: Executed) -> None:
    """The two runs of the page that are quiet say nothing, and the one that is finished has no round to tell."""
    assert len(re.findall(r"^round +\d/3", page.progress, re.MULTILINE)) == 3, page.progress


def test_a_finished_run_is_returned_as_it_is(page: Executed) -> None:
    again = page.names["again"]
    assert again.summary == page.result.summary


@pytest.mark.slow
def test_seconds_are_those_of_the_whole_call(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least those of its parts one after another, at most those around it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    parts: list[float] = []

    def time_call(part: Callable[..., Any]) -> Callable[..., Any]:
        def work(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return part(*given, **named)
            finally:
                parts.append(time.monotonic() - began)

        return work

    for name in ("check_run", "deal", "simulate"):
        monkeypatch.setattr(api, name, time_call(getattr(api, name)))
    settings = {"rounds": 1, "model_options": {"patch_size": 8, "width": 32, "depth": 2, "heads": 2}}
    began = time.monotonic()
    result = run(dataset="digits", devices=2, method="fedavg", out=tmp_path / "runs", progress=False, **settings)
    outer = time.monotonic() - began
    assert len(parts) == 3
    assert sum(parts) <= result.seconds <= outer


def test_figures_are_those_of_the_command(page: Executed) -> None:
    figures = json.loads(json.dumps(page.result.to_dict()))
    assert figures.pop("seconds") > 0
    assert page.folder / figures.pop("folder") == page.folder / "runs" / "first"
    shown = CliRunner().invoke(cli, ["show", "first", "--json", "--runs", str(page.folder / "runs")])
    assert figures == json.loads(shown.stdout)


def test_tensors_of_the_server_and_of_a_device(page: Executed) -> None:
    assert page.names["backbone"].shape == (96, 32)
    assert page.names["head"].shape == (10, 32)
    own = [page.result.tensors(f"device-{number}") for number in range(3)]
    assert all(list(tensors) == list(own[0]) for tensors in own)
    assert all(name.startswith("head.") for name in own[0])
    assert not np.array_equal(own[0]["head.weight"], own[1]["head.weight"])
    with pytest.raises(ConfigError, check=has_code("FV1904")):
        page.result.tensors("pi-1")


def test_a_result_shows_itself(page: Executed) -> None:
    line, html = repr(page.result), page.result._repr_html_()
    assert re.fullmatch(r"<run first: 3 rounds, accuracy 0\.\d{3}, [\d.]+ s, in runs/first>", line)
    assert "device-2" in str(page.result)
    assert "Finished: 3 of 3 rounds" in html
    assert html.count("<table") == html.count("</table>") == 2
    assert html.count("<svg") == 1


class Stopped(Display):
    """Ctrl-C as soon as the first round is over."""

    def line(self, text: str) -> None:
        if text.startswith("round   1/"):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_resumed(page: Executed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the tensors of the page's run, which was not."""
    settings: dict[str, Any] = {**page.names["settings"], "method": "fedper", "out": tmp_path, "name": "broken-off"}
    parts = page.folder / "runs" / "first" / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(api, "choose_display", lambda quiet: Stopped())
        with pytest.raises(KeyboardInterrupt):
            run(parts, **settings)
    with open_record(tmp_path) as store:
        assert store.runs.read("broken-off").status == "interrupted"
        assert [entry.round for entry in store.rounds.read_all("broken-off") if entry.closed_at] == [1]
    resumed = run(parts, resume=True, progress=False, **settings)
    for device in (None, "device-0"):
        got, expected = resumed.tensors(device), page.result.tensors(device)
        assert got.keys() == expected.keys()
        assert [name for name, value in expected.items() if not np.array_equal(got[name], value)] == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dataset": "digits", "round": 3}, "run(): unknown key 'round'; did you mean 'rounds'?"),
        ({"dataset": "digits", "broker": {"port": 1}}, "run(): unknown key 'broker'"),
        ({"dataset": "digits", "rounds": -1}, "run(): rounds = -1: expected `int` >= 0"),
        (
            {"dataset": "digits", "options": {"maks": 1}},
            "run(): method 'eftvit' has no option 'maks'; did you mean 'mask'",
        ),
        ({"dataset": "digits", "options": {"mask": 1}}, "run(): option mask = 1 of method 'eftvit': "),
        ({"dataset": "digitz"}, "digitz"),
        ({"dataset": "digits", "partition": "dirichlett"}, "partition 'dirichlett' is not known"),
        ({"dataset": "digits", "devices": 0}, "devices is 0, expected >= 1"),
        ({"dataset": "digits", "engine": "troch"}, "run(): unknown engine 'troch'; did you mean 'torch'?"),
        ({"dataset": "digits", "resume": True}, "run(): resume=True needs the run's name"),
        ({"dataset": "digits", "name": "../here"}, "run '../here' must be 1 to 64 letters"),
        ({"dataset": "digits", "name": "first", "out": "runs"}, "run(): runs/first exists already; resume the run"),
        ({}, "run(): expected parts, a folder that was dealt out before, or dataset"),
        (
            {"parts": "parts", "partition": "iid"},
            "run(): expected parts, a folder that was dealt out before, or dataset",
        ),
        ({"parts": "nowhere"}, "nowhere holds no device-0, device-1, ...: make them"),
    ],
)
def test_arguments_that_cannot_be_right_are_refused_before_anything_is_written(
    arguments: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(FedvitError) as refused:
        run(**{"out": tmp_path / "out", **arguments})
    assert complaint in str(refused.value)
    assert not (tmp_path / "out").exists()
