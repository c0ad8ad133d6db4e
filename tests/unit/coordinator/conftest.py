"""The tiny model's configuration, and its graphs, made once per session."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import RunConfig
from coordinator.planning.checks import checked_config

MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
CLASSES = ("0", "1", "2")
OPTIONS: dict[str, dict[str, Any]] = {
    # the settings of tests/unit/edge_client: equal graphs are exported once
    "fedavg": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "eftvit": {"batch_size": 8, "epochs": 3, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
}

Configure = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def configure(graph_cache: Path) -> Configure:
    """A run's configuration on the tiny model; method options and everything else as given."""

    def configure(method: str = "fedavg", options: dict[str, Any] | None = None, **values: Any) -> RunConfig:
        chosen = {**OPTIONS.get(method, {}), **(options or {})}
        return checked_config(
            {"method": method, "model_options": MODEL, "accelerator": "cpu", **values, "options": chosen}, "test"
        ).run

    return configure
