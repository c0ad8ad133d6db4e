"""Differential privacy of a run: the epsilon of each round, accumulated over the rounds in the store.

There are two independent guarantees. For updates of shared tensors: an observer of every model of the run can hardly
tell whether one device took part. For uploaded features: the server itself can hardly distinguish two rows. Both use
the same delta; their limits are described in docs/security.md.
"""

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from coordinator.config import PrivacyConfig, RunConfig
from coordinator.record.record import Record
from coordinator.record.scores import NEXT_EPSILON
from fedvit.errors import ConfigError

NOISE, POPULATION, COHORT = "dp_noise_multiplier", "dp_population", "dp_cohort"
FEATURE_NOISE, FEATURE_ROWS = "dp_feature_noise", "dp_feature_rows"
EPSILON = "dp_epsilon"
ROW_EPSILON, UPLOAD_EPSILON, DEVICE_EPSILON = "dp_row_epsilon", "dp_upload_epsilon", "dp_device_epsilon"


class PrivacyStep(NamedTuple):
    """The noisy sum of one round: `cohort` of `population` devices were drawn."""

    noise_multiplier: float
    population: int
    cohort: int


def compute_cohort_size(config: RunConfig) -> int:
    """Compute the number of devices of a round from the configuration alone: the denominator of private means.

    >>> compute_cohort_size(RunConfig(devices=20, cohort=0.25)), compute_cohort_size(RunConfig(devices=20, cohort=8))
    (5, 8)
    """
    if isinstance(config.cohort, float):
        return max(1, round(config.cohort * config.devices))
    return min(config.cohort, config.devices)


def cohort_seed(config: RunConfig) -> int:
    """The seed of cohorts. Devices know the run's seed, and amplification requires a secret draw."""
    private = config.privacy.noise_multiplier and not config.privacy.deterministic_noise
    return secrets.randbits(63) if private else config.seed


# --- epsilon ------------------------------------------------------------------------------------------


def compute_epsilon(steps: Iterable[PrivacyStep] | Mapping[PrivacyStep, int], privacy: PrivacyConfig) -> float:
    """Compute epsilon of all steps together, for the run's delta. A mapping gives the number of equal steps."""
    times = Counter(steps)
    if not times:
        return 0.0
    if privacy.accounting == "every_round":
        return _gaussian(sum(count * step.noise_multiplier**-2 for step, count in times.items()) ** -0.5, privacy.delta)
    library = import_module("dp_accounting")  # late: other runs do not need it
    accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    for step, count in times.items():
        # replacing a device changes the sum by up to twice the clip
        event = library.GaussianDpEvent(step.noise_multiplier / 2)
        if step.cohort < step.population:
            event = library.SampledWithoutReplacementDpEvent(step.population, step.cohort, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(privacy.delta))


def check_first_round(config: RunConfig, store: Record | None) -> None:
    """Raise ConfigError if the first round of a run would already exceed the epsilon of [stop].

    `store`: the record with the runs that it starts from; None: there is none.
    """
    privacy, limit = config.privacy, config.stop.epsilon
    if limit is None or not privacy.noise_multiplier:
        return
    steps = Counter([PrivacyStep(privacy.noise_multiplier, config.devices, compute_cohort_size(config))])
    if store and config.start_from:
        steps.update(_steps_before(store, config.start_from))
    if (epsilon := compute_epsilon(steps, privacy)) > limit:
        raise ConfigError(
            "FV1028",
            f"stop: epsilon = {limit:g} allows no round: the first one would reach {epsilon:.3g}; raise it, or "
            f"noise_multiplier = {privacy.noise_multiplier:g} in [privacy]",
        )


def _steps_before(store: Record, run: str) -> Counter[PrivacyStep]:
    """Return the steps of a run and of those that it started from."""
    found = Counter[PrivacyStep]()
    for (noise, there, drawn), count in counts_before(store, run, NOISE, POPULATION, COHORT).items():
        found[PrivacyStep(noise, int(there), int(drawn))] += count
    return found


def compute_epsilon_of_rows(rows: int, noise_multiplier: float, delta: float) -> float:
    """Compute epsilon of `rows` noisy feature rows together; replacing one changes it by up to twice the clip."""
    return _gaussian(noise_multiplier / 2 / math.sqrt(rows), delta) if rows else 0.0


def _gaussian(noise_multiplier: float, delta: float) -> float:
    """Exact epsilon: several Gaussian mechanisms are equivalent to one whose precision is the sum of theirs."""
    library = import_module("dp_accounting.gaussian_mechanism")
    return float(library.get_epsilon_gaussian(noise_multiplier, delta))


def counts_before(store: Record, run: str, *names: str) -> Counter[tuple[float, ...]]:
    """Number of closed rounds by the values of these figures, including rounds of runs that this run started from."""
    earlier = store.runs.read(run).config.get("start_from")
    before = counts_before(store, earlier, *names) if earlier else Counter[tuple[float, ...]]()
    found = {values: count for values, count in store.rounds.count_figures(run, names).items() if None not in values}
    return before + Counter(found)  # type: ignore[arg-type]  # without None


def round_figures(
    store: Record, run: str, config: RunConfig, step: PrivacyStep, feature_rows: Sequence[int]
) -> dict[str, float]:
    """Figures for the record of a round that is about to close, including the run's epsilon after it.

    The epsilons are computed from the store, so that they survive a restart. `step` is that of the round's noise.
    `feature_rows` are the rows of each device's upload; every device counts as if all its uploads were as large as each
    round's largest.
    """
    privacy, figures = config.privacy, dict[str, float]()
    if not (privacy.noise_multiplier or privacy.feature_noise):
        return figures
    if privacy.noise_multiplier:
        figures |= {NOISE: step.noise_multiplier, POPULATION: float(step.population), COHORT: float(step.cohort)}
        steps = Counter([step])
        steps.update(_steps_before(store, run))
        figures[EPSILON] = compute_epsilon(steps, privacy)
        if config.stop.epsilon is not None:
            steps[step] += 1
            figures[NEXT_EPSILON] = compute_epsilon(steps, privacy)
    if privacy.feature_noise and feature_rows:
        most = max(feature_rows)
        figures |= {FEATURE_NOISE: privacy.feature_noise, FEATURE_ROWS: float(most)}
        # rows under noise z count as (z' / z)^2 rows under noise z'
        rows = most + sum(
            count * before * (privacy.feature_noise / noise) ** 2
            for (noise, before), count in counts_before(store, run, FEATURE_NOISE, FEATURE_ROWS).items()
        )
        for name, count in ((ROW_EPSILON, 1), (UPLOAD_EPSILON, most), (DEVICE_EPSILON, math.ceil(rows))):
            figures[name] = compute_epsilon_of_rows(count, privacy.feature_noise, privacy.delta)
    return figures
