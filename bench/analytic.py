"""`python -m bench analytic`: the head that devices' sums give in one round, beside the same regression in one place.

The backbone's features of each image are computed once, for everything that leaves the backbone as it is. Methods that
train by gradients get as many FLOPs on each device: those with a longer step see fewer images.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from bench.frozen_features import DeviceFeatures, Features, FrozenRounds, read_features
from bench.kept_figures import Figures, KeptFigures
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from coordinator.compute.planning.planner import Plan, make_plan
from coordinator.config import make_config
from fedvit.blobs import BlobStore
from fedvit.data.folder import DeviceData
from fedvit.data.images import Indices
from fedvit.data.layout import TRAIN
from fedvit.methods import make_method
from fedvit.models.feature_model import FeatureModel
from fleet.datasets import read_dataset
from fleet.datasets.samples import Samples
from fleet.datasets.texts import Texts
from fleet.partition import write_device_folders
from fleet.partitions import deal_out, make_partition
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.program_cost import PricedProgram

DRAW = 2
"""Version of the draw of images and of the kept figures."""
ANALYTIC, CENTRAL, FLEET = "analytic", "central", "analytic-fleet"
GRADIENTS = {"optimizer": "sgd", "momentum": 0.9, "batch_size": 16, "epochs": 1}
METHODS: dict[str, dict[str, Any]] = {
    ANALYTIC: {"batch_size": 16},
    **{f"{ANALYTIC} sketch {count}": {"batch_size": 16, "sketch": count} for count in (96, 48)},
    "personal_analytic": {"batch_size": 16},
    **{f"fed_head lr {lr}": {**GRADIENTS, "lr": lr} for lr in (0.01, 0.1, 1.0)},
    "fedper": {**GRADIENTS, "lr": 0.003},
    "fedperfix": {**GRADIENTS, "lr": 0.003},
}
"""Options by the method's name, which an option may follow."""
FROZEN = {name: 2 if name == "personal_analytic" else 1 for name in METHODS if not name.startswith("fedper")}
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


def run_analytic_bench(
    settings: AnalyticSettings, progress: Progress = lambda line: None, keep: Path | None = None
) -> Report:
    """Measure every method with every seed. Figures are stored in the file `keep`, and not measured again.

    Raises DataError and ConfigError for settings that cannot be used.
    """
    samples = read_dataset(str(settings.data), settings.image_size)
    assert not isinstance(samples, Texts)
    every_seed = msgspec.structs.replace(settings, seeds=0, trained=0)
    kept = KeptFigures(keep, {"draw": DRAW} | msgspec.to_builtins(every_seed, enc_hook=str))
    plans = _Plans(settings, samples.classes)
    by_name: dict[str, list[Figures]] = {name: [] for name in (CENTRAL, FLEET, *METHODS)}
    gaps = list[float]()
    for seed in range(settings.seeds):
        names = [*FROZEN, CENTRAL]
        names += [FLEET] if seed == 0 and settings.trained else []
        names += [name for name in METHODS if name not in FROZEN and seed < settings.trained]
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            bench = _Seed(samples, settings, seed, plans, kept, Path(folder))
            for name in names:
                figures = bench.measure(name)
                by_name[name].append(figures)
                progress(f"seed {seed}: {name} {figures['accuracy']:.3f}")
        gaps += [by_name[name][-1]["gap_points"] for name in (ANALYTIC, FLEET) if name in names]
    results = [{"name": name, **_summarize(values)} for name, values in by_name.items() if values]
    return {
        "machine": describe_machine(), "settings": msgspec.to_builtins(settings, enc_hook=str),
        "gap_points": max(gaps),
        "bytes_per_device": max((int(figures["bytes_up"]) for figures in by_name[FLEET]), default=None),
        "rounds": FROZEN[ANALYTIC], "results": results,
    }  # fmt: skip


class _Plans:
    """Plans of the methods, each made when it is needed."""

    def __init__(self, settings: AnalyticSettings, classes: tuple[str, ...]) -> None:
        self._settings, self._classes = settings, classes
        self._by_method: dict[str, Plan] = {}
        self._prices: dict[str, PricedProgram] = {}

    def get(self, name: str) -> Plan:
        """Return the plan of a method, whose cost does hardly depend on the options that differ here."""
        method = name.partition(" ")[0]
        if method not in self._by_method:
            with tempfile.TemporaryDirectory(prefix="fleet-bench-") as blobs:
                config = make_config(_settings(name, self._settings, 0), "bench").run
                self._by_method[method] = make_plan(config, self._classes, BlobStore(Path(blobs)))
        return self._by_method[method]

    def count_flops(self, name: str, images: Sequence[int]) -> float:
        """Count the FLOPs of a round's training on the mean device, of devices with so many images."""
        method = name.partition(" ")[0]
        if method not in self._prices:
            plan = self.get(name)
            self._prices[method] = plan.priced(plan.method)
        return mean(self._prices[method].cost(images=count, test_images=0).flops_round for count in images)


