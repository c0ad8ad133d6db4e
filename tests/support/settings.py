"""Programs of tiny models with their graphs, and digits, as files: made where torch is, read where it is not."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.work.runtime import Runtime
from fedvit.blobs import BlobStore
from fedvit.program import Program, decode_program, encode_program
from fedvit.tensors import Tensors, pack, unpack

if TYPE_CHECKING:
    from coordinator.compute.planning.planner import Plan

CLASSES = ("0", "1", "2")
MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"batch_size": 8, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "fedavg in parts": {"batch_size": 8, "micro_batch": 3, "epochs": 2, "lr": 0.05, "momentum": 0.9},
    "fed_head": {"batch_size": 8, "micro_batch": 3, "epochs": 2, "lr": 0.05},
    "fedrep": {"batch_size": 8, "epochs": 1, "head_epochs": 2, "lr": 0.05},
    "eftvit": {"batch_size": 8, "epochs": 3, "lr": 1e-3, "mask": 0.5, "local_blocks": 1},
}


@dataclass
class Setting:
    """A program as the coordinator makes it, with everything that a device may fetch."""

    name: str
    folder: Path
    program: Program
    first: Tensors
    """What the server holds at the start."""
    blobs: BlobStore

    @classmethod
    def read(cls, folder: Path, name: str) -> "Setting":
        program = decode_program((folder / "program").read_bytes())
        return cls(name, folder, program, unpack((folder / "first").read_bytes()), BlobStore(folder / "blobs"))

    @cached_property
    def plan(self) -> "Plan":
        """The plan that the program is of, for comparisons with torch."""
        return make_plan(self.name, BlobStore(self.folder / "plan"), self.folder.parent / "graphs")

    def start(self) -> Tensors:
        """Every tensor at the start of the first round."""
        values = dict(self.first)
        for group in self.program.groups.values():
            if group.initial:
                values |= unpack(self.blobs.get(group.initial))
        return values

    def runtime(self) -> Runtime:
        """A runtime with the program's graphs loaded."""
        runtime = Runtime(1)
        for graph in self.program.graphs.values():
            runtime.open(graph.digest, self.blobs.path(graph.digest))
        return runtime


def read_settings(folder: Path) -> Mapping[str, Setting]:
    """By the names of OPTIONS."""
    return {name: Setting.read(folder / name, name) for name in OPTIONS}


def make_plan(name: str, blobs: BlobStore, graph_cache: Path) -> "Plan":
    from coordinator.compute.planning import planner
    from coordinator.config import make_config

    config = make_config({"method": name.split()[0], "options": OPTIONS[name], "model_options": MODEL}, "test").run
    return planner.make_plan(config, CLASSES, blobs, cache=graph_cache)


def make_settings(folder: Path, graph_cache: Path) -> None:
    """All programs, and two folders of digits; needs torch and scikit-learn."""
    (folder / "graphs").symlink_to(graph_cache)
    for name in OPTIONS:
        blobs = BlobStore(folder / name / "blobs")
        plan = make_plan(name, blobs, graph_cache)
        (folder / name / "program").write_bytes(encode_program(plan.first.program))
        (folder / name / "first").write_bytes(pack(dict(plan.state.tensors)))
    write_digits(folder / "digits" / "train", {"0": 8, "1": 8, "2": 4})
    write_digits(folder / "digits" / "test", dict.fromkeys(CLASSES, 4), skip=50)
    write_digits(folder / "uneven" / "train", dict.fromkeys(CLASSES, 4))
    write_digits(folder / "uneven" / "test", {"0": 1, "1": 2, "2": 3}, skip=50)


def write_digits(folder: Path, counts: Mapping[str, int], skip: int = 0) -> None:
    """The first images of each class after `skip`, as PNG in class folders."""
    import numpy as np
    from PIL import Image

    from fleet.datasets.digits import read_digits

    digits = read_digits(32)
    for name, count in counts.items():
        rows = np.flatnonzero(digits.labels == digits.classes.index(name))[skip : skip + count]
        (folder / name).mkdir(parents=True)
        for number, row in enumerate(rows):
            [pixels] = digits.images[np.array([row])]
            Image.fromarray(pixels).save(folder / name / f"{number:02d}.png")
