"""The base class of partitions: rules that deal the samples of a data set out to devices."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations


@dataclass(frozen=True, kw_only=True)
class Partition(ABC):
    """A rule and its options; called, it returns one array of sample indices per device.

    The arrays are disjoint, ascending, int64, and the same for the same generator state. Together they are
    everything, but for what a rule says that it leaves out (`leaves_out`). Options are fields of type int, float or
    bool with defaults, that are refused on construction when out of range.
    """

    leaves_out: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when the samples cannot be dealt out so, naming the numbers that do not fit."""

    def noise_std(self, device: int, devices: int) -> float:
        """Standard deviation of the noise that a device's images get, in gray levels of 0..255."""
        return 0.0


def check_parts(parts: Sequence[Indices], samples: int, devices: int, leaves_out: bool) -> None:
    """Raises ConfigError unless `parts` divide samples among devices: no sample twice, and none left out unless the
    rule says so."""
    broken = None
    if len(parts) != devices:
        broken = f"it has {len(parts)} parts for {devices} devices"
    elif any(part.dtype != np.int64 or part.ndim != 1 or (np.diff(part) <= 0).any() for part in parts):
        broken = "a part is not an ascending array of int64"
    else:
        dealt = np.sort(np.concatenate(parts))
        if len(dealt) and not 0 <= dealt[0] <= dealt[-1] < samples:
            broken = f"it has samples {dealt[0]} to {dealt[-1]} of {samples}"
        elif (np.diff(dealt) == 0).any():
            broken = f"sample {dealt[:-1][np.diff(dealt) == 0][0]} is on two devices"
        elif len(dealt) < samples and not leaves_out:
            broken = f"it leaves out {samples - len(dealt)} of {samples} samples, and `leaves_out` is not set"
    if broken:
        raise ConfigError("FV1485", f"partition: {broken}")


def gather(pieces: Sequence[Indices]) -> Indices:
    """One device's pieces as one ascending array."""
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *pieces])).astype(np.int64)


def refuse_empty(name: str, parts: Sequence[Indices]) -> list[Indices]:
    """The parts, if every device got something. Raises ConfigError: a device without samples is of no use."""
    for device, part in enumerate(parts):
        if not len(part):
            raise ConfigError(
                "FV2003",
                f"partition {name}: device {device} of {len(parts)} would get no sample, and a device without one"
                " cannot take part; use fewer devices, another seed, or min_samples = 1 where the partition has it",
            )
    return list(parts)


def refuse_concentration(name: str, value: float) -> None:
    """Raises ConfigError unless `value` can be the alpha of a Dirichlet distribution."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError("FV2002", f"partition: {name} is {value}, expected a number > 0")
