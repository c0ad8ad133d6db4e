"""`coordinator evaluate --submit`: a run of zero rounds in the queue of a service."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cli
from coordinator.record.record import Record, open_record
from coordinator.record.tables import SavedState


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run that stopped by its rules after its second round."""
    with open_record(tmp_path) as store:
        config = {"method": "fedavg", "rounds": 9, "devices": 3, "stop": {"patience": 1}, "seed": 7}
        store.runs.create("r", config)
        store.runs.update("r", status="finished", classes=["cat", "dog"], broker={"port": 1})
        for number in (1, 2):
            store.rounds.open("r", number, ["a"])
            store.rounds.close("r", number, SavedState({}, None, {}), {})
            store.rounds.close_evaluation("r", number)
    return tmp_path


def submit(runs: Path, *more: str) -> Result:
    return CliRunner().invoke(cli, ["evaluate", "r", "--runs", str(runs), "--submit", "--run", "scores", *more])


def read(runs: Path) -> Record:
    return open_record(runs)


@pytest.mark.parametrize(("more", "devices"), [([], 3), (["--devices", "2"], 2)])
def test_it_is_queued_without_training_and_stop_rules(runs: Path, more: list[str], devices: int) -> None:
    done = submit(runs, *more)
    assert (done.exit_code, done.output) == (0, "scores\n")
    store = read(runs)
    record = store.runs.read("scores")
    assert record.status == "queued"
    config = record.config
    assert (config["rounds"], config["start_from"], config["start_round"]) == (0, "r", 2)
    assert (config["devices"], list(config["classes"]), config["seed"]) == (devices, ["cat", "dog"], 7)
    assert not any(config["stop"].values())
    assert "broker" not in config
    assert [entry.act for entry in store.audit.read()] == ["submit"]
    store.close()


def test_round_that_is_not_kept_and_a_name_that_is_taken_are_refused(runs: Path) -> None:
    for more, code in ((["--round", "1"], "FV1645"), (["--run", "r"], "FV1613")):
        done = submit(runs, *more)
        assert done.exit_code
        assert getattr(done.exception, "code", None) == code, (done.exception, done.output)
    store = read(runs)
    assert store.runs.read_submitted() == []
    store.close()
