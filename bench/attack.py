"""`python -m bench attack`: the effect of malicious devices on a run, by the server's aggregation.

Every run is a whole federation in memory, with the usual coordinator and agents; malicious agents change their uploads
before they send them.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from msgspec import field as json_key
from rich.console import RenderableType

from coordinator.record.record import Record, open_record
from edge_client.agent import Agent
from edge_client.runtime import Seeds, Trained
from edge_client.task_executor import TaskExecutor
from fedvit.data.layout import TRAIN
from fedvit.errors import ConfigError, EmptyCohort, PeerRefused
from fedvit.program import Program
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import Refused
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal
from fleet.request import RunRequest
from fleet.simulate import simulate
from profiles.report.terminal import column
from profiles.report.terminal import table as new_table

CLEAN = "none"


class Attacker(Agent):
    """A malicious device: its task executor changes what it sends."""

    quarantined = False

    @property
    def over(self) -> str | None:
        return "in quarantine" if self.quarantined else super().over

    def _on_refused(self, refused: Refused) -> None:
        """A device in quarantine leaves; the run continues without it."""
        try:
            super()._on_refused(refused)
        except PeerRefused:
            self.quarantined = True


class Tampering(TaskExecutor):
    """Changes the tensors of an upload before they are sent."""

    def outputs(self, program: Program, values: Tensors, trained: Trained, seeds: Seeds) -> tuple[Tensors, Tensors]:
        deltas, collected = super().outputs(program, values, trained, seeds)
        return self._tampered(deltas), self._tampered(collected)

    def _tampered(self, honest: Tensors) -> Tensors:
        return {
            name: self.tampered(name, value) if value.dtype.kind == "f" else value for name, value in honest.items()
        }

    def tampered(self, name: str, value: Array) -> Array:
        """The value that is sent in place of a tensor."""
        return value


class SignFlip(Tampering):
    """The honest update with the opposite sign."""

    factor: ClassVar[float] = -1.0

    def tampered(self, name: str, value: Array) -> Array:
        return value * np.asarray(self.factor, value.dtype)


class Backwards(SignFlip):
    factor = -10.0


class Boosted(SignFlip):
    """The honest update, a hundred times as long."""

    factor = 100.0


class Noise(Tampering):
    """Gaussian noise, ten times as long as the honest update."""

    def tampered(self, name: str, value: Array) -> Array:
        size = 10 * float(np.sqrt(np.square(value.astype(np.float64)).mean()))
        draw = np.random.default_rng([len(name), value.size])
        return draw.normal(0.0, size, value.shape).astype(value.dtype)


class NotANumber(Tampering):
    def tampered(self, name: str, value: Array) -> Array:
        return np.full_like(value, np.nan)


ATTACKS: Mapping[str, type[Tampering]] = {
    "sign flip": SignFlip,
    "times -10": Backwards,
    "times 100": Boosted,
    "label flip": Tampering,  # honest training on images with wrong labels
    "noise": Noise,
    "NaN": NotANumber,
}


def attacker(bench: type[Tampering]) -> type[Attacker]:
    """The class of devices with this task executor."""
    return type(f"{bench.__name__}Attacker", (Attacker,), {"executor_class": bench})


PLAIN: Mapping[str, Any] = {"aggregator": "mean", "strikes": 0}
"""The plain mean. Only the check of every upload remains, which cannot be turned off."""
BOUNDED: Mapping[str, Any] = {"clip_norm": "median", "reject_scale": 5.0}
RECOMMENDED: Mapping[str, Any] = {"aggregator": "multi_krum", **BOUNDED}

AGGREGATIONS: Mapping[str, Mapping[str, Any]] = {
    "mean": PLAIN,
    "recommended": RECOMMENDED,
    "bounded mean": BOUNDED,
    **{
        name.replace("_", " "): {"aggregator": name, **BOUNDED}
        for name in ("median", "trimmed_mean", "krum", "geometric_median")
    },
}
"""Settings of `[robust]` by name; all but the plain mean have the same bounds, so that only the aggregator differs."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """One federation on scikit-learn's digits; every attack is run against every aggregation."""

    devices: int = 10
    malicious: int = 3
    rounds: int = 8
    partition: str = "iid"
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attacks: tuple[str, ...] = tuple(ATTACKS)
    aggregations: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: aggregations_of(("mean", "recommended"))
    )
    method: str = "fedavg"
    options: Mapping[str, Any] = field(
        default_factory=lambda: {"epochs": 5, "batch_size": 16, "lr": 5e-3, "optimizer": "adamw"}
    )
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"image_size": 8, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
    )

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.attacks) - set(ATTACKS)):
            raise ConfigError(f"unknown attack {unknown[0]!r}, known are {', '.join(ATTACKS)}")
        if not 0 < self.malicious < self.devices:
            raise ConfigError(f"malicious = {self.malicious} must be at least 1 and below devices = {self.devices}")


