"""Choose the values that a device uploads. A Program names its sampler (`fedvit.program.Collect`)."""

from typing import Any, Protocol

import numpy as np

from fedvit.program import Collect
from fedvit.tensors import Array


class Sampler(Protocol):
    """The choice among the images of one phase."""

    def positions(self, epoch: int, rows: Array, readable: Array) -> list[int]:
        """The positions of the chosen images in a batch of the images `rows`."""

    def record(self, epoch: int, rows: Array, readable: Array, values: Array) -> None:
        """Store the values of the chosen images of a batch; `rows` are indices of the device's images."""

    def collect(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the stored values, (n, *shape) float32, and their labels, (n,) int64, or (n, ...) of other tasks."""


class MedianSampler:
    """EFTViT's choice by the median, drawn before training, so that only uploaded features are stored.

    With n_c images of class c and med their median over the classes that are present: a class with fewer
    than med gives features of all E epochs, any other those of the last epoch; of more than med candidates,
    med are drawn without replacement. So med features per class, or E * n_c where that is fewer: such a
    class tells its number of images. Source: EFTViT, arXiv:2412.00334.
    """

    def __init__(self, labels: Array, epochs: int, threshold: float, rng: np.random.Generator) -> None:
        self._labels = labels
        if labels.ndim > 1:  # all images count as of one class where they have other labels
            labels = np.zeros(len(labels), np.int64)
        self._picks: list[dict[int, None]] = [{} for _ in range(epochs)]
        present, counts = np.unique(labels, return_counts=True)
        self.limit = max(1, int(np.floor(np.median(counts)) * threshold)) if len(counts) else 0
        pools = []
        for label, count in zip(present, counts, strict=True):
            rows = np.flatnonzero(labels == label)
            first = 0 if count < self.limit else epochs - 1
            pools.append([(epoch, int(row)) for epoch in range(first, epochs) for row in rows])
        most = self._most([len(pool) for pool in pools])
        for pool in pools:
            if len(pool) > most:
                pool = [pool[index] for index in rng.choice(len(pool), most, replace=False)]
            for epoch, row in pool:
                self._picks[epoch][row] = None
        self._kept: list[tuple[Any, Any]] = []

    def _most(self, candidates: list[int]) -> int:
        """Return the largest number of features of one class, given each present class's number of candidates."""
        return self.limit

    def positions(self, epoch: int, rows: Array, readable: Array) -> list[int]:
        return [position for position, row in enumerate(rows) if int(row) in self._picks[epoch] and readable[position]]

    def record(self, epoch: int, rows: Array, readable: Array, values: Array) -> None:
        for position in self.positions(epoch, rows, readable):
            self._kept.append((np.array(values[position]), self._labels[rows[position]]))

    def collect(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        values = np.stack([value for value, _ in self._kept]) if self._kept else np.zeros((0, *shape), np.float32)
        labels = np.array([label for _, label in self._kept], self._labels.dtype)
        return values, labels.reshape(len(self._kept), *self._labels.shape[1:])


class BalancedSampler(MedianSampler):
    """Equally many features of each class: as many as the median sampler takes of the class with the fewest.

    Images that cannot be read lower that number for all classes. Not in the paper.
    """

    def _most(self, candidates: list[int]) -> int:
        return min([self.limit, *candidates])

    def collect(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        values, labels = super().collect(shape)
        if labels.ndim > 1:
            return values, labels
        _, counts = np.unique(labels, return_counts=True)
        fewest = int(counts.min()) if len(counts) else 0
        chosen = sorted(row for label in set(labels.tolist()) for row in np.flatnonzero(labels == label)[:fewest])
        return values[chosen], labels[chosen]


SAMPLERS: dict[str, type[MedianSampler]] = {"median": MedianSampler, "balanced": BalancedSampler}


def make_sampler(collect: Collect, labels: Array, epochs: int, rng: np.random.Generator) -> Sampler:
    """The sampler that a phase names, for images with these labels."""
    return SAMPLERS[collect.sampler](labels, epochs, collect.threshold, rng)
