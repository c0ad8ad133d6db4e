"""The trial of a new version: which ends of a task decide it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_client.health import trial
from edge_client.health.history import History
from edge_client.health.trial import Trial
from edge_client.storage.installed import CURRENT, Installation
from fedvit.errors import BadPayload, DeviceTrouble, OverBudget
from fedvit.wire.messages import Task
from tests.support.codes import has_code

TASK = Task("i", 1, "run", 1, "train", 0, "blake3:" + 64 * "a", {}, (), 60.0)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    installation = Installation(tmp_path, "versions/0.2.0", tmp_path / "trial")
    installation.set_link(CURRENT, "versions/0.2.0")
    installation.mark("start")
    return installation


def read_marks(installation: Installation) -> list[str]:
    return [line.split()[1] for line in installation.marks.read_text().splitlines()][1:]


def work(running: Trial, history: History, end: Callable[[], None]) -> None:
    running.look(history, is_working=False)
    running.look(history, is_working=True)
    running.look(history, is_working=True)
    end()
    running.look(history, is_working=False)


def test_first_task_that_is_done_ends_the_trial(installation: Installation) -> None:
    running, history = Trial(installation), History()
    running.begin()
    work(running, history, lambda: history.note_end(TASK, "done"))
    work(running, history, lambda: history.note_end(TASK, "failed", failure=DeviceTrouble("FV1480", "ended")))
    running.close()
    assert read_marks(installation) == ["ready", "task", "done"]


@pytest.mark.parametrize("error", [DeviceTrouble("FV1480", "the process ended twice"), RuntimeError("a fault")])
def test_fault_of_the_device_ends_it(installation: Installation, error: Exception) -> None:
    running, history = Trial(installation), History()
    with pytest.raises(DeviceTrouble, check=has_code("FV1466", str(error))):
        work(running, history, lambda: history.note_end(TASK, "failed", failure=error))
    running.close()
    assert read_marks(installation) == ["task", "failed"]


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ("failed", OverBudget("FV1421", "too long")),
        ("failed", BadPayload("FV2310", "a bad graph")),
        ("declined (hours)", None),
        (None, None),
    ],
)
def test_other_ends_say_nothing(installation: Installation, outcome: str | None, error: Exception | None) -> None:
    """A budget, a broken task, a refusal, a task that was cancelled."""
    running, history = Trial(installation), History()
    for _ in range(2):
        work(running, history, lambda: outcome and history.note_end(TASK, outcome, failure=error))  # type: ignore[func-returns-value]
    assert read_marks(installation) == ["task", "end", "task", "end"]


def test_task_that_is_stopped_with_the_program(installation: Installation) -> None:
    running = Trial(installation)
    running.look(History(), is_working=True)
    running.close()
    assert read_marks(installation) == ["task", "end"]


def test_version_that_is_not_on_trial_writes_nothing(installation: Installation) -> None:
    installation.mark("done")
    running, history = Trial(installation), History()
    running.begin()
    work(running, history, lambda: history.note_end(TASK, "failed", failure=RuntimeError("a fault")))
    assert read_marks(installation) == ["done"]


def test_another_version_is_noticed(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is installed; a return that happened before this start does not count."""
    monkeypatch.setattr(trial, "LOOK_EVERY_S", 0.0)
    running = Trial(installation)
    assert not running.is_over()
    installation.set_link(CURRENT, "versions/0.3.0")
    assert running.is_over()
    assert not Trial(installation).is_over()
