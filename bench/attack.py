"""`python -m bench attack`: what malicious devices do to a run, by how the server aggregates.

Every run is a whole federation in memory: the same coordinator and agents as anywhere, some of whose uploads are
tampered with before they are sent. The agents here exist for this purpose only.
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
from rich.console import RenderableType

from coordinator.record.store import Store
from edge_client.agent import Agent
from edge_client.runtime import Seeds, Trained
from edge_client.task_executor import TaskExecutor
from fedvit.data.layout import TRAIN
from fedvit.errors import ConfigError, EmptyCohort, PeerRefused
from fedvit.program import Program
from fedvit.tensors import Array, Tensors
from fedvit.wire.messages import Refused
from fleet.devices import device_folders
from fleet.partition import deal
from fleet.simulate import simulate
from profiles.report.terminal import column
from profiles.report.terminal import table as new_table

CLEAN = "none"


class Attacker(Agent):
    """A device that answers every task; what it sends, its task executor says."""

    found_out = False

    @property
    def over(self) -> str | None:
        return "found out" if self.found_out else super().over

    def _on_refused(self, refused: Refused) -> None:
        """Who is found out is gone; the run goes on without it."""
        try:
            super()._on_refused(refused)
        except PeerRefused:
            self.found_out = True


class Tampering(TaskExecutor):
    """Sends something else than what it trained."""

    def outputs(self, program: Program, values: Tensors, trained: Trained, seeds: Seeds) -> tuple[Tensors, Tensors]:
        deltas, collected = super().outputs(program, values, trained, seeds)
        return self._tampered(deltas), self._tampered(collected)

    def _tampered(self, honest: Tensors) -> Tensors:
        return {
            name: self.tampered(name, value) if value.dtype.kind == "f" else value for name, value in honest.items()
        }

    def tampered(self, name: str, value: Array) -> Array:
        """What is sent in place of a tensor."""
        return value


class SignFlip(Tampering):
    """Away from where training leads, no longer than an honest update."""

    factor: ClassVar[float] = -1.0

    def tampered(self, name: str, value: Array) -> Array:
        return value * np.asarray(self.factor, value.dtype)


class Backwards(SignFlip):
    factor = -10.0


class Boosted(SignFlip):
    """Its own direction, a hundred times too far."""

    factor = 100.0


class Noise(Tampering):
    """Gaussian noise, ten times as long as what it trained."""

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
    "label flip": Tampering,  # honest work on images whose labels are wrong
    "noise": Noise,
    "NaN": NotANumber,
}


def attacker(executor: type[Tampering]) -> type[Attacker]:
    """A device that sends what comes from this task executor."""
    return type(f"{executor.__name__}Attacker", (Attacker,), {"executor_class": executor})


PLAIN: Mapping[str, Any] = {"aggregator": "mean", "strikes": 0}
"""No protection but the check of every upload, which cannot be turned off."""
BOUNDED: Mapping[str, Any] = {"clip_norm": "median", "reject_scale": 5.0}
RECOMMENDED: Mapping[str, Any] = {"aggregator": "multi_krum", **BOUNDED}

PROTECTIONS: Mapping[str, Mapping[str, Any]] = {
    "mean": PLAIN,
    "recommended": RECOMMENDED,
    "bounded mean": BOUNDED,
    **{
        name.replace("_", " "): {"aggregator": name, **BOUNDED}
        for name in ("median", "trimmed_mean", "krum", "geometric_median")
    },
}
"""By name; all but the plain mean with the same bounds, so that only the aggregator differs."""


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """One federation on scikit-learn's digits, attacked in turn."""

    devices: int = 10
    malicious: int = 3
    rounds: int = 8
    partition: str = "iid"
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attacks: tuple[str, ...] = tuple(ATTACKS)
    protections: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: protections_of(("mean", "recommended"))
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
    protection: str
    accuracy: float | None  # mean over the honest devices after the last round; None: the run broke off
    loss_to_clean: float | None  # points of accuracy below the clean run
    left_out: int  # malicious updates that were refused or left out
    honest_left_out: int
    quarantined: list[str]
    reason: str | None  # why the run broke off
    seconds: float


class AttackReport(Struct, frozen=True, kw_only=True):
    dataset: str
    devices: int
    malicious: list[str]
    rounds: int
    method: str
    protections: dict[str, dict[str, Any]]
    clean_accuracy: float
    outcomes: list[Outcome]


