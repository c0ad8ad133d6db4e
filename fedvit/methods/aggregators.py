"""Aggregation of a cohort's deltas: the mean, and rules that a malicious minority cannot move at will.

All rules but the mean weigh devices equally, as an attacker could claim any number of samples.
A delta is loaded by a function. If that returns a reader of a file (`TensorReader`), also of coded or clipped
updates, the memory does not grow with the cohort: beside the result it is one tensor of one device, or blocks of
COHORT_VALUES numbers of all devices together. Rules by distances also hold n x n distances of n devices.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fedvit import plugins
from fedvit.errors import ConfigError, EmptyCohort
from fedvit.tensors import Array, TensorReader, reader_of

Floats = npt.NDArray[np.float64]

BLOCK_VALUES = 1 << 18
"""Numbers of one device that are compared with the other devices' at a time, where the cohort is small."""
COHORT_VALUES = 1 << 23
"""Numbers of all devices together that are compared at a time: 64 MiB, and the same again for sorting."""


class Delta(NamedTuple):
    """One device's update. Weights of a cohort sum to 1."""

    weight: float
    load: Callable[[], Mapping[str, Array]]


class Aggregator(ABC):
    """Turns a cohort's deltas into the step that the server's tensors make.

    An installed package adds its own by entry points (docs/plugins.md).
    """

    @classmethod
    def against(cls, malicious_share: float) -> Self:
        """Make one against a share in [0, 0.5) of the cohort; by default all options have their defaults."""
        return cls()

    @abstractmethod
    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        """The step times `scale`, for those `names` that the deltas hold. Raises EmptyCohort for too few deltas."""


@dataclass(frozen=True)
class Mean(Aggregator):
    """The weighted mean: one delta in memory at a time. A single device can move it anywhere.

    Source: McMahan et al., arXiv:1602.05629.
    """

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        total: dict[str, Floats] = {}
        for delta in deltas:
            if not delta.weight:
                continue
            for name, value in _choose(delta.load(), names):
                step = value.astype(np.float64) * (delta.weight * scale)
                total[name] = total[name] + step if name in total else step
        return total


# --- each coordinate by itself ------------------------------------------------------------------------


class Coordinatewise(Aggregator):
    """A rule for one number of every device, applied to all numbers."""

    @abstractmethod
    def centre(self, values: Floats) -> Floats:
        """(devices, numbers) -> (numbers,). May change its input."""

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        loaded = _load(deltas)
        step: dict[str, Floats] = {}
        for name in _common(loaded, names):
            shape = loaded[0].shape(name)
            flat = np.empty(math.prod(shape))
            for part, values in _blocks(loaded, name):
                flat[part] = self.centre(values) * scale
            step[name] = flat.reshape(shape)
        return step


@dataclass(frozen=True)
class Median(Coordinatewise):
    """The median of every coordinate, which lies among honest values while less than half of the devices lie.

    Source: Yin et al., "Byzantine-Robust Distributed Learning", arXiv:1803.01498, definition 1.
    """

    def centre(self, values: Floats) -> Floats:
        middle: Floats = np.median(values, axis=0, overwrite_input=True)
        return middle


@dataclass(frozen=True)
class TrimmedMean(Coordinatewise):
    """The mean of every coordinate without its lowest and its highest `share` of values.

    Source: Yin et al., arXiv:1803.01498, definition 2 (there: beta). As robust as the median while at most that
    share of the devices lies, and closer to the mean where devices differ honestly.
    """

    share: float  # in [0, 0.5); cut at either end

    def centre(self, values: Floats) -> Floats:
        cut = _count(self.share, len(values))
        values.sort(axis=0)
        mean: Floats = values[cut : len(values) - cut].mean(axis=0)
        return mean


# --- whole updates by their distances -----------------------------------------------------------------


class ByDistance(Aggregator):
    """A mean whose weights follow from how far the updates are from each other."""

    @abstractmethod
    def weights(self, squared: Floats) -> Floats:
        """(n, n) squared distances between n updates -> (n,) weights that sum to 1. Raises EmptyCohort."""

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        loaded = _load(deltas)
        chosen = self.weights(compute_squared_distances(loaded, names))
        weighted = [Delta(float(weight), delta.load) for weight, delta in zip(chosen, deltas, strict=True)]
        return Mean().combine(weighted, names, scale)


@dataclass(frozen=True)
class Krum(ByDistance):
    """The one update (`multi`: the mean of n - f) whose n - f - 2 nearest others are nearest.

    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017
    (arXiv:1703.02757). Of n updates f may be malicious, f the share of n rounded down; it needs n >= 2 f + 3.
    """

    share: float  # of devices that may be malicious, in [0, 0.5)
    multi: bool = False

    def weights(self, squared: Floats) -> Floats:
        count = len(squared)
        malicious = _count(self.share, count)
        if count < 2 * malicious + 3:
            raise EmptyCohort(
                "FV1503", f"Krum against {malicious} malicious devices needs {2 * malicious + 3} results, {count} came"
            )
        others = np.sort(squared + np.diag(np.full(count, np.inf)), axis=1)
        scores = others[:, : count - malicious - 2].sum(axis=1)
        chosen = np.argsort(scores, kind="stable")[: count - malicious if self.multi else 1]
        weights = np.zeros(count)
        weights[chosen] = 1 / len(chosen)
        return weights


