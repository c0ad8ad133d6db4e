"""Writers that follow a run, at a record that grows: TensorBoard's files, read by its own reader."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.config import RunConfig
from coordinator.record.record import Record, open_record
from coordinator.views.trackers.following import following
from coordinator.views.trackers.tensorboard import FOLDER
from tests.support.displays import Lines
from tests.support.event_files import scalars, steps
from tests.support.records import RUN
from tests.support.waiting import wait_until

Configured = Callable[..., RunConfig]
Close = Callable[[int], None]


def test_rounds_are_written_during_the_run(
    store: Record, configured: Configured, close_round: Close, tmp_path: Path
) -> None:
    """The second round is closed only after the first one is in the file."""
    said = Lines()
    with following(RUN, configured("tensorboard"), store, tmp_path / RUN, said.line):
        wait_until(lambda: scalars(tmp_path / RUN), lambda: str(said.lines), pause_s=0.05)
        close_round(2)
        close_round(3)
        store.runs.update(RUN, status="finished")
    written = scalars(tmp_path / RUN)
    assert written["accuracy/mean"] == [(1, pytest.approx(1.75 / 3)), (2, 0.5), (3, 0.5)]
    assert written["accuracy/lowest"] == [(1, pytest.approx(0.35)), (2, 0.5), (3, 0.5)]
    assert written["epsilon/updates"] == [(2, 1.5), (3, 1.5)]
    assert written["bytes/down"][0] == (1, 11e6)
    assert said.lines == []


def test_a_resumed_run_writes_no_round_twice(
    store: Record, configured: Configured, close_round: Close, tmp_path: Path
) -> None:
    """Also where the file of the earlier process ends in the middle of a round, as after kill -9."""
    for number in (2, 3):
        with following(RUN, configured("tensorboard"), store, tmp_path / RUN, Lines().line):
            pass
        if number == 2:
            close_round(2)
    (*_, newest) = sorted((tmp_path / RUN / FOLDER).iterdir())
    newest.write_bytes(newest.read_bytes()[:-10])  # of round 2
    close_round(3)
    with following(RUN, configured("tensorboard"), store, tmp_path / RUN, Lines().line):
        pass
    assert steps(tmp_path / RUN, "devices/accepted") == [1, 2, 3]


def test_settings_are_hyperparameters_of_tensorboard(store: Record, configured: Configured, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for _ in range(2):
        with following(RUN, configured("tensorboard"), store, tmp_path / RUN, Lines().line, label="the first"):
            pass
    found = EventAccumulator(str(tmp_path / RUN / FOLDER)).Reload()
    (content,) = found.PluginTagToContent("hparams").values()
    said = HParamsPluginData.FromString(content).session_start_info
    assert said.group_name == "the first"
    assert said.hparams["seed"].number_value == 7
    assert said.hparams["method"].string_value == "eftvit"


def test_folder_that_cannot_be_written_is_reported_once_and_written_later(
    store: Record, configured: Configured, close_round: Close, tmp_path: Path
) -> None:
    """A file lies where the folder is to be, and is removed later."""
    said = Lines()
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / FOLDER).touch()
    with following(RUN, configured("tensorboard"), store, tmp_path / RUN, said.line):
        wait_until(
            lambda: any("metrics are not written to TensorBoard files in" in line for line in said.lines),
            lambda: str(said.lines),
        )
        close_round(2)
        (tmp_path / RUN / FOLDER).unlink()
    assert len(said.lines) == 2
    assert "Make the folder writable" in said.lines[0]
    assert "again; none are missing" in said.lines[1]
    assert steps(tmp_path / RUN, "devices/accepted") == [1, 2]


def test_a_library_that_is_gone_ends_no_run(
    store: Record, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    said = Lines()
    with following(RUN, configured("mlflow"), store, tmp_path / RUN, said.line):
        pass
    assert "metrics are not written to MLflow: import of mlflow halted" in said.lines[0]
    assert said.lines[-1].endswith(f"coordinator show {RUN} --track --runs {store.database.folder}")


def test_a_run_that_never_begins_leaves_nothing(tmp_path: Path, configured: Configured) -> None:
    with open_record(tmp_path / "fresh") as fresh:
        fresh.runs.create("new", {})
        with following("new", configured("tensorboard"), fresh, tmp_path / "fresh" / "new", Lines().line):
            pass
    assert not (tmp_path / "fresh" / "new").exists()
