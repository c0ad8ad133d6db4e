"""A federation in one process: devices share threads, runs are resumed, and a device that fails ends the run."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.record.record import open_record
from edge_client.work.runtime import Runtime
from fedvit.errors import ConfigError, PeerRefused
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import Engine, RunRequest
from fleet.shared import WorkQueue
from fleet.simulate import simulate
from tests.support.codes import has_code
from tests.support.event_files import steps
from tests.support.tiny import TINY_MODEL

VALUES: dict[str, Any] = {
    "method": "fedavg", "rounds": 2, "evaluate_every": 2, "options": {"batch_size": 8, "lr": 0.05},
    "model_options": TINY_MODEL,
}  # fmt: skip
DEVICES = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three devices with 1797 digits between them, of which each tests with nine tenths: training takes a moment."""
    out = tmp_path_factory.mktemp("dealt") / "parts"
    deal("digits", "iid", DEVICES, out, DealSettings(test_share=0.9))
    return device_folders(out, None)


class TestWorkQueue:
    def test_so_many_compute_at_a_time(self) -> None:
        """Six devices, two at a time: never three inside, and all get their turn."""
        inside, most, done = 0, 0, 0
        lock = threading.Lock()

        def work() -> None:
            nonlocal inside, most, done
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with lock:
                inside, done = inside - 1, done + 1

        queue = WorkQueue(at_once=2)
        under_way = [queue.begin(work, "work") for _ in range(6)]
        queue.close()
        for turn in under_way:
            turn.join()
        assert (most, done) == (2, 6)


def test_graphs_are_loaded_once(
    folders: list[Path], tmp_path: Path, graph_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three devices, two graphs: two sessions."""
    loaded: list[str] = []
    load: Callable[..., Any] = Runtime._load

    def count_rows(self: Runtime, digest: str, path: Path) -> Any:
        loaded.append(digest)
        return load(self, digest, path)

    monkeypatch.setattr(Runtime, "_load", count_rows)
    summary = simulate(RunRequest(folders, VALUES, out=tmp_path, run="run", graph_cache=graph_cache)).summary
    assert summary.status == "finished"
    assert [entry.accepted for entry in summary.rounds] == [DEVICES] * 2
    assert len(loaded) == len(set(loaded)) == 3  # gradients, update, answers


@pytest.mark.slow
def test_how_many_compute_at_a_time_changes_no_bit(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    for at_once in (1, 3):
        simulate(
            RunRequest(folders, VALUES, out=tmp_path, run=f"by-{at_once}", at_once=at_once, graph_cache=graph_cache)
        )
    models = [(tmp_path / f"by-{at_once}" / "model.safetensors").read_bytes() for at_once in (1, 3)]
    assert models[0] == models[1]


def test_run_that_exists(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    """Again with `resume` it is finished at once, its rounds untouched; with another configuration it is refused."""

    def rounds() -> list[tuple[int, str | None]]:
        with open_record(tmp_path) as store:
            return [(entry.round, entry.closed_at) for entry in store.rounds.read_all("run")]

    simulate(RunRequest(folders, VALUES, out=tmp_path, run="run", graph_cache=graph_cache))
    before = rounds()
    simulate(RunRequest(folders, VALUES, out=tmp_path, run="run", graph_cache=graph_cache, resume=True))
    assert rounds() == before
    with pytest.raises(ConfigError, check=has_code("FV1616")):
        simulate(
            RunRequest(folders, {**VALUES, "seed": 1}, out=tmp_path, run="run", graph_cache=graph_cache, resume=True)
        )


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_metrics_of_a_simulation(engine: Engine, folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    """The torch engine records several rounds at once; resumed, a finished run has its rounds written elsewhere."""
    values = {**VALUES, "rounds": 3, "trackers": {"writers": ["tensorboard"]}}
    for resume in (False, True):
        simulate(
            RunRequest(
                folders,
                values,
                out=tmp_path,
                run="run",
                graph_cache=graph_cache,
                engine=engine,
                resume=resume,
                label="one",
                at_once=1,
            )
        )
        assert steps(tmp_path / "run", "loss/train") == [1, 2, 3]
        assert steps(tmp_path / "run", "accuracy/mean") == [2, 3]
        shutil.rmtree(tmp_path / "run" / "tensorboard")


def test_a_device_that_is_refused_ends_the_run(folders: list[Path], tmp_path: Path, graph_cache: Path) -> None:
    """The devices hold ten classes, the run knows two: without them it would wait for ever."""
    with pytest.raises(PeerRefused, check=has_code("FV1409", "device-")):
        simulate(
            RunRequest(folders, {**VALUES, "classes": ["0", "1"]}, out=tmp_path, run="run", graph_cache=graph_cache)
        )


def test_simulated_devices_send_whatever_the_method_asks_for(
    folders: list[Path], tmp_path: Path, graph_cache: Path
) -> None:
    """A real device keeps features of whole images by default; nobody owns those of a simulation."""
    values = VALUES | {
        "method": "eftvit", "rounds": 1, "options": {"batch_size": 64, "mask": 0.25, "local_blocks": 1, "epochs": 1},
    }  # fmt: skip
    summary = simulate(RunRequest(folders, values, out=tmp_path, run="run", graph_cache=graph_cache)).summary
    assert [entry.accepted for entry in summary.rounds] == [DEVICES]
