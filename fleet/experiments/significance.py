"""Tests of differences between methods over several partitions and seeds.

Source: Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006. A block is a partition
with a seed on which every method has finished; it stands for one of the paper's data sets.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range, wilcoxon

from fleet.experiments.outcome import CONFIDENCE
from profiles.report.experiment import ExperimentOutcome

_DIGITS = 12
"""Decimal places of a difference; further ones are rounding errors, which would break ties."""


class SignedRankTest(NamedTuple):
    """Wilcoxon's signed-rank test of a method against the reference, over the cells that both have finished."""

    method: str
    pairs: int
    better: int  # pairs in which the method is ahead
    worse: int
    median: float | None  # of the differences; None without a pair
    p: float | None  # two-sided; None for fewer than two pairs
    p_holm: float | None = None  # corrected for the number of methods; None without a correction


class MethodRanks(NamedTuple):
    """Mean ranks of all methods, 1 for the best, and how far two of them must be apart."""

    means: dict[str, float]
    blocks: int
    critical_difference: float  # Nemenyi's
    friedman_p: float | None  # None for fewer than three methods


def run_signed_rank_tests(outcome: ExperimentOutcome, *, holm: bool) -> list[SignedRankTest]:
    """Test every method against the reference; `holm` corrects for the number of tests."""
    accuracies = _read_accuracies(outcome)
    base = accuracies[outcome.reference]
    tests = []
    for method, own in accuracies.items():
        if method == outcome.reference:
            continue
        gaps = [round(own[place] - base[place], _DIGITS) for place in base if place in own]
        tests.append(
            SignedRankTest(
                method=method,
                pairs=len(gaps),
                better=sum(gap > 0 for gap in gaps),
                worse=sum(gap < 0 for gap in gaps),
                median=median(gaps) if gaps else None,
                p=_compute_p(gaps),
            )
        )
    if not holm:
        return tests
    corrected = iter(correct_by_holm([test.p for test in tests if test.p is not None]))
    return [test if test.p is None else test._replace(p_holm=next(corrected)) for test in tests]


def correct_by_holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, in their order. Source: Holm, Scandinavian Journal of Statistics 6, 1979.

    >>> correct_by_holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def rank_methods(outcome: ExperimentOutcome) -> MethodRanks | None:
    """Rank the methods in every block; None for fewer than two methods or blocks."""
    accuracies = _read_accuracies(outcome)
    blocks = [
        place for place in next(iter(accuracies.values()), {}) if all(place in own for own in accuracies.values())
    ]
    count = len(accuracies)
    if count < 2 or len(blocks) < 2:
        return None
    table = np.array([[round(own[place], _DIGITS) for own in accuracies.values()] for place in blocks])
    ranks = rankdata(-table, axis=1)
    # the studentized range of infinitely many degrees of freedom: table 5 of the source
    quantile = float(studentized_range.ppf(CONFIDENCE, count, np.inf)) / 2**0.5
    is_tied = bool((ranks == ranks[0, 0]).all())
    return MethodRanks(
        means={method: fmean(ranks[:, column]) for column, method in enumerate(accuracies)},
        blocks=len(blocks),
        critical_difference=quantile * (count * (count + 1) / (6 * len(blocks))) ** 0.5,
        friedman_p=None if count < 3 else 1.0 if is_tied else float(friedmanchisquare(*table.T).pvalue),
    )


def find_cliques(ranks: MethodRanks) -> list[tuple[float, float]]:
    """Find the longest runs of mean ranks that lie within the critical difference; each as its ends."""
    places = sorted(ranks.means.values())
    runs = [
        (low, max(place for place in places if place - low <= ranks.critical_difference))
        for low in dict.fromkeys(places)
    ]
    return [
        (low, high)
        for at, (low, high) in enumerate(runs)
        if high > low and not any(high <= before for _, before in runs[:at])
    ]


def _read_accuracies(outcome: ExperimentOutcome) -> dict[str, dict[tuple[str, int], float]]:
    """Accuracy of every method in every finished cell, by partition and seed."""
    accuracies: dict[str, dict[tuple[str, int], float]] = {method: {} for method in outcome.methods}
    for cell in outcome.cells:
        if cell.result:
            accuracies[cell.method][cell.partition, cell.seed] = cell.result.accuracy.mean
    return accuracies


def _compute_p(gaps: Sequence[float]) -> float | None:
    if len(gaps) < 2:
        return None
    return float(wilcoxon(gaps).pvalue) if any(gaps) else 1.0
