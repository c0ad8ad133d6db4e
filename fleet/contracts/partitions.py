"""Laws of partitions. A rule may refuse samples that it cannot deal out, but not all of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fedvit.data.images import Indices
from fedvit.errors import ConfigError
from fleet.contracts.laws import Law, fail, require
from fleet.datasets.samples import Annotations
from fleet.partitions import deal_out, make_partition, partition, partition_options

_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 40)).astype(np.int64)
SAMPLES = {
    "labels alone": Annotations(labels=_LABELS),
    "two domains": Annotations(labels=_LABELS, coarse_labels=_LABELS // 2, domains=np.arange(400) % 2),
    "twenty domains": Annotations(labels=_LABELS, coarse_labels=_LABELS // 2, domains=np.arange(400) // 20),
}
DEVICES = (1, 2, 5, 10)


class _Dealt(NamedTuple):
    case: str
    samples: Annotations
    parts: list[Indices]


def follow_its_own_options(name: str) -> None:
    """Its options have defaults, and it is made by their names."""
    defaults = partition_options(name)
    require(make_partition(name, **defaults) == make_partition(name), f"{defaults} do not make what no options make")


def deal_every_sample_once(name: str) -> None:
    """Every sample goes to one device, in ascending order."""
    for _ in _deal_cases(name):
        pass  # `deal_out` checks it


def follow_the_seed(name: str) -> None:
    """The same seed deals the same."""
    for case, samples, parts in _deal_cases(name):
        again = partition(name, samples, len(parts), seed=0)
        require(all(map(np.array_equal, parts, again)), f"{case}: two calls with seed 0 differ")


def leave_samples_alone(name: str) -> None:
    """It does not change the samples' labels."""
    for case, samples, _ in _deal_cases(name):
        require(bool((samples.labels == _LABELS).all()), f"{case}: labels have changed")


LAWS: tuple[Law, ...] = (follow_its_own_options, deal_every_sample_once, follow_the_seed, leave_samples_alone)


def _deal_cases(name: str) -> Iterator[_Dealt]:
    rule = make_partition(name)
    refused: ConfigError | None = None
    count = 0
    for case, samples in SAMPLES.items():
        for devices in DEVICES:
            try:
                own = samples.rows(np.arange(len(samples)))
                dealt = _Dealt(f"{case}, {devices} devices", own, deal_out(rule, own, devices, seed=0))
            except ConfigError as error:
                if error.code == "FV1485":
                    fail(f"{case}, {devices} devices: {error}")
                refused = error
                continue
            count += 1
            yield dealt
    if refused and not count:
        fail(f"it refuses all samples: {refused}")