@dataclass(frozen=True)
class GeometricMedian(ByDistance):
    """The point whose distances to all updates have the smallest sum; sound while less than half of the devices lie.

    Source: Pillutla et al., "Robust Aggregation for Federated Learning", arXiv:1912.13445: the smoothed Weiszfeld
    algorithm, with equal weights. It stays among the updates' weighted means, so that it runs on their distances:
    for weights w that sum to 1, |v - x_i|^2 = sum_j w_j D_ij - 1/2 sum_jk w_j w_k D_jk.
    """

    smoothing: float = 1e-6  # least distance, relative to the median one (paper: nu)
    steps: int = 100

    def weights(self, squared: Floats) -> Floats:
        count = len(squared)
        weights: Floats = np.full(count, 1 / count)
        least = self.smoothing * math.sqrt(float(np.median(squared)) or float(squared.max()))
        if not least:  # all are the same
            return weights
        for _ in range(self.steps):
            towards = squared @ weights
            distances = np.sqrt(np.maximum(towards - 0.5 * float(weights @ towards), 0.0))
            pull = least / np.maximum(distances, least)
            following = pull / pull.sum()
            settled = float(np.abs(following - weights).max()) < 1e-9
            weights = following
            if settled:
                break
        return weights


def compute_squared_distances(loaded: Sequence[TensorReader], names: Collection[str]) -> Floats:
    """(n, n): |x_i - x_j|^2 over all tensors together, added up block by block in float64."""
    products = np.zeros((len(loaded), len(loaded)))
    for name in _common(loaded, names):
        for _, values in _blocks(loaded, name):
            products += values @ values.T
    own = np.diag(products)
    squared: Floats = np.maximum(own[:, None] + own[None, :] - 2 * products, 0.0)
    return squared


def norm_of(tensors: Mapping[str, Array], names: Collection[str] | None = None) -> float:
    """Euclidean norm of all floating tensors together (of `names`), in float64 and block by block."""
    reader = reader_of(tensors)
    total = 0.0
    for name in reader:
        if (names is None or name in names) and np.issubdtype(reader.part(name, 0, 0).dtype, np.floating):
            for _, values in _blocks([reader], name):
                total += float(np.square(values).sum())
    return math.sqrt(total)


# --- by name ------------------------------------------------------------------------------------------

AGGREGATORS: Mapping[str, Callable[[float], Aggregator]] = {
    "mean": lambda _: Mean(),
    "median": lambda _: Median(),
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": lambda share: Krum(share, multi=True),
    "geometric_median": lambda _: GeometricMedian(),
}
"""Name -> an aggregator against a share of the cohort, in [0, 0.5), that may be malicious."""


def make_aggregator(name: str, malicious_share: float) -> Aggregator:
    """An aggregator by name, against a share in [0, 0.5) of the cohort that may be malicious.

    Raises ConfigError for an unknown name, and if a package's cannot be used. Its results are checked each time.
    """
    plugins.check_value(plugins.AGGREGATORS, "aggregator", name, AGGREGATORS)
    entry = plugins.find_entry(plugins.AGGREGATORS, name, AGGREGATORS)
    if entry is None:
        return AGGREGATORS[name](malicious_share)
    kind = plugins.load_class(plugins.AGGREGATORS, entry, Aggregator)  # type: ignore[type-abstract]
    return CheckedAggregator(name, plugins.make(plugins.AGGREGATORS, entry, lambda: kind.against(malicious_share)))


@dataclass(frozen=True)
class CheckedAggregator(Aggregator):
    """An aggregator of a package, whose result must be a finite number for each of the tensors' numbers."""

    name: str
    rule: Aggregator

    def combine(self, deltas: Sequence[Delta], names: Collection[str], scale: float = 1.0) -> dict[str, Floats]:
        """Raises EmptyCohort as the rule does, and ConfigError for a wrong result."""
        step = self.rule.combine(deltas, names, scale)
        first = reader_of(deltas[0].load())
        wanted = {name: first.shape(name) for name in first if name in names}
        if (shapes := {name: np.shape(value) for name, value in step.items()}) != wanted:
            raise ConfigError("FV1485", f"aggregator {self.name!r}: its step has tensors {shapes}, expected {wanted}")
        for name, value in step.items():
            if not np.isfinite(value).all():
                raise ConfigError("FV1485", f"aggregator {self.name!r}: its step for tensor {name!r} is not finite")
        return step


# --- reading ------------------------------------------------------------------------------------------


def _count(share: float, of: int) -> int:
    """
    >>> _count(0.3, 10), _count(0.3, 9)
    (3, 2)
    """
    return int(share * of + 1e-9)  # 0.29 * 100 is a little less than 29


def _choose(tensors: Mapping[str, Array], names: Collection[str]) -> Iterator[tuple[str, Array]]:
    """One after the other; the others are not read."""
    for name in tensors:
        if name in names:
            yield name, tensors[name]


def _load(deltas: Sequence[Delta]) -> list[TensorReader]:
    if not deltas:
        raise EmptyCohort("FV1502", "no update is left to aggregate")
    return [reader_of(delta.load()) for delta in deltas]


def _common(loaded: Sequence[TensorReader], names: Collection[str]) -> list[str]:
    return [name for name in loaded[0] if name in names]


def _blocks(loaded: Sequence[TensorReader], name: str) -> Iterator[tuple[slice, Floats]]:
    """Parts of one tensor, (devices, numbers) each; the next one is read into the same memory."""
    size = math.prod(loaded[0].shape(name))
    length = max(1, min(BLOCK_VALUES, COHORT_VALUES // len(loaded), size))
    values = np.empty((len(loaded), length))
    for first in range(0, size, length):
        block = values[:, : size - first]
        for row, tensors in zip(block, loaded, strict=True):
            row[:] = tensors.part(name, first, first + len(row))
        yield slice(first, first + block.shape[1]), block
