"""One training step of the smallest model, as a task would do it: images, confined process, engine, new weights.

`python -m edge_client.owner.tiny_step` ends with an error if the new weights are not those that follow by hand.
"""

import math
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from edge_client.sandbox.launcher import Launcher
from edge_client.sandbox.sandbox import Sandbox
from edge_client.work.runtime import Seeds, Trained, Watch
from fedvit.blobs import digest_of
from fedvit.data.folder import DeviceData
from fedvit.errors import DeviceTrouble
from fedvit.program import Batch, Evaluate, GraphSpec, Program, TensorGroup, TensorSpec, Train
from fedvit.roles import Role
from profiles.probes.speed import GRAPHS

GRAPH = GRAPHS / "step.onnx"
IMAGES = {"red": (255, 0, 0), "blue": (0, 0, 255)}
"""One image of one pixel for each class."""
EXPECTED = np.array([[-0.25, 0.25], [0, 0], [0.25, -0.25]], np.float32)
"""Weights after a step of length 1 from zero: both answers were 1/2, and each image is half of the batch."""


def run_step() -> Trained:
    """Train one step in a confined process. Raises DeviceTrouble if its result is wrong, and what a task raises."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, colour in IMAGES.items():
            (folder / "train" / label).mkdir(parents=True)
            Image.new("RGB", (1, 1), colour).save(folder / "train" / label / "1.png")
        (folder / "test").mkdir()
        launcher = Launcher()
        sandbox = Sandbox(launcher, threads=1, readable=(folder, GRAPH.parent))
        try:
            data = DeviceData.open(folder, cache_bytes=0)
            program = _make_program(data.classes)
            sandbox.open(program.graphs["step"].digest, GRAPH)
            start = {"weight": np.zeros_like(EXPECTED)}
            watch = Watch(lambda *_: None, lambda: False)
            trained = sandbox.train(program, start, data.train, Seeds(1, 1, "doctor"), 1.0, watch)
        finally:
            sandbox.release()
            launcher.close()
    weight = trained.tensors["weight"]
    if not np.allclose(weight, EXPECTED, atol=1e-4) or not math.isclose(trained.loss, math.log(2), rel_tol=1e-4):
        raise DeviceTrouble(
            "FV1420", f"a training step gives wrong numbers: loss {trained.loss:.6f}, weights {weight.tolist()}"
        )
    return trained


def _make_program(classes: tuple[str, ...]) -> Program:
    return Program(
        method="doctor",
        model="one layer",
        classes=classes,
        groups={"all": TensorGroup(Role.SHARED)},
        tensors={"weight": TensorSpec(EXPECTED.shape, "float32", "all")},
        graphs={"step": GraphSpec(digest_of(GRAPH.read_bytes()), 48)},
        train=(Train(graph="step", groups=("all",), lr=1.0),),
        evaluate=Evaluate(graph="step"),
        batch=Batch(batch_size=2, image_size=1, patch_size=1),
    )


if __name__ == "__main__":
    run_step()
