"""A board in use, its server, and the comparison of what they trained."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.compute.planning.planner import make_plan
from coordinator.config import make_config
from export import verify
from fedvit.blobs import BlobStore
from fedvit.tensors import Tensors, unpack
from fleet.request import RunRequest
from fleet.simulate import simulate
from tests.boards.board import Board
from tests.boards.site import Site

SEED = int(os.environ.get("FEDVIT_BOARD_SEED", str(time.time_ns() % 10**9)))
"""Each call draws other moments."""
NAMES = ("pi-1", "pi-2", "pi-3")
"""Boards; a check that starts a second one for the first time has a name of its own for it."""
CLASSES = tuple(map(str, range(10)))


@dataclass
class Scene:
    """A site, the board that joined it at its first boot, and how long that took."""

    site: Site
    board: Board
    times: dict[str, float]
    commands: list[str]  # that a person typed


def check_model(
    scene: Scene, run: str, values: dict[str, Any], pictures: Path, folder: Path, graph_cache: Path
) -> None:
    """Compare the run's model with that of an undisturbed run of the same devices here: they differ by rounding."""
    devices = [pictures / name for name in NAMES[: values["devices"]]]
    simulate(RunRequest(devices, values, out=folder / "same", run=run, graph_cache=graph_cache))
    got = unpack((scene.site.runs / run / "model.safetensors").read_bytes())
    want = unpack((folder / "same" / run / "model.safetensors").read_bytes())
    plan = make_plan(make_config(values, "test").run, CLASSES, BlobStore(folder / "plan"), cache=graph_cache)
    moved, apart = _find_largest(want, plan.state.tensors), _find_largest(got, want)
    print(f"{run}: the model differs from an undisturbed one by {apart / moved:.1e} of its largest change")
    assert apart < verify.TOLERANCE * moved * values["rounds"]


def _find_largest(some: Tensors, others: Mapping[str, Any]) -> float:
    """Return the largest difference of the tensors of one name."""
    return max(float(np.abs(value - others[name]).max()) for name, value in some.items())
