"""Differential privacy of a run: what a round costs, added up over the rounds that the store holds.

Two promises that have nothing to do with each other. Of shared tensors' updates: an observer of every model of the
run can hardly tell whether one device took part. Of uploaded features: the server itself can hardly tell one row from
another. Both are for one delta; what they leave open is in docs/security.md.
"""

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordinator.config import PrivacyConfig, RunConfig
from coordinator.record.store import Store

NOISE, POPULATION, COHORT = "dp_noise_multiplier", "dp_population", "dp_cohort"
FEATURE_NOISE, FEATURE_ROWS = "dp_feature_noise", "dp_feature_rows"
EPSILON = "dp_epsilon"
ROW_EPSILON, UPLOAD_EPSILON, DEVICE_EPSILON = "dp_row_epsilon", "dp_upload_epsilon", "dp_device_epsilon"


class Step(NamedTuple):
    """One round's noisy sum. `population` devices were there, of which `cohort` were drawn."""

    noise_multiplier: float
    population: int
    cohort: int


def expected_cohort(config: RunConfig) -> int:
    """Devices of a round, from the configuration alone: the denominator of private means.

    >>> expected_cohort(RunConfig(devices=20, cohort=0.25)), expected_cohort(RunConfig(devices=20, cohort=8))
    (5, 8)
    """
    if isinstance(config.cohort, float):
        return max(1, round(config.cohort * config.devices))
    return min(config.cohort, config.devices)


def cohort_seed(config: RunConfig) -> int:
    """What the cohort is drawn from: devices know the run's seed, and amplification wants a secret draw."""
    private = config.privacy.noise_multiplier and not config.privacy.rehearsal
    return secrets.randbits(63) if private else config.seed


# --- what was spent -----------------------------------------------------------------------------------


def spent(steps: Iterable[Step] | Mapping[Step, int], privacy: PrivacyConfig) -> float:
    """Epsilon of all steps together, for the run's delta and under its assumption on which devices are asked.

    Equal steps may be given as their number.
    """
    times = Counter(steps)
    if not times:
        return 0.0
    if privacy.accounting == "every_round":
        return _gaussian(sum(count * step.noise_multiplier**-2 for step, count in times.items()) ** -0.5, privacy.delta)
    import dp_accounting
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    for step, count in times.items():
        # to replace a device moves the sum by up to twice the clip
        event = dp_accounting.GaussianDpEvent(step.noise_multiplier / 2)
        if step.cohort < step.population:
            event = dp_accounting.SampledWithoutReplacementDpEvent(step.population, step.cohort, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(privacy.delta))


def spent_on_rows(rows: int, noise_multiplier: float, delta: float) -> float:
    """Epsilon of `rows` noisy feature rows together; to replace one moves it by up to twice the clip."""
    return _gaussian(noise_multiplier / 2 / math.sqrt(rows), delta) if rows else 0.0


def _gaussian(noise_multiplier: float, delta: float) -> float:
    """Exactly, not by a bound: several Gaussian mechanisms are one whose precision is the sum of theirs."""
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise_multiplier, delta))


def counts_before(store: Store, run: str, *names: str) -> Counter[tuple[float, ...]]:
    """How many closed rounds noted these figures of themselves, by their values: of all rounds that touched the run's
    tensors, those of runs that it started from included."""
    earlier = store.run(run).config.get("start_from")
    before = counts_before(store, earlier, *names) if earlier else Counter[tuple[float, ...]]()
    found = {values: count for values, count in store.figure_counts(run, names).items() if None not in values}
    return before + Counter(found)  # type: ignore[arg-type]  # without None


def round_figures(
    store: Store, run: str, config: RunConfig, *, population: int, cohort: int, feature_rows: Sequence[int]
) -> dict[str, float]:
    """What a round that is about to close adds to its record, the run's epsilon after it included.

    The epsilons follow from the store alone, so that a restart forgets nothing. `feature_rows` are those of each
    device's upload; a device is counted as if all its uploads were as large as each round's largest.
    """
    privacy, figures = config.privacy, dict[str, float]()
    if not (privacy.noise_multiplier or privacy.feature_noise):
        return figures
    if privacy.noise_multiplier:
        figures |= {NOISE: privacy.noise_multiplier, POPULATION: float(population), COHORT: float(cohort)}
        steps = Counter([Step(privacy.noise_multiplier, population, cohort)])
        for (noise, there, drawn), count in counts_before(store, run, NOISE, POPULATION, COHORT).items():
            steps[Step(noise, int(there), int(drawn))] += count
        figures[EPSILON] = spent(steps, privacy)
    if privacy.feature_noise and feature_rows:
        most = max(feature_rows)
        figures |= {FEATURE_NOISE: privacy.feature_noise, FEATURE_ROWS: float(most)}
        # rows under noise z count as (z' / z)^2 rows under noise z'
        rows = most + sum(
            count * before * (privacy.feature_noise / noise) ** 2
            for (noise, before), count in counts_before(store, run, FEATURE_NOISE, FEATURE_ROWS).items()
        )
        for name, count in ((ROW_EPSILON, 1), (UPLOAD_EPSILON, most), (DEVICE_EPSILON, math.ceil(rows))):
            figures[name] = spent_on_rows(count, privacy.feature_noise, privacy.delta)
    return figures
