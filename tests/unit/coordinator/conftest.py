"""The tiny model's configuration, its graphs, made once per session, and runs in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.compute.planning.checks import checked_config
from coordinator.config import RunConfig
from coordinator.record.database import use_database
from fedvit.methods import METHODS
from fedvit.tensors import Tensors
from tests.support.postgresql import Postgresql
from tests.support.runs import Configure, Generated, Stage

MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
CLASSES = ("0", "1", "2")
OPTIONS: dict[str, dict[str, Any]] = {
    # the settings of tests/unit/edge_client: equal graphs are exported once
    "fedavg": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "eftvit": {"batch_size": 8, "epochs": 3, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
}


@pytest.fixture(scope="session")
def configure(graph_cache: Path) -> Configure:
    """A run's configuration on the tiny model; method options and everything else as given."""

    def configure(method: str = "fedavg", options: dict[str, Any] | None = None, **values: Any) -> RunConfig:
        chosen = {**OPTIONS.get(method, {}), **(options or {})}
        return checked_config(
            {"method": method, "model_options": MODEL, "accelerator": "cpu", **values, "options": chosen}, "test"
        ).run

    return configure


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method that is made for tests of runs, by name."""
    monkeypatch.setitem(METHODS, "generated", Generated)


@pytest.fixture
def stage(tmp_path: Path, configure: Configure, graph_cache: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, configure, graph_cache)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, configure: Configure, graph_cache: Path) -> Tensors:
    """FedAvg's tensors before the first round: what a run with updates of 0 ends with."""
    stage = Stage(tmp_path_factory.mktemp("first"), configure, graph_cache)
    stage.fake("a", value=0.0)
    stage.start()
    assert stage.finish() == "finished"
    return stage.model()


@pytest.fixture(params=["sqlite", "postgresql"])
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of runs without any, whose record is kept here or there."""
    if request.param == "postgresql":
        server: Postgresql = request.getfixturevalue("postgresql")
        use_database(tmp_path / "runs", server.schema())
    return tmp_path / "runs"
