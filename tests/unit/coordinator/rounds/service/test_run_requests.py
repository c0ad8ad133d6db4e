"""A run that the operator pauses, served by a real coordinator."""

from pathlib import Path

import pytest

from coordinator.record.record import open_record
from coordinator.rounds.service.run_requests import change_run, pause, unpause
from fedvit.errors import ConfigError
from fedvit.wire.messages import Task
from tests.support.codes import has_code
from tests.support.runs import Fake, Stage

PAUSED = "paused by the operator before round 2"


def pausing(device: Fake, task: Task) -> None:
    """Pause the run in its first round, twice; the second request is refused."""
    store = device.stage.store
    if (task.round, task.kind) == (1, "train"):
        pause(store, "r")
        with pytest.raises(ConfigError, check=has_code("FV1611")):
            pause(store, "r")
    device.bring(device.answer(task))


def is_paused(stage: Stage) -> bool:
    return stage.coordinator is not None and stage.coordinator.state.doing == PAUSED


def test_paused_run_opens_no_round_until_the_pause_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after its process has ended: the pause is in the record."""
    monkeypatch.setattr("coordinator.rounds.pausing.PAUSE_CHECK_S", 0.0)
    stage.fake("a", pausing)
    stage.start(rounds=2)
    stage.drive(lambda: is_paused(stage))
    assert stage.store.rounds.list_closed("r") == [1]
    stage.stop()
    stage.start(rounds=2, resume=True)
    stage.drive(lambda: is_paused(stage))
    assert stage.store.rounds.find_last("r") == 1
    unpause(stage.store, "r")
    assert stage.finish() == "finished"
    assert stage.store.rounds.list_closed("r") == [1, 2]
    with pytest.raises(ConfigError, check=has_code("FV1612")):
        pause(stage.store, "r")
    with pytest.raises(ConfigError, check=has_code("FV1611")):
        unpause(stage.store, "r")


def test_run_of_no_service_is_continued_by_a_command_for_its_folder(tmp_path: Path) -> None:
    with open_record(tmp_path / "my runs") as store:
        store.runs.create("r", {})
        store.runs.update("r", status="failed")
        with pytest.raises(ConfigError, check=has_code("FV1615", f"--resume r --runs '{tmp_path / 'my runs'}'")):
            change_run(store, tmp_path / "my runs", "r", "retry")
