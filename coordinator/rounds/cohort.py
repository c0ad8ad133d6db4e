"""The choice of devices for a round."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from coordinator.config import load_selector
from coordinator.record.tables import Asked, ResultRecord
from fedvit.errors import ConfigError

CANDIDATES = 2
"""Devices that power-of-choice draws for each one that it asks (paper: d / m)."""
FIRST_EXPLORED, EXPLORED_DECAY, LEAST_EXPLORED = 0.9, 0.98, 0.2
"""Share of a cohort that Oort takes from devices without an answer: in round 1, its factor each round, and at least."""
NEAR_CUTOFF = 0.95
"""Devices with this share of the utility that suffices for a place are drawn, too."""
MOST_LOSS = 1e6
MOST_SLOWNESS = 1e6
"""Larger losses, whatever a device claims, count as this."""
SLOWNESS_POWER = 2
"""Strength with which Oort avoids slow devices (paper: alpha)."""


def cohort_size(cohort: float | int, devices: int) -> int:
    """Number of devices in a cohort: `cohort` is a share of `devices` (float, rounded, at least one) or a number.

    >>> cohort_size(0.25, 10), cohort_size(0.01, 10), cohort_size(8, 3)
    (2, 1, 3)
    """
    wanted = max(1, round(cohort * devices)) if isinstance(cohort, float) else cohort
    return min(wanted, devices)


def select_uniform(devices: Iterable[str], wanted: int, seed: int, round_number: int, *purpose: int) -> list[str]:
    """A uniformly random subset, sorted.

    The same devices, seed and round always give the same cohort, in any order of arrival; another `purpose` gives an
    independent draw.

    >>> select_uniform(["c", "a", "b"], 3, seed=0, round_number=1)
    ['a', 'b', 'c']
    """
    names = sorted(devices)
    if wanted >= len(names):
        return names
    draw = np.random.default_rng([seed, round_number, *purpose])
    return sorted(str(name) for name in draw.choice(names, wanted, replace=False))


def select_fair(
    devices: Iterable[str], wanted: int, seed: int, round_number: int, before: Mapping[str, Asked]
) -> list[str]:
    """Devices that were not asked for the longest time, sorted by name; ties: asked least often, then at random.

    >>> select_fair(["a", "b", "c"], 1, 0, 3, {"a": Asked(1, 1), "b": Asked(2, 1), "c": Asked(1, 2)})
    ['a']
    """
    names = sorted(devices)
    random_order = np.random.default_rng([seed, round_number]).permutation(len(names))
    turns = sorted(
        (before.get(name, Asked(0, 0)), int(rank), name) for name, rank in zip(names, random_order, strict=True)
    )
    return sorted(name for _, _, name in turns[:wanted])


def select_power_of_choice(
    devices: Iterable[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
) -> list[str]:
    """Select devices with the highest loss in their newest answer among CANDIDATES times as many, sorted by name.

    A device that has not answered yet comes first.
    Source: Cho et al., arXiv:2010.01243, algorithm rpow-d. Differs from the paper: candidates are drawn uniformly.
    """
    candidates = select_uniform(devices, CANDIDATES * wanted, seed, round_number)
    draw = np.random.default_rng([seed, round_number, 1])
    losses = {name: answers[name].metrics.get("loss", 0.0) if name in answers else np.inf for name in candidates}
    ties = dict(zip(candidates, draw.permutation(len(candidates)), strict=True))
    return sorted(sorted(candidates, key=lambda name: (-losses[name], ties[name]))[:wanted])


def select_oort(
    devices: Iterable[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
) -> list[str]:
    """Some devices without an answer, and others drawn by their utility, sorted by name.

    Source: Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, algorithm 1.
    Differs from the paper: the utility has the mean loss in place of its root mean square, a device is slow if it
    takes longer than the median, and no device is left out because it was asked often.
    """
    names = sorted(devices)
    known = [name for name in names if name in answers]
    others = [name for name in names if name not in known]
    share = max(LEAST_EXPLORED, FIRST_EXPLORED * EXPLORED_DECAY ** (round_number - 1))
    explored = min(len(others), max(round(share * wanted), wanted - len(known)))
    chosen = select_uniform(others, explored, seed, round_number)
    exploited = min(wanted - len(chosen), len(known))
    if exploited:
        utility = find_utility([answers[name] for name in known], round_number)
        cutoff = NEAR_CUTOFF * np.sort(utility)[-exploited]
        pool = np.flatnonzero(utility >= cutoff)
        weights = utility[pool] + np.finfo(float).tiny
        draw = np.random.default_rng([seed, round_number, 2])
        picked = draw.choice(pool, exploited, replace=False, p=weights / weights.sum())
        chosen += [known[place] for place in picked]
    return sorted(chosen)


Selector = Callable[[Collection[str], int, int, int, Mapping[str, ResultRecord]], list[str]]
"""(available devices, wanted, seed, round, newest answer of each device) -> devices to ask."""

BY_ANSWERS: dict[str, Selector] = {"power_of_choice": select_power_of_choice, "oort": select_oort}
"""Selections that read the devices' newest answers."""


def find_selector(name: str) -> Selector | None:
    """Find the selector of that name, of fedvit or of a package; None: the selection reads no answers.

    Raises ConfigError if a package's cannot be used. That of a package is checked each time.
    """
    packaged = load_selector(name)
    if packaged is None:
        return BY_ANSWERS.get(name)

    def select(
        devices: Collection[str], wanted: int, seed: int, round_number: int, answers: Mapping[str, ResultRecord]
    ) -> list[str]:
        names = sorted(devices)
        chosen = packaged(names, wanted, seed, round_number, answers) if names else []
        if len(chosen) != min(wanted, len(names)) or not {*chosen} <= {*names} or len({*chosen}) < len(chosen):
            raise ConfigError(
                "FV1485",
                f"selector {name!r}: round {round_number}: {wanted} different devices of {len(names)} are wanted, it "
                f"chose {chosen!r}",
            )
        picked = {*chosen}
        return [name for name in names if name in picked]  # not its own copies, as texts of NumPy cannot be stored

    return select


def find_utility(answers: Sequence[ResultRecord], round_number: int) -> npt.NDArray[np.float64]:
    """Oort's utility of devices: images x loss, at most the loss below which 95 % lie, in units of the largest, plus
    sqrt(0.1 ln R / r) for an answer of round r; then times (T / t)^2 for a device that takes t > T.

    T is the median of t: seconds of training, or FLOPs where no device measured seconds, as in simulations.
    """
    gain = np.clip([answer.metrics.get("loss", 0.0) for answer in answers], 0, MOST_LOSS)
    gain = gain * [answer.samples for answer in answers]
    gain = np.minimum(gain, np.percentile(gain, 95, method="lower"))
    gain /= max(gain.max(), np.finfo(float).tiny)
    ages = np.array([max(1, answer.round) for answer in answers])
    utility: npt.NDArray[np.float64] = gain + np.sqrt(0.1 * np.log(max(1, round_number)) / ages)
    seconds = [answer.use.train_s for answer in answers]
    spent = seconds if any(seconds) else [answer.use.flops for answer in answers]
    if measured := [one for one in spent if one]:
        median = float(np.median(measured))
        slowness = np.array([min(max(1.0, (one or median) / median), MOST_SLOWNESS) for one in spent])
        utility /= slowness**SLOWNESS_POWER
    return utility