class _Seed:
    """One repetition. Images are dealt out, and features computed, when a figure is missing."""

    def __init__(
        self, samples: Samples, settings: AnalyticSettings, seed: int, plans: _Plans, kept: KeptFigures, home: Path
    ) -> None:
        self._samples, self._settings, self._seed = samples, settings, seed
        self._plans, self._kept, self._home = plans, kept, home

    def measure(self, name: str) -> Figures:
        """Return the figures of a method, its accuracy first; kept ones are not measured again."""
        ways = {CENTRAL: self._measure_central, FLEET: self._measure_fleet}
        default = self._measure_frozen if name in FROZEN else self._measure_trained
        return self._kept.measure(f"{self._seed} {name}", partial(ways.get(name, default), name))

    @cached_property
    def _folders(self) -> list[Path]:
        return _deal(self._samples, self._settings, self._seed, self._home / "parts")

    @cached_property
    def _images(self) -> list[int]:
        return [len(DeviceData.open(folder).train) for folder in self._folders]

    @cached_property
    def _data(self) -> list[DeviceFeatures]:
        plan = self._plans.get(ANALYTIC)
        return [read_features(plan, DeviceData.open(folder)) for folder in self._folders]

    def _choose_share(self, name: str) -> tuple[float, float]:
        """Return the share of its images that a method may read for the FLOPs of ANALYTIC, and its GFLOP a device."""
        own, budget = (self._plans.count_flops(each, self._images) for each in (name, ANALYTIC))
        share = min(1.0, budget / own)
        return share, share * own * FROZEN.get(name, 1) / 1e9

    def _measure_frozen(self, name: str) -> Figures:
        share, gflop = self._choose_share(name)
        method = make_method(name.partition(" ")[0], METHODS[name])
        run = FrozenRounds(method, FeatureModel(self._plans.get(ANALYTIC).vit), self._seed)
        for number in range(1, FROZEN[name] + 1):
            run.run_round(number, [_cut(one.train, share) for one in self._data])
        accuracy = run.measure_accuracy([one.test for one in self._data])
        figures = {"accuracy": accuracy, "device_gflop": gflop} | {"ridge": run.figures.get("ridge", 0.0)}
        return figures | self._measure_gap(figures) if name == ANALYTIC else figures

    def _measure_central(self, _: str) -> Figures:
        return {"accuracy": self._solve(self.measure(ANALYTIC)["ridge"])}

    def _solve(self, ridge: float) -> float:
        return solve_in_one_place(self._data, len(self._samples.classes), ridge)

    def _measure_gap(self, figures: Figures) -> Figures:
        """Compare with the regression in one place of the same lambda, which other draws of held-out images change."""
        return {"gap_points": 100 * abs(self._solve(figures["ridge"]) - figures["accuracy"])}

    def _measure_fleet(self, name: str) -> Figures:
        values = {**_settings(ANALYTIC, self._settings, self._seed), "secure": True}
        summary = simulate(RunRequest(self._folders, values, out=self._home / "runs", run=name, at_once=2)).summary
        [entry] = summary.rounds
        sent = max(device.bytes_up for device in summary.devices)
        figures = {"accuracy": entry.accuracy_weighted or 0.0, "ridge": entry.figures["ridge"], "bytes_up": float(sent)}
        return figures | self._measure_gap(figures)

    def _measure_trained(self, name: str) -> Figures:
        share, gflop = self._choose_share(name)
        own = _keep_share(self._folders, share, self._home / f"share {name}", self._seed)
        values = _settings(name, self._settings, self._seed)
        outcome = simulate(RunRequest(own, values, out=self._home / "runs", run=name.replace(" ", "-"), engine="torch"))
        return {"accuracy": outcome.summary.rounds[-1].accuracy_weighted or 0.0, "device_gflop": gflop}


def _deal(samples: Samples, settings: AnalyticSettings, seed: int, out: Path) -> list[Path]:
    chosen = draw_images(samples.annotations.labels, settings.images, seed)
    if samples.domains is None:
        rule = make_partition("pathological", classes_per_device=settings.classes_per_device)
    else:
        rule = make_partition("domain", per_domain=settings.devices // len(samples.domain_names))
    parts = deal_out(rule, samples.annotations.rows(chosen), settings.devices, seed)
    write_device_folders(samples, [chosen[part] for part in parts], out, test_share=0.2, seed=seed)
    return [out / f"device-{number}" for number in range(settings.devices)]


def draw_images(labels: Indices, count: int, seed: int) -> Indices:
    """Draw images, of each class at least one: devices share all classes."""
    order = np.random.default_rng(seed).permutation(len(labels))
    _, firsts = np.unique(labels[order], return_index=True)
    places = np.concatenate([firsts, np.setdiff1d(np.arange(len(order)), firsts)])[:count]
    return np.sort(order[places])


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
        "method": name.partition(" ")[0], "options": METHODS[name], "model": settings.model, "rounds": 1, "seed": seed,
        "model_options": {"image_size": settings.image_size}, "pretrained": str(settings.weights), "cohort": 1.0,
    }  # fmt: skip


def _summarize(seeds: Sequence[Figures]) -> Mapping[str, Any]:
    accuracies = [figures["accuracy"] for figures in seeds]
    known = {"device_gflop": mean(figures["device_gflop"] for figures in seeds)} if "device_gflop" in seeds[0] else {}
    return {"accuracy": mean(accuracies), "accuracy_std": pstdev(accuracies), "seeds": len(accuracies), **known}


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
