"""A small fleet that trains on both engines, for laws of methods and models."""

import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from coordinator.compute.planning.batch import method_batch
from export.graphs import export_graphs
from fedvit.data.layout import TEST, TRAIN
from fedvit.data.text import TextSettings, write_texts
from fedvit.errors import ExportMismatch
from fedvit.methods.base import Method
from fedvit.models.vit import PatchViT
from fedvit.tensors import Tensors
from fleet.contracts.laws import fail, require
from fleet.datasets.digits import read_digits
from fleet.partition import write_device_folders
from fleet.partitions import partition
from fleet.request import Engine, RunOutcome, RunRequest
from fleet.simulate import simulate

CLASSES = 10
SMALL_MODEL = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 3, "heads": 2}
"""Options of the small images' model that make it train in seconds."""
OPTIONS = {"batch_size": 8, "lr": 0.01}
"""Options of every method."""
COUNT, DEVICES, ROUNDS = 60, 2, 2
"""Images or texts, devices, rounds."""
FARTHEST = 1e-2
"""Largest difference of a tensor between two engines, relative to its length: AdamW makes whole steps of rounding."""


def check_graphs(method: Method, vit: PatchViT) -> None:
    """Raises BrokenLaw unless every graph of a method agrees with torch."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            export_graphs(method, vit, method_batch(method, vit), cache=Path(folder))
        except ExportMismatch as error:
            fail(str(error))


class Samples(NamedTuple):
    """Data of the fleet."""

    size: int  # side of images, or characters of context
    is_text: bool = False


def check_engines(settings: Mapping[str, Any], samples: Samples, *, reads_images: bool = False) -> None:
    """Raises BrokenLaw unless onnxruntime, as on devices, and torch train the same tensors.

    `reads_images`: whether the server needs images, which are then those of a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        if reads_images:
            settings = {**settings, "server_data": str(Path(folder) / "parts" / "device-0" / TRAIN)}
        one, other = (train(settings, samples, Path(folder), engine) for engine in ("onnx", "torch"))
        for mine, theirs in zip(one.summary.rounds, other.summary.rounds, strict=True):
            require(bool(np.isfinite(mine.train_loss or 0.0)), f"round {mine.round}: loss {mine.train_loss}")
            require(
                mine.flops == theirs.flops, f"round {mine.round}: {mine.flops} FLOPs by graphs, {theirs.flops} by torch"
            )
        far = measure_distance(*(load_file(each.folder / "model.safetensors") for each in (one, other)))
        require(far <= FARTHEST, f"tensors of engines onnx and torch differ by {far:.2g} of their length")


def train(settings: Mapping[str, Any], samples: Samples, folder: Path, engine: Engine) -> RunOutcome:
    """Train on a few digits or texts on two devices; the second call uses the same ones."""
    parts = folder / "parts"
    if not parts.exists():
        (write_some_texts if samples.is_text else write_some_digits)(parts, samples.size)
    request = RunRequest(
        sorted(parts.glob("device-*")),
        {"rounds": ROUNDS, "options": OPTIONS, "seed": 0, **settings},
        out=folder,
        run=f"on-{engine}",
        engine=engine,
        at_once=1,
        graph_cache=folder / "graphs",
    )
    return simulate(request)


def write_some_digits(parts: Path, size: int) -> None:
    digits = read_digits(size)
    shares = [share[: COUNT // DEVICES] for share in partition("iid", digits.labels, DEVICES, seed=0)]
    write_device_folders(digits, shares, parts, test_share=0.2, seed=0)


def write_some_texts(parts: Path, context: int) -> None:
    """Write texts of CLASSES letters, in which a letter is often followed by the next one."""
    for device in range(DEVICES):
        steps = np.random.default_rng(device).integers(1, 4, COUNT // DEVICES * (context + 1)) // 2
        text = "".join(string.ascii_lowercase[place] for place in np.cumsum(steps) % CLASSES)
        cut = len(text) * 4 // 5
        settings = TextSettings(context=context, stride=context)
        write_texts(parts / f"device-{device}", settings, ((TRAIN, text[:cut]), (TEST, text[cut:])))


def measure_distance(one: Tensors, other: Tensors) -> float:
    """Measure how far two sets of tensors are from each other: the most of any tensor, relative to its own length."""
    assert one.keys() == other.keys()
    apart = {name: float(np.linalg.norm(one[name].astype(float) - other[name])) for name in one}
    return max((gap / max(1e-12, float(np.linalg.norm(one[name]))) for name, gap in apart.items()), default=0.0)
