"""Tests of differences, against figures of their papers and against a count of all signs."""

from itertools import product
from pathlib import Path

import pytest

from fleet.experiments.significance import (
    MethodRanks,
    correct_by_holm,
    find_cliques,
    rank_methods,
    run_signed_rank_tests,
)
from tests.support.experiments import make_measured_outcome, read_grid, write_file, written_experiment

FILE = write_file(["skewed", "even"], ["fedavg", "fedper", "local"], seeds=3)
FEDPER = (0.05, 0.12, 0.13, -0.01, 0.2, 0.3)
"""Its differences to FedAvg, in the cells' order."""
CURVES = {
    f"{method}/{partition}/seed-{seed}": [0.3, 0.5 + gap]
    for method, gaps in {"fedavg": [0.0] * 6, "fedper": FEDPER, "local": [-0.1] * 6}.items()
    for (seed, partition), gap in zip(product((0, 1, 2), ("skewed", "even")), gaps, strict=True)
}


def count_signed_ranks(gaps: tuple[float, ...]) -> float:
    """Two-sided p-value by definition: the share of all signs whose smaller sum of ranks is as small."""
    order = sorted(gaps, key=abs)
    ranks = [(order.index(gap) + 1, gap > 0) for gap in gaps]
    positive = sum(rank for rank, above in ranks if above)
    total = sum(rank for rank, _ in ranks)
    extreme = min(positive, total - positive)
    sums = [sum(rank for (rank, _), sign in zip(ranks, signs, strict=True) if sign)
            for signs in product((0, 1), repeat=len(gaps))]  # fmt: skip
    return sum(min(one, total - one) <= extreme for one in sums) / len(sums)


def test_signed_ranks_are_counted_over_all_cells(tmp_path: Path) -> None:
    fedper, local = run_signed_rank_tests(
        make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), CURVES), holm=True
    )
    assert (fedper.method, fedper.pairs, fedper.better, fedper.worse) == ("fedper", 6, 5, 1)
    assert fedper.median == pytest.approx(0.125)
    assert fedper.p == pytest.approx(count_signed_ranks(FEDPER))
    assert local.p == pytest.approx(2 / 2**6)  # all differences are equal and below zero
    assert [fedper.p_holm, local.p_holm] == pytest.approx([0.0625, 0.0625])  # one is 2 of 2^6, times 2


def test_missing_cells_leave_fewer_pairs(tmp_path: Path) -> None:
    curves = {name: means for name, means in CURVES.items() if name != "fedper/even/seed-2"}
    curves = {name: means for name, means in curves.items() if "local" not in name or "skewed/seed-0" in name}
    outcome = make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), curves)
    fedper, local = run_signed_rank_tests(outcome, holm=False)
    assert (fedper.pairs, local.pairs) == (5, 1)
    assert local.p is None  # one pair shows nothing
    assert fedper.p_holm is None
    assert rank_methods(outcome) is None  # all methods have finished in one block alone


def test_equal_methods_do_not_differ(tmp_path: Path) -> None:
    outcome = make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), {name: [0.5] for name in CURVES})
    assert [test.p for test in run_signed_rank_tests(outcome, holm=True)] == [1.0, 1.0]
    ranks = rank_methods(outcome)
    assert ranks is not None
    assert ranks.means == {"fedavg": 2.0, "fedper": 2.0, "local": 2.0}
    assert ranks.friedman_p == 1.0


def test_ranks_and_critical_difference(tmp_path: Path) -> None:
    ranks = rank_methods(make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), CURVES))
    assert ranks is not None
    assert ranks.blocks == 6
    assert ranks.means == pytest.approx({"fedavg": 11 / 6, "fedper": 7 / 6, "local": 3.0})
    # 2.343 is in table 5 (a) of Demšar
    assert ranks.critical_difference == pytest.approx(2.343 * (3 * 4 / (6 * 6)) ** 0.5, abs=1e-3)
    # 12 N / (k (k + 1)) (sum of squared ranks - k (k + 1)^2 / 4), chi square of 2 degrees of freedom
    statistic = 12 * 6 / 12 * ((11 / 6) ** 2 + (7 / 6) ** 2 + 9 - 12)
    assert ranks.friedman_p == pytest.approx(2.718281828 ** (-statistic / 2), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "corrected"),
    [([0.005, 0.01, 0.02], [0.015, 0.02, 0.02]), ([0.5, 0.9], [1.0, 1.0]), ([0.04, 0.01], [0.04, 0.02]), ([], [])],
)
def test_holm(values: list[float], corrected: list[float]) -> None:
    assert correct_by_holm(values) == pytest.approx(corrected)


def test_cliques_are_the_longest_runs_within_the_critical_difference() -> None:
    means = {"a": 1.0, "b": 1.8, "c": 2.9, "d": 4.5}
    assert find_cliques(MethodRanks(means, 9, 1.2, None)) == [(1.0, 1.8), (1.8, 2.9)]
    assert find_cliques(MethodRanks(means, 9, 2.0, None)) == [(1.0, 2.9), (2.9, 4.5)]
    assert find_cliques(MethodRanks(means, 9, 0.5, None)) == []
