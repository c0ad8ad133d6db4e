"""Label skew in two steps, first over groups of classes, then over the classes of a group."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.datasets.samples import Annotations
from fleet.partitions.dealing import Partition, refuse_concentration


@dataclass(frozen=True, kw_only=True)
class Pachinko(Partition):
    """Each device draws its samples by coarse and fine label; devices get related classes (CIFAR-100).

    Source: FedTP (`labeldir100`), kNN-Per; the allocation of Reddi et al., "Adaptive Federated
    Optimization", arXiv:2003.00295. Device after device, in random order, draws p ~ Dir(alpha) over the
    coarse labels that are left and q ~ Dir(fine_alpha) over the fine labels left in each, then sample by
    sample a coarse label, a fine label, and one of its samples that nobody has. All devices get equally
    many, floor(samples / devices); the rest, fewer than there are devices, is left out.
    """

    leaves_out = True

    alpha: float = 0.3  # concentration over coarse labels, > 0
    fine_alpha: float = 10.0  # concentration over the fine labels of a coarse one, > 0

    def __post_init__(self) -> None:
        refuse_concentration("alpha", self.alpha)
        refuse_concentration("fine_alpha", self.fine_alpha)

    def __call__(self, samples: Annotations, devices: int, rng: np.random.Generator) -> list[Indices]:
        """Raises ConfigError when the data set has no coarse labels."""
        if samples.coarse_labels is None:
            raise ConfigError("FV2003", "partition pachinko needs coarse labels, the data set has none (CIFAR-100 has)")
        heaps = [  # by coarse, then by fine label: indices in random order, samples from the end
            [
                rng.permutation(np.flatnonzero((samples.coarse_labels == coarse) & (samples.labels == fine))).tolist()
                for fine in np.unique(samples.labels[samples.coarse_labels == coarse])
            ]
            for coarse in np.unique(samples.coarse_labels)
        ]
        parts = [np.empty(0, dtype=np.int64)] * devices
        for device in rng.permutation(devices):
            parts[device] = self._take(heaps, len(samples) // devices, rng)
        return parts

    def _take(self, heaps: list[list[list[int]]], count: int, rng: np.random.Generator) -> Indices:
        """One device's samples, removed from `heaps`."""
        coarse = _Chances(self.alpha, [any(fines) for fines in heaps], rng)
        fine = [_Chances(self.fine_alpha, [bool(heap) for heap in fines], rng) for fines in heaps]
        samples = np.empty(count, dtype=np.int64)
        for index in range(count):
            group = coarse.draw()
            member = fine[group].draw()
            samples[index] = heaps[group][member].pop()
            if not heaps[group][member]:
                fine[group].remove(member)
                if not fine[group].left.any():
                    coarse.remove(group)
        return np.sort(samples)


class _Chances:
    """A draw from Dir(alpha) over what is left; what is removed has no chance any more, the rest share it."""

    def __init__(self, alpha: float, left: list[bool], rng: np.random.Generator) -> None:
        self.left = np.array(left)
        self._alpha = alpha
        self._rng = rng
        self._cumulative = np.empty(0)
        self._weights: npt.NDArray[np.float64] = np.zeros(len(left))
        self._weigh()

    def draw(self) -> int:
        """A member that is left; there must be one."""
        return int(self._cumulative.searchsorted(self._rng.random(), side="right"))

    def remove(self, member: int) -> None:
        self.left[member] = False
        self._weights[member] = 0.0
        self._sum_up()

    def _weigh(self) -> None:
        if self.left.any():
            self._weights[self.left] = self._rng.dirichlet(np.full(int(self.left.sum()), self._alpha))
            self._sum_up()

    def _sum_up(self) -> None:
        total = self._weights.sum()
        if total > 0:
            self._cumulative = np.cumsum(self._weights / total)
            # rounding may leave the sum below 1, and random() above it
            self._cumulative[np.flatnonzero(self._weights)[-1] :] = 1.0
        else:
            self._weigh()  # with a tiny alpha those left may all have a weight of 0
