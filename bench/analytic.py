"""`python -m bench analytic`: the head that devices' sums give in one round, beside the same regression in one place.

Methods that train by gradients get as many FLOPs on each device: those with a longer step see fewer images.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Struct

from bench.machine import describe_machine
from bench.reporting import Progress, Report
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import make_config
from edge_client.work.batches import whole_samples
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData, Split
from fedvit.data.layout import TRAIN
from fleet.datasets import read_dataset
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.partition import write_device_folders
from fleet.partitions import deal_out, make_partition
from fleet.request import Engine, RunOutcome, RunRequest
from fleet.simulate import simulate

ANALYTIC = "analytic"
GRADIENTS = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 16, "epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    ANALYTIC: {"batch_size": 16},
    "fed_head": {**GRADIENTS, "lr": 0.01},
    "fedper": {**GRADIENTS, "lr": 0.003},
    "fedperfix": {**GRADIENTS, "lr": 0.003},
}


class AnalyticSettings(Struct, frozen=True, kw_only=True):
    data: Path  # a data set of images
    weights: Path  # of the pretrained model
    model: str = "deit_tiny_patch16_224"
    image_size: int = 224
    images: int = 2000  # of the data set, drawn anew for each seed; a fifth of each device's are for tests
    devices: int = 20
    classes_per_device: int = 2
    seeds: int = 1


class Measured(NamedTuple):
    """One method with one seed."""

    accuracy: float  # over all test images
    bytes_per_device: int  # sent, the largest
    gflop_per_device: float  # of training, the mean


def run_analytic_bench(settings: AnalyticSettings, progress: Progress = lambda line: None) -> Report:
    """Measure every method with every seed. Raises DataError and ConfigError for settings that cannot be used."""
    samples = read_dataset(str(settings.data), settings.image_size)
    assert not isinstance(samples, Texts)
    by_method: dict[str, list[Measured]] = {name: [] for name in METHODS}
    gaps, central = [], []
    for seed in range(settings.seeds):
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            home = Path(folder)
            folders = _deal(samples, settings, seed, home / "parts")
            for name in METHODS:
                plan = _plan(name, settings, samples.classes, home)
                share = min(1.0, _count_flops(_plan(ANALYTIC, settings, samples.classes, home)) / _count_flops(plan))
                own = _keep_share(folders, share, home / f"parts-{name}", seed) if share < 1 else folders
                # whole models of many devices at a time would flood a coordinator in this process
                engine: Engine = "onnx" if name == ANALYTIC else "torch"
                values = _settings(name, settings, seed)
                outcome = simulate(RunRequest(own, values, out=home / "runs", run=name, at_once=2, engine=engine))
                by_method[name].append(_measure(outcome))
                progress(f"seed {seed}: {name} {by_method[name][-1].accuracy:.3f}")
                if name == ANALYTIC:
                    ridge = outcome.summary.rounds[-1].figures["ridge"]
                    central.append(solve_in_one_place(plan, folders, ridge))
                    gaps.append(100 * abs(central[-1] - by_method[name][-1].accuracy))
                    progress(f"seed {seed}: the same regression in one place {central[-1]:.3f}")
    results = [{"name": name, **_summarize(values)} for name, values in by_method.items()]
    return {
        "machine": describe_machine(), "settings": msgspec.to_builtins(settings, enc_hook=str),
        "gap_points": max(gaps), "bytes_per_device": max(one.bytes_per_device for one in by_method[ANALYTIC]),
        "rounds": 1, "central_accuracy": mean(central), "results": results,
    }  # fmt: skip


def _deal(samples: Samples, settings: AnalyticSettings, seed: int, out: Path) -> list[Path]:
    chosen = np.sort(np.random.default_rng(seed).permutation(len(samples))[: settings.images])
    rule = make_partition("pathological", classes_per_device=settings.classes_per_device)
    parts = deal_out(rule, samples.annotations.rows(chosen), settings.devices, seed)
    write_device_folders(samples, [chosen[part] for part in parts], out, test_share=0.2, seed=seed)
    return [out / f"device-{number}" for number in range(settings.devices)]


def _keep_share(folders: Sequence[Path], share: float, out: Path, seed: int) -> list[Path]:
    """Copy devices' folders with a share of their training images, on which one pass takes as much less."""
    draw = np.random.default_rng(seed)
    copies = [Path(shutil.copytree(folder, out / folder.name)) for folder in folders]
    for copy in copies:
        files = sorted(path for path in (copy / TRAIN).rglob("*") if path.is_file())
        for place in draw.permutation(len(files))[max(1, round(share * len(files))) :]:
            files[place].unlink()
    return copies


def _settings(name: str, settings: AnalyticSettings, seed: int) -> dict[str, Any]:
    return {
        "method": name, "options": METHODS[name], "model": settings.model, "rounds": 1, "seed": seed,
        "model_options": {"image_size": settings.image_size}, "pretrained": str(settings.weights), "cohort": 1.0,
    }  # fmt: skip


def _plan(name: str, settings: AnalyticSettings, classes: tuple[str, ...], home: Path) -> Plan:
    config = make_config(_settings(name, settings, 0), "bench").run
    return make_plan(config, classes, BlobStore(home / "blobs"))


def _count_flops(plan: Plan) -> int:
    """Count the FLOPs of a device's training on a thousand images."""
    return plan.priced(plan.method).cost(images=1000, test_images=0).flops_round


def _measure(outcome: RunOutcome) -> Measured:
    devices = outcome.summary.devices
    right = sum((device.accuracy or 0.0) * device.test_samples for device in devices)
    return Measured(
        right / sum(device.test_samples for device in devices),
        max(device.bytes_up for device in devices),
        mean((device.flops_per_round or 0) / 1e9 for device in devices),
    )


def _summarize(values: Sequence[Measured]) -> Mapping[str, Any]:
    accuracies = [value.accuracy for value in values]
    return {
        "accuracy": mean(accuracies),
        "accuracy_std": pstdev(accuracies),
        "bytes_per_device": max(value.bytes_per_device for value in values),
        "device_gflop": mean(value.gflop_per_device for value in values),
    }


def solve_in_one_place(plan: Plan, folders: Sequence[Path], ridge: float) -> float:
    """Return the accuracy, on all test images, of the regression over all training images in float64."""
    data = [DeviceData.open(folder).relabel(plan.classes) for folder in folders]
    width, classes = plan.vit.width, len(plan.classes)
    gram, moments = np.zeros((width, width)), np.zeros((width, classes))
    for one in data:
        features, labels = _read_features(plan, one.train)
        gram += features.T @ features
        moments += features.T @ np.eye(classes)[labels]
    weights = np.linalg.solve(gram + ridge * np.trace(gram) / len(gram) * np.eye(len(gram)), moments)
    answers = [(features @ weights).argmax(axis=1) == labels for features, labels in
               (_read_features(plan, one.test) for one in data)]  # fmt: skip
    return float(np.concatenate(answers).mean())


@torch.no_grad()
def _read_features(plan: Plan, images: Split) -> tuple[np.ndarray, np.ndarray]:
    """(images, D) features in float64 by torch, and labels."""
    vit, values, labels = plan.vit, [], []
    for rows, readable, fed in whole_samples(images, np.arange(len(images)), plan.batch_of(plan.method)):
        tokens = vit.run_to_class(vit.embed(torch.from_numpy(fed["batch/patches"])), 0)
        values.append(vit.features(tokens).numpy()[: len(rows)][readable])
        labels.append(images.labels[rows][readable])
    return np.concatenate(values).astype(np.float64), np.concatenate(labels)