def run_attacks(settings: AttackSettings, progress: Callable[[str], None] = lambda line: None) -> AttackReport:
    """The plain mean without an attack, then a run for each attack, also none, and protection. Raises ConfigError."""
    with _workshop() as home:
        size = settings.model["image_size"]
        deal(
            "digits", settings.partition, settings.devices, home / "parts", options=dict(settings.partition_options),
            seed=settings.seed, test_share=0.3, size=size,
        )  # fmt: skip
        folders = device_folders(home / "parts", None)
        bad = [folder.name for folder in folders[-settings.malicious :]]
        clean = _run(settings, home, folders, bad, CLEAN, "mean", PLAIN, None)
        assert clean.accuracy is not None  # nobody attacked it
        progress(f"no attack: accuracy {clean.accuracy:.3f} in {clean.seconds:.0f} s")
        outcomes = [clean]
        for attack in (CLEAN, *settings.attacks):
            with _flipped(folders, bad) if attack == "label flip" else contextlib.nullcontext():
                for name, protection in settings.protections.items():
                    if attack == CLEAN and protection == PLAIN:
                        continue
                    outcome = _run(settings, home, folders, bad, attack, name, protection, clean.accuracy)
                    outcomes.append(outcome)
                    progress(f"{attack}, {name}: accuracy {_number(outcome.accuracy)} in {outcome.seconds:.0f} s")
    return AttackReport(
        dataset=" ".join(["digits", settings.partition, *(f"{k}={v}" for k, v in settings.partition_options.items())]),
        devices=settings.devices,
        malicious=bad,
        rounds=settings.rounds,
        method=settings.method,
        protections={name: dict(protection) for name, protection in settings.protections.items()},
        clean_accuracy=clean.accuracy,
        outcomes=outcomes,
    )


def _run(
    settings: AttackSettings,
    home: Path,
    folders: list[Path],
    bad: list[str],
    attack: str,
    protection: str,
    values: Mapping[str, Any],
    clean: float | None,
) -> Outcome:
    out, run = home / f"{attack}-{protection}".replace(" ", "-"), "run"
    began = time.monotonic()
    reason = None
    try:
        simulate(
            folders, _values(settings, values), out=out, run=run, at_once=1, graph_cache=home / "graphs",
            agent_kinds=dict.fromkeys(bad, attacker(ATTACKS[attack])) if attack != CLEAN else None,
        )  # fmt: skip
    except EmptyCohort as error:  # a protection may refuse to go on
        reason = str(error)
    store = Store.in_folder(out)
    try:
        accuracy = _accuracy(store, run, bad) if reason is None else None
        refused = {(entry.round, entry.device) for entry in store.refusals(run) if entry.kind == "train"}
        quarantined = sorted({entry.device for entry in store.quarantines(run)})
    finally:
        store.close()
    shutil.rmtree(out)
    return Outcome(
        attack=attack,
        protection=protection,
        accuracy=accuracy,
        loss_to_clean=None if accuracy is None or clean is None else 100 * (clean - accuracy),
        left_out=sum(device in bad for _, device in refused),
        honest_left_out=sum(device not in bad for _, device in refused),
        quarantined=quarantined,
        reason=reason,
        seconds=time.monotonic() - began,
    )


def _values(settings: AttackSettings, protection: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": settings.method, "options": dict(settings.options), "model_options": dict(settings.model),
        "rounds": settings.rounds, "evaluate_every": settings.rounds, "seed": settings.seed,
        "robust": dict(protection),
    }  # fmt: skip


def _accuracy(store: Store, run: str, bad: list[str]) -> float:
    """Of the honest devices, each with its own test images, in the last evaluation."""
    last = max(result.round for result in store.results(run, kind="evaluate"))
    tested = [entry for entry in store.results(run, last, "evaluate") if entry.device not in bad and entry.samples]
    return fmean(entry.metrics["correct"] / entry.samples for entry in tested)


@contextlib.contextmanager
def _workshop() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fleet-attack-") as made:
        yield Path(made)


@contextlib.contextmanager
def _flipped(folders: list[Path], bad: list[str]) -> Iterator[None]:
    """The training images of some devices lie in the folder of another class: c's in that of 9 - c."""
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


def protections_of(names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Raises ConfigError for an unknown name."""
    if unknown := sorted(set(names) - set(PROTECTIONS)):
        raise ConfigError(f"unknown protection {unknown[0]!r}, known are {', '.join(PROTECTIONS)}")
    return {name: PROTECTIONS[name] for name in names}


def attack_table(report: AttackReport) -> RenderableType:
    """Accuracy by attack and protection."""
    table = new_table(
        f"{len(report.malicious)} of {report.devices} devices malicious, {report.method} on {report.dataset}, "
        f"{report.rounds} rounds; accuracy of the honest devices"
    )
    for heading in ("attack", "protection", "accuracy", "points below\nclean", "updates\nleft out", "honest\nleft out",
                    "in\nquarantine"):  # fmt: skip
        column(table, heading, justify="left" if heading in ("attack", "protection") else "right")
    for entry in report.outcomes:
        cells = (entry.left_out, entry.honest_left_out, len(entry.quarantined))
        lost = "" if entry.loss_to_clean is None else f"{entry.loss_to_clean:.1f}"
        shown = "broke off" if entry.reason else _number(entry.accuracy)
        table.add_row(entry.attack, entry.protection, shown, lost, *map(str, cells))
    return table


def _number(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.3f}"
