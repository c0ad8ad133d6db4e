"""Whole training steps as tasks run them, without a coordinator: programs of fedvit's own, images of noise.

`coordinator.compute.planning.trials` made the programs. Weights and images follow from a seed, so every board computes
the same numbers, but for rounding.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from PIL import Image

from edge_client.health.guard import Guard
from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.sandbox import Sandbox
from edge_client.work.runtime import OutOfMemory, Seeds, Stopped, Trained, Watch
from fedvit.data.folder import DeviceData
from fedvit.program import Program, decode_program
from fedvit.resources import Budget, ResourceUse
from fedvit.tensors import Array, Tensors
from profiles.probes.meter import Sensors
from profiles.probes.speed import TRIALS, find_trial_graph

Compute = Literal["float", "int8"]
STEPS = 20
LOSSES: dict[Compute, float] = {"float": 2.5510, "int8": 2.5509}
"""Loss after STEPS steps on x86-64; a guess has 2.3026. The export compared the graphs with torch."""
TOLERANCE = 0.01
"""Relative error of a loss that rounding explains; a wrong operator is off by more."""
IMAGES_PER_CLASS = 4
IMAGE_SIZE = 32
SEEDS = Seeds(0, 1, "certify")
SPREAD = 0.02
"""Standard deviation of random weights, as usual for Vision Transformers."""


class TrialProgram(NamedTuple):
    """A program with start values."""

    program: Program
    start: Tensors


def load_trial(compute: Compute, steps: int = STEPS) -> TrialProgram:
    """Read a program, and draw its start values; its training ends after some steps."""
    program = decode_program((TRIALS / f"{compute}.program").read_bytes())
    [phase] = program.train
    phase = msgspec.structs.replace(phase, epochs=steps, steps=steps)
    rng = np.random.default_rng(0)
    start = {name: _draw(name, spec.shape, rng) for name, spec in program.tensors.items()}
    return TrialProgram(msgspec.structs.replace(program, train=(phase,)), start)


def _draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    if len(shape) > 1:
        return (SPREAD * rng.standard_normal(shape)).astype(np.float32)
    return np.full(shape, "norm" in name and name.endswith("weight"), np.float32)


def write_images(folder: Path) -> None:
    """Write images of noise, some for each class of the programs."""
    rng = np.random.default_rng(1)
    for label in map(str, range(10)):
        (folder / "train" / label).mkdir(parents=True)
        for number in range(IMAGES_PER_CLASS):
            pixels = rng.integers(256, size=(IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / label / f"{number}.png")
    (folder / "test").mkdir()


class TrialTrainer:
    """Trains trials in confined processes; make it before any thread starts. `close` ends them."""

    def __init__(self, images: Path, threads: int) -> None:
        self._launcher = Launcher()
        self._images, self._threads = images, threads
        self._data = DeviceData.open(images)

    def train(
        self,
        trial: TrialProgram,
        *,
        seeds: Seeds = SEEDS,
        own_kernels: bool = False,
        memory_bytes: int | None = None,
        sensors: Sensors | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[Trained | None, ResourceUse]:
        """Train in a new process: (outcome, cost); no outcome if it was `stopped`, or its limit of memory too small.

        Raises what a task raises.
        """
        sandbox = Sandbox(
            self._launcher,
            threads=self._threads,
            readable=(self._images, TRIALS),
            memory_bytes=memory_bytes,
            own_kernels=own_kernels,
        )
        guard = Guard(Budget(memory_bytes=memory_bytes), sensors=sensors, owns_process=True, memory=sandbox.memory)
        try:
            sandbox.load()
            for graph in trial.program.graphs.values():
                sandbox.open(graph.digest, find_trial_graph(graph.digest))
            with guard.watching("train") as guarded:
                watch = Watch(lambda *_: None, lambda: guarded.over() or stopped(), guarded.tally)
                try:
                    trained = sandbox.train(trial.program, trial.start, self._data.train, seeds, 1.0, watch)
                except Stopped:
                    return None, guarded.use()
                except OutOfMemory:
                    guarded.refuse_memory()
                    return None, guarded.use()
                return trained, guarded.use()
        finally:
            sandbox.release()

    def close(self) -> None:
        """End all processes."""
        self._launcher.close()


def is_right(compute: Compute, loss: float) -> bool:
    """Return True if the loss after STEPS steps is what other processors compute."""
    return math.isclose(loss, LOSSES[compute], rel_tol=TOLERANCE)