class Outcome(Struct, frozen=True, kw_only=True):
    attack: str
    aggregation: str = json_key(name="protection")
    accuracy: float | None  # mean over the honest devices after the last round; None: the run failed
    loss_to_clean: float | None  # points of accuracy below the clean run
    left_out: int  # malicious updates that were refused or left out
    honest_left_out: int
    quarantined: list[str]
    reason: str | None  # why the run failed
    seconds: float


class AttackReport(Struct, frozen=True, kw_only=True):
    dataset: str
    devices: int
    malicious: list[str]
    rounds: int
    method: str
    aggregations: dict[str, dict[str, Any]] = json_key(name="protections")
    clean_accuracy: float
    outcomes: list[Outcome]


def run_attacks(settings: AttackSettings, progress: Callable[[str], None] = lambda line: None) -> AttackReport:
    """Run the plain mean without an attack, then every attack, and none, with every aggregation. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="fleet-attack-") as made:
        home = Path(made)
        size = settings.model["image_size"]
        deal(
            "digits",
            settings.partition,
            settings.devices,
            home / "parts",
            DealSettings(options=dict(settings.partition_options), seed=settings.seed, test_share=0.3, size=size),
        )
        folders = device_folders(home / "parts", None)
        bad = [folder.name for folder in folders[-settings.malicious :]]
        clean = _run(settings, home, folders, bad, CLEAN, "mean", PLAIN, None)
        assert clean.accuracy is not None  # it was not attacked
        progress(f"no attack: accuracy {clean.accuracy:.3f} in {clean.seconds:.0f} s")
        outcomes = [clean]
        for attack in (CLEAN, *settings.attacks):
            with _flipped(folders, bad) if attack == "label flip" else contextlib.nullcontext():
                for name, robust in settings.aggregations.items():
                    if attack == CLEAN and robust == PLAIN:
                        continue
                    outcome = _run(settings, home, folders, bad, attack, name, robust, clean.accuracy)
                    outcomes.append(outcome)
                    progress(f"{attack}, {name}: accuracy {_number(outcome.accuracy)} in {outcome.seconds:.0f} s")
    return AttackReport(
        dataset=" ".join(["digits", settings.partition, *(f"{k}={v}" for k, v in settings.partition_options.items())]),
        devices=settings.devices,
        malicious=bad,
        rounds=settings.rounds,
        method=settings.method,
        aggregations={name: dict(robust) for name, robust in settings.aggregations.items()},
        clean_accuracy=clean.accuracy,
        outcomes=outcomes,
    )


def _run(
    settings: AttackSettings,
    home: Path,
    folders: list[Path],
    bad: list[str],
    attack: str,
    aggregation: str,
    robust: Mapping[str, Any],
    clean: float | None,
) -> Outcome:
    out, run = home / f"{attack}-{aggregation}".replace(" ", "-"), "run"
    began = time.monotonic()
    reason = None
    try:
        simulate(
            RunRequest(
                folders,
                _values(settings, robust),
                out=out,
                run=run,
                at_once=1,
                graph_cache=home / "graphs",
                agent_kinds=dict.fromkeys(bad, attacker(ATTACKS[attack])) if attack != CLEAN else {},
            )
        )
    except EmptyCohort as error:  # too few devices may be left for the aggregator
        reason = str(error)
    store = open_record(out)
    try:
        accuracy = _accuracy(store, run, bad) if reason is None else None
        refused = {(entry.round, entry.device) for entry in store.devices.read_refusals(run) if entry.kind == "train"}
        quarantined = sorted({entry.device for entry in store.devices.read_quarantines(run)})
    finally:
        store.close()
    shutil.rmtree(out)
    return Outcome(
        attack=attack,
        aggregation=aggregation,
        accuracy=accuracy,
        loss_to_clean=None if accuracy is None or clean is None else 100 * (clean - accuracy),
        left_out=sum(device in bad for _, device in refused),
        honest_left_out=sum(device not in bad for _, device in refused),
        quarantined=quarantined,
        reason=reason,
        seconds=time.monotonic() - began,
    )


def _values(settings: AttackSettings, robust: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": settings.method, "options": dict(settings.options), "model_options": dict(settings.model),
        "rounds": settings.rounds, "evaluate_every": settings.rounds, "seed": settings.seed,
        "robust": dict(robust),
    }  # fmt: skip


def _accuracy(store: Record, run: str, bad: list[str]) -> float:
    """Of the honest devices, each with its own test images, in the last evaluation."""
    last = max(result.round for result in store.tasks.read_results(run, kind="evaluate"))
    tested = [
        entry for entry in store.tasks.read_results(run, last, "evaluate") if entry.device not in bad and entry.samples
    ]
    return fmean(entry.metrics["correct"] / entry.samples for entry in tested)


@contextlib.contextmanager
def _flipped(folders: list[Path], bad: list[str]) -> Iterator[None]:
    """Within it the training images of malicious devices have wrong labels: class c lies in the folder of 9 - c."""
    mine = [folder / TRAIN for folder in folders if folder.name in bad]
    for train in mine:
        _swap_classes(train)
    try:
        yield
    finally:
        for train in mine:
            _swap_classes(train)


def _swap_classes(train: Path) -> None:
    names = sorted(path.name for path in train.iterdir())
    for name in names:
        (train / name).rename(train / f".{name}")
    for name, other in zip(names, reversed(names), strict=True):
        (train / f".{name}").rename(train / other)


def aggregations_of(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Raises ConfigError for an unknown name."""
    if unknown := sorted(set(names) - set(AGGREGATIONS)):
        raise ConfigError(f"--protection {unknown[0]!r} is unknown, known are {', '.join(AGGREGATIONS)}")
    return {name: AGGREGATIONS[name] for name in names}


def attack_table(report: AttackReport) -> RenderableType:
    """Accuracy by attack and aggregation."""
    table = new_table(
        f"{len(report.malicious)} of {report.devices} devices malicious, {report.method} on {report.dataset}, "
        f"{report.rounds} rounds; accuracy of the honest devices"
    )
    for heading in ("attack", "aggregation", "accuracy", "points below\nclean", "updates\nleft out", "honest\nleft out",
                    "in\nquarantine"):  # fmt: skip
        column(table, heading, justify="left" if heading in ("attack", "aggregation") else "right")
    for entry in report.outcomes:
        cells = (entry.left_out, entry.honest_left_out, len(entry.quarantined))
        lost = "" if entry.loss_to_clean is None else f"{entry.loss_to_clean:.1f}"
        shown = "failed" if entry.reason else _number(entry.accuracy)
        table.add_row(entry.attack, entry.aggregation, shown, lost, *map(str, cells))
    return table


def _number(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.3f}"
