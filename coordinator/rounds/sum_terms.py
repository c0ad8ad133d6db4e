"""Terms of a secure sum: its integers and its noise, from the configuration and the rounds before."""

import math

from msgspec.structs import replace

from coordinator.config import RunConfig
from coordinator.config.sums import SUM_CODECS
from coordinator.record.privacy import compute_cohort_size
from coordinator.record.record import Record
from fedvit.secure.fixed_point import choose_bits, find_error_bound
from fedvit.secure.layout import Layout, TrainedSum
from fedvit.secure.neighbours import choose_degree
from fedvit.secure.noise import find_multiplier, find_range
from fedvit.wire.messages import SumNoise, SumTerms

LEAST_COUNTING = 2.0
"""Noise in a count of devices, times that of the update, at least: with 2 the update has 3 % more than without."""
COUNTING_SHARE = 1 / 20
"""Noise in a count of devices, as a share of the cohort (Andrew et al., arXiv:1905.03871, section 3)."""
_CLIPS = 1e-6, 1e6
HEADROOM = 4.0
"""Range of a coded sum, as a multiple of the mean of the devices' largest numbers in the round before."""


def make_terms(
    layout: Layout,
    config: RunConfig,
    devices: int,
    images: int,
    noise: SumNoise | None = None,
    largest: float | None = None,
) -> SumTerms:
    """Make the terms of a sum of at most so many devices, each with up to so many images.

    `largest`: mean of the devices' largest numbers, if it has a codec.
    """
    sums, devices = config.sums, max(1, devices)
    degree = choose_degree(devices, sums.leaving, sums.neighbours)
    terms = SumTerms(layout.digest, devices, degree, sums.bits, sums.range, max(1, images))
    if largest is not None:
        bits = choose_bits(SUM_CODECS[config.updates.up], devices)
        return replace(terms, bits=bits, range=min(sums.range, max(HEADROOM * largest, _CLIPS[0])))
    if noise is None:
        return terms
    return replace(terms, range=find_range(noise, devices, degree), max_weight=1, noise=noise)


def find_noise(store: Record, run: str, config: RunConfig, number: int) -> SumNoise | None:
    """Find the noise of a round's training; None without privacy.

    With `clip_quantile` the clip follows the share of updates that were within it in the round before, and that count
    has noise, too: both together have the configured multiplier (Andrew et al., theorem 1).
    """
    privacy = config.privacy
    if not privacy.noise_multiplier or privacy.clip is None:
        return None
    if privacy.clip_quantile is None:
        return SumNoise(privacy.clip, privacy.noise_multiplier)
    before = store.rounds.read(run, number - 1)
    figures, clip = before.figures if before else {}, privacy.clip
    if "sum_within" in figures:
        within = min(1.0, max(0.0, figures["sum_within"]))
        clip = figures["sum_clip"] * math.exp(-privacy.clip_rate * (within - privacy.clip_quantile))
    counting = max(compute_cohort_size(config) * COUNTING_SHARE, LEAST_COUNTING * privacy.noise_multiplier)
    multiplier = (privacy.noise_multiplier**-2 - (2 * counting) ** -2) ** -0.5
    return SumNoise(min(max(clip, _CLIPS[0]), _CLIPS[1]), multiplier, counting)


def find_largest(store: Record, run: str, config: RunConfig, number: int) -> float | None:
    """Find the mean of the devices' largest numbers in the round before; None without a codec, or such a round."""
    if config.updates.up not in SUM_CODECS:
        return None
    before = store.rounds.read(run, number - 1)
    return before.figures.get("sum_largest") if before else None


def find_denominator(config: RunConfig) -> int | None:
    """Return what a noisy sum is divided by, which must not depend on who answers; None: its weight."""
    return compute_cohort_size(config) if config.privacy.noise_multiplier else None


def describe_training(
    trained: TrainedSum, terms: SumTerms, denominator: int | None, *, began: int, summed: int
) -> dict[str, float]:
    """Return the figures of a sum of updates for the record, by name."""
    weight = denominator or max(1, trained.samples)
    figures = {"clipped": float(trained.clipped), "error_bound": find_error_bound(weight, terms)}
    figures |= {} if trained.loss is None else {"loss": trained.loss}
    if terms.noise:
        figures |= {"clip": terms.noise.clip, "noise_multiplier": find_multiplier(terms, began, summed)}
    figures |= {} if trained.largest is None else {"largest": trained.largest / summed}
    return figures if trained.within is None else figures | {"within": trained.within}
