"""`python -m bench analytic`: the head that devices' sums give in one round, beside the same regression in one place.

The backbone's features of each image are computed once, for everything that leaves the backbone as it is. Methods that
train by gradients get as many FLOPs on each device: those with a longer step see fewer images.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from bench.frozen_features import DeviceFeatures, FeatureModel, Features, FrozenRounds, read_features
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import make_config
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.data.layout import TRAIN
from fleet.datasets import read_dataset
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.partition import write_device_folders
from fleet.partitions import deal_out, make_partition
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.program_cost import PricedProgram

ANALYTIC, CENTRAL, FLEET = "analytic", "central", "analytic-fleet"
GRADIENTS = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 16, "epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    ANALYTIC: {"batch_size": 16},
    "personal_analytic": {"batch_size": 16},
    "fed_head": {**GRADIENTS, "lr": 0.01},
    "fedper": {**GRADIENTS, "lr": 0.003},
    "fedperfix": {**GRADIENTS, "lr": 0.003},
}
FROZEN = {ANALYTIC: 1, "personal_analytic": 2, "fed_head": 1}
"""Rounds of the methods that leave the backbone as it is."""


class AnalyticSettings(Struct, frozen=True, kw_only=True):
    data: Path  # a data set of images
    weights: Path  # of the pretrained model
    model: str = "deit_tiny_patch16_224"
    image_size: int = 96
    images: int = 1000  # of the data set, drawn anew for each seed; a fifth of each device's are for tests
    devices: int = 20
    classes_per_device: int = 2  # of a data set without domains; else each device has images of one domain
    seeds: int = 5
    trained: int = 5  # of the seeds, with which methods that train the backbone are measured; 0: no run of a fleet


def run_analytic_bench(settings: AnalyticSettings, progress: Progress = lambda line: None) -> Report:
    """Measure every method with every seed. Raises DataError and ConfigError for settings that cannot be used."""
    samples = read_dataset(str(settings.data), settings.image_size)
    assert not isinstance(samples, Texts)
    accuracies: dict[str, list[float]] = {name: [] for name in (CENTRAL, FLEET, *METHODS)}
    gaps, gflop = list[float](), dict[str, float]()
    bytes_per_device: int | None = None
    names = list(METHODS) if settings.trained else list(FROZEN)

    def note(seed: int, name: str, accuracy: float) -> None:
        accuracies[name].append(accuracy)
        progress(f"seed {seed}: {name} {accuracy:.3f}")

    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as blobs:
        plans = {name: _plan(name, settings, samples.classes, Path(blobs)) for name in names}
    priced = {name: plan.priced(plan.method) for name, plan in plans.items()} if settings.trained else {}
    for seed in range(settings.seeds):
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            home = Path(folder)
            folders = _deal(samples, settings, seed, home / "parts")
            data = [read_features(plans[ANALYTIC], DeviceData.open(folder)) for folder in folders]
            flops = {name: _count_flops(one, data) for name, one in priced.items()}
            shares = dict.fromkeys(FROZEN, 1.0) | {name: min(1.0, flops[ANALYTIC] / flops[name]) for name in flops}
            gflop = {name: shares[name] * flops[name] * FROZEN.get(name, 1) / 1e9 for name in flops}
            for name, rounds in FROZEN.items():
                run = FrozenRounds(plans[name].method, FeatureModel(plans[name].vit), seed)
                for number in range(1, rounds + 1):
                    run.run_round(number, [_cut(one.train, shares[name]) for one in data])
                note(seed, name, run.measure_accuracy([one.test for one in data]))
                if name == ANALYTIC:
                    note(seed, CENTRAL, solve_in_one_place(data, len(samples.classes), run.figures["ridge"]))
                    gaps.append(100 * abs(accuracies[CENTRAL][-1] - accuracies[ANALYTIC][-1]))
            if seed == 0 and settings.trained:
                values = {**_settings(ANALYTIC, settings, seed), "secure": True}
                outcome = simulate(RunRequest(folders, values, out=home / "runs", run=FLEET, at_once=2))
                [entry] = outcome.summary.rounds
                note(seed, FLEET, entry.accuracy_weighted or 0.0)
                gaps.append(100 * abs(accuracies[CENTRAL][-1] - accuracies[FLEET][-1]))
                bytes_per_device = max(device.bytes_up for device in outcome.summary.devices)
            for name in names:
                if name in FROZEN or seed >= settings.trained:
                    continue
                own = _keep_share(folders, shares[name], home / f"parts-{name}", seed)
                values = _settings(name, settings, seed)
                outcome = simulate(RunRequest(own, values, out=home / "runs", run=name, engine="torch"))
                note(seed, name, outcome.summary.rounds[-1].accuracy_weighted or 0.0)
    results = [{"name": name, **_summarize(values), "device_gflop": gflop.get(name)}
               for name, values in accuracies.items() if values]  # fmt: skip
    return {
        "machine": describe_machine(), "settings": msgspec.to_builtins(settings, enc_hook=str),
        "gap_points": max(gaps), "bytes_per_device": bytes_per_device, "rounds": FROZEN[ANALYTIC], "results": results,
    }  # fmt: skip


def _deal(samples: Samples, settings: AnalyticSettings, seed: int, out: Path) -> list[Path]:
    chosen = np.sort(np.random.default_rng(seed).permutation(len(samples))[: settings.images])
    if samples.domains is None:
        rule = make_partition("pathological", classes_per_device=settings.classes_per_device)
    else:
        rule = make_partition("domain", per_domain=settings.devices // len(samples.domain_names))
    parts = deal_out(rule, samples.annotations.rows(chosen), settings.devices, seed)
    write_device_folders(samples, [chosen[part] for part in parts], out, test_share=0.2, seed=seed)
    return [out / f"device-{number}" for number in range(settings.devices)]


def _cut(features: Features, share: float) -> Features:
    """Leave out as many images as `_keep_share` does; batches are drawn at random."""
    count = max(1, round(share * len(features.labels)))
    rows = np.random.default_rng(count).permutation(len(features.labels))[:count]
    return Features(features.values[rows], features.labels[rows])


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


def _count_flops(priced: PricedProgram, data: Sequence[DeviceFeatures]) -> float:
    """Count the FLOPs of a round's training on the mean device."""
    return mean(priced.cost(images=len(one.train.labels), test_images=0).flops_round for one in data)


def _summarize(accuracies: Sequence[float]) -> Mapping[str, Any]:
    return {"accuracy": mean(accuracies), "accuracy_std": pstdev(accuracies), "seeds": len(accuracies)}


def solve_in_one_place(data: Sequence[DeviceFeatures], classes: int, ridge: float) -> float:
    """Return the accuracy, on all test images, of the regression over all training images in float64."""
    train, test = (
        [(split.values.numpy().astype(np.float64), split.labels.numpy()) for split in splits]
        for splits in ([one.train for one in data], [one.test for one in data])
    )
    features, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    gram = features.T @ features
    penalty = ridge * np.trace(gram) / len(gram)
    weights = np.linalg.solve(gram + penalty * np.eye(len(gram)), features.T @ np.eye(classes)[labels])
    return float(np.concatenate([(values @ weights).argmax(axis=1) == names for values, names in test]).mean())
