"""The jobs of `bench simulate`: every side runs a job on the same device folders."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from msgspec import Struct

from coordinator.rounds.cohort import select_uniform
from fedvit.errors import ConfigError
from fedvit.models import SMALL
from fedvit.roles import ProductPrecision
from fleet.datasets import read_samples
from fleet.datasets.samples import ArrayImages, Samples
from fleet.devices import device_folders
from fleet.partition import DealSettings, deal

DEVICES = 20
COHORT = 10
SIZE = 32
"""Side of the images in pixels."""
ALPHA = 0.3
"""Concentration of the Dirichlet partition of the images."""
TEST_SHARE = 0.2
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One federation: its method and its model. The plain loop reads its settings from the method's `options`."""

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    cohort: int = COHORT

    def config(self, rounds: int, seed: int) -> dict[str, Any]:
        """A run's configuration: devices evaluate after the last round only."""
        return {
            "method": self.method,
            "options": self.options,
            "model": SMALL,
            "model_options": self.model_options,
            "cohort": self.cohort,
            "rounds": rounds,
            "evaluate_every": rounds,
            "seed": seed,
        }


_SGD = {"epochs": 1, "batch_size": 32, "optimizer": "sgd", "lr": 0.05, "momentum": 0.9}
_LARGE = {"image_size": SIZE, "patch_size": 4, "width": 128, "depth": 8, "heads": 4}
_SMALL = {"image_size": SIZE, "patch_size": 8, "width": 64, "depth": 4, "heads": 4}

JOBS: tuple[Job, ...] = (
    Job(name="fedavg-8x128", method="fedavg", options=_SGD, model_options=_LARGE),
    Job(name="fedtp-8x128", method="fedtp", options=_SGD, model_options={**_LARGE, "qkv_bias": False}),
    Job(name="fedavg-4x64", method="fedavg", options=_SGD, model_options=_SMALL),
)


class Measured(Struct, frozen=True, kw_only=True):
    """Figures of one process of one side."""

    ended: list[float]  # of each round, in seconds of one clock
    accuracy: float | None  # mean over devices that have test images
    peak_rss_bytes: int | None


class Start(NamedTuple):
    """Options of a process of one side beside job and folders."""

    rounds: int
    seed: int
    accelerator: str  # torch device: "cpu" or "cuda"
    precision: ProductPrecision

    @classmethod
    def parse(cls, rounds: str, seed: str, accelerator: str, precision: str) -> Self:
        return cls(int(rounds), int(seed), accelerator, msgspec.convert(precision, ProductPrecision))


def choose(names: Sequence[str]) -> tuple[Job, ...]:
    """The jobs with these names; all without names. Raises ConfigError for an unknown name."""
    known = {job.name: job for job in JOBS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("FV0002", f"no case {unknown[0]!r}, expected one of: {', '.join(known)}")
    return tuple(known[name] for name in names) or JOBS


def encode_job(job: Job) -> str:
    return msgspec.json.encode(asdict(job)).decode()


def decode_job(text: str) -> Job:
    return Job(**msgspec.json.decode(text))


def deal_images(data: Path, images: int, parts: Path) -> list[Path]:
    """The device folders of a random subset of `images` images of a data set, below `parts`.

    Folders of the same data set and number of images are reused. Raises ConfigError when the data set has fewer images,
    DataError when it cannot be read.
    """
    out = parts / f"{data.stem}-{images}"
    if not out.exists():
        subset = _subset(read_samples(str(data), SIZE), images)
        deal(subset, "dirichlet", DEVICES, out, DealSettings({"alpha": ALPHA}, SEED, TEST_SHARE))
    return device_folders(out, DEVICES)


def _subset(samples: Samples, images: int) -> Samples:
    if images > len(samples):
        raise ConfigError("FV0002", f"--images {images}, but {samples.dataset} holds {len(samples)} images")
    rows = np.sort(np.random.default_rng(SEED).choice(len(samples), images, replace=False))
    chosen = ArrayImages(samples.images[rows], SIZE)
    return replace(samples, images=chosen, labels=samples.labels[rows], coarse_labels=None, official_test=None)


def cohorts(devices: Sequence[str], cohort: int, seed: int) -> Iterator[list[str]]:
    """The cohort of each round: every side trains the same devices."""
    number = 1
    while True:
        yield select_uniform(devices, cohort, seed, number)
        number += 1


def rounds_until_all_were_asked(devices: Sequence[str], cohort: int, seed: int) -> int:
    """The number of rounds after which every device has decoded its images."""
    left = set(devices)
    number = 0
    drawn = cohorts(devices, cohort, seed)
    while left:
        left -= set(next(drawn))
        number += 1
    return number
