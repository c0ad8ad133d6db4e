"""Runs of MLflow in a database on this disk, read by MLflow's own client."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.config import RunConfig
from coordinator.record.record import Record
from coordinator.views.trackers.following import following
from coordinator.views.trackers.mlflow import FILE, MLFLOW_ENVIRONMENT, MlflowRun
from tests.support.records import RUN
from tests.support.waiting import wait_until

Configured = Callable[..., RunConfig]
Close = Callable[[int], None]

os.environ.update(MLFLOW_ENVIRONMENT)  # before anything here imports it


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def wait_for_rounds(folder: Path, uri: str, rounds: list[int]) -> None:
    """Wait until MLflow has these rounds: the end of a run does not wait for long, and MLflow is slow to start."""
    from mlflow import MlflowClient

    def are_written() -> bool:
        if not (folder / FILE).is_file():
            return False
        known = msgspec.json.decode((folder / FILE).read_bytes(), type=MlflowRun)
        if known.uri != uri:
            return False
        history = MlflowClient(tracking_uri=uri).get_metric_history(known.run, "devices/accepted")
        return [entry.step for entry in history] == rounds

    wait_until(are_written, f"MLflow at {uri} has rounds {rounds}", pause_s=0.1)


@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_run_of_mlflow(
    store: Record, configured: Configured, close_round: Close, tmp_path: Path, uri: str
) -> None:
    """The run that is resumed has more rounds; what it began with stays as its parameters."""
    from mlflow import MlflowClient

    said: list[str] = []
    config = configured("mlflow", mlflow_uri=uri, mlflow_experiment="ants")
    with following(RUN, config, store, tmp_path / RUN, said.append, label="the first"):
        wait_for_rounds(tmp_path / RUN, uri, [1])
        store.runs.update(RUN, status="interrupted")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ants")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("the first", "KILLED")
    with following(RUN, config, store, tmp_path / RUN, said.append):
        close_round(2)
        close_round(3)
        wait_for_rounds(tmp_path / RUN, uri, [1, 2, 3])
        store.runs.update(RUN, status="finished")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["method"], run.data.params["privacy.noise_multiplier"]) == ("eftvit", "0.0")
    history = client.get_metric_history(run.info.run_id, "accuracy/mean")
    assert [(entry.step, entry.value) for entry in history] == [(1, pytest.approx(1.75 / 3)), (2, 0.5), (3, 0.5)]
    record = store.rounds.read(RUN, 1)
    assert record is not None
    assert record.closed_at is not None
    assert [entry.step for entry in client.get_metric_history(run.info.run_id, "devices/accepted")] == [1, 2, 3]
    assert said == []


@pytest.mark.slow
def test_a_run_goes_to_another_server_as_a_whole(
    store: Record, configured: Configured, close_round: Close, tmp_path: Path, uri: str
) -> None:
    from mlflow import MlflowClient

    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    for place, rounds in ((uri, [1]), (elsewhere, [1, 2])):
        with following(RUN, configured("mlflow", mlflow_uri=place), store, tmp_path / RUN, print):
            wait_for_rounds(tmp_path / RUN, place, rounds)
        close_round(2)
    client = MlflowClient(tracking_uri=elsewhere)
    experiment = client.get_experiment_by_name("fedvit")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert [entry.step for entry in client.get_metric_history(run.info.run_id, "loss/train")] == [1, 2]


@pytest.mark.slow
def test_a_run_that_mlflow_lost_is_written_anew(
    store: Record, configured: Configured, tmp_path: Path, uri: str
) -> None:
    """As where its database was replaced by an empty one."""
    from mlflow import MlflowClient

    file = tmp_path / RUN / FILE
    file.parent.mkdir()
    file.write_bytes(msgspec.json.encode(MlflowRun(uri, "0" * 32)))
    with following(RUN, configured("mlflow", mlflow_uri=uri), store, tmp_path / RUN, print):
        pass
    known = msgspec.json.decode(file.read_bytes(), type=MlflowRun)
    history = MlflowClient(tracking_uri=uri).get_metric_history(known.run, "loss/train")
    assert [(entry.step, entry.value) for entry in history] == [(1, 1.5)]


def test_a_server_that_never_answers_holds_up_nothing(
    store: Record, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections and says nothing: the end of the run waits for a second here."""
    monkeypatch.setattr("coordinator.views.trackers.following.PATIENCE_S", 1.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with following(RUN, configured("mlflow", mlflow_uri=uri), store, tmp_path / RUN, said.append):
            pass
        assert said == [
            f"the last metrics are not written to MLflow at {uri}; to write them later: "
            f"coordinator show {RUN} --track --runs {store.database.folder}"
        ]


@pytest.mark.slow
def test_server_without_answer_is_reported(store: Record, configured: Configured, tmp_path: Path) -> None:
    """Nobody listens on that port."""
    said: list[str] = []
    config = configured("mlflow", mlflow_uri="http://127.0.0.1:9")
    with following(RUN, config, store, tmp_path / RUN, said.append):
        pass
    trouble, missing = said
    assert trouble.startswith("metrics are not written to MLflow at http://127.0.0.1:9: API request to ")
    assert "Check that the server runs, and mlflow_uri" in trouble
    assert missing.endswith(f"coordinator show {RUN} --track --runs {store.database.folder}")
