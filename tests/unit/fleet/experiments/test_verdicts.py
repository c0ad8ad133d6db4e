"""Verdicts follow the rule, and the pages state no figure that was not kept."""

import re
from pathlib import Path

import msgspec
import pytest

from fedvit.errors import ConfigError
from fleet.experiments.folder import FinishedCell
from fleet.experiments.outcome import make_outcome
from fleet.experiments.report_tables import make_sections
from fleet.experiments.verdicts import (
    Claims,
    KeptAccuracy,
    KeptDifference,
    KeptResults,
    MeasuredClaim,
    Verdict,
    judge,
    keep_results,
    list_figures,
    list_loose_figures,
    main,
    read_claims,
    read_kept_results,
    render_verdicts,
    replace_tables,
    write_kept_results,
)
from profiles.report.experiment import Interval
from tests.support.codes import has_code
from tests.support.experiments import (
    make_measured_outcome,
    make_measured_result,
    read_grid,
    write_file,
    written_experiment,
)

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "docs" / "results"
TABLES = ROOT / "fleet" / "experiments" / "README.md"
FILE = write_file(["even"], ["fedavg", "fedper"])
CURVES = {
    "fedavg/even/seed-0": [0.5], "fedavg/even/seed-1": [0.7], "fedper/even/seed-0": [0.8], "fedper/even/seed-1": [0.95],
}  # fmt: skip


def make_difference(low: float, high: float, *, seeds: int = 5) -> KeptDifference:
    interval = Interval(low, high)
    return KeptDifference(
        method="a", reference="b", partition="p", seeds=seeds, mean=(low + high) / 2, interval=interval
    )


@pytest.mark.parametrize(
    ("difference", "is_fair", "verdict"),
    [
        (make_difference(0.01, 0.1), True, "agrees"),
        (make_difference(-0.1, -0.01), True, "contradicts"),
        (make_difference(-0.1, 0.1), True, "not shown"),
        (make_difference(0.0, 0.1), True, "not shown"),
        (make_difference(0.01, 0.1), False, "not shown"),
        (make_difference(-0.1, -0.01), False, "not shown"),
        (make_difference(0.01, 0.1, seeds=4), True, "not shown"),
        (KeptDifference(method="a", reference="b", partition="p", seeds=5, mean=0.3), True, "not shown"),
    ],
)
def test_rule(difference: KeptDifference, is_fair: bool, verdict: Verdict) -> None:
    assert judge(difference, is_fair=is_fair) == verdict


def test_a_difference_is_found_from_both_sides() -> None:
    kept = KeptResults(experiment="e", scale="s", differences=[make_difference(0.01, 0.1)])
    found = kept.find_difference("b", "a", "p")
    assert (found.mean, found.interval) == (-0.055, Interval(-0.1, -0.01))
    assert judge(found, is_fair=True) == "contradicts"
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        kept.find_difference("a", "b", "other")


@pytest.mark.parametrize(
    ("at_edge", "low", "verdict"),
    [
        ({"a": {"lr": "highest"}, "b": {}}, 0.01, "**agrees**"),
        ({"a": {}, "b": {"lr": "highest"}}, 0.01, "not shown: b's best lr is the highest tried"),
        ({"a": {}, "b": {"lr": "highest"}}, -0.1, "**contradicts**"),
        ({"a": {"lr": "lowest"}, "b": {}}, -0.1, "not shown: a's best lr is the lowest tried"),
    ],
)
def test_search_of_the_method_behind_must_not_end_at_an_edge(
    at_edge: dict[str, dict[str, str]], low: float, verdict: str
) -> None:
    accuracies = [
        KeptAccuracy(method=name, partition=partition, seeds=5, mean=0.5, at_edge=edge if partition == "p" else {})
        for name, edge in at_edge.items()
        for partition in ("other", "p")
    ]
    differences = [make_difference(low, low + 0.05)]
    kept = KeptResults(experiment="e", scale="s", accuracies=accuracies, differences=differences)
    claim = MeasuredClaim(paper="P", claim="c", published="1 / 2", experiment="e", partition="p", ahead="a", behind="b")
    assert f"| {verdict} |" in render_verdicts(Claims(measured=[claim], computed=[]), {"e": kept})


def test_kept_results_are_those_of_the_experiment(tmp_path: Path) -> None:
    outcome = make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), CURVES)
    file = write_kept_results(outcome, tmp_path)
    kept = read_kept_results(file.parent)["tiny"]
    assert kept == keep_results(outcome) == msgspec.json.decode(file.read_bytes(), type=KeptResults)
    assert [(one.method, one.seeds, one.mean) for one in kept.accuracies] == [("fedavg", 2, 0.6), ("fedper", 2, 0.875)]
    difference = kept.find_difference("fedper", "fedavg", "even")
    assert (difference.seeds, difference.mean) == (2, 0.275)
    assert difference.interval == Interval(round(0.275 - 12.7062 * 0.025, 4), round(0.275 + 12.7062 * 0.025, 4))


def test_a_difference_of_a_single_seed_is_kept_without_an_interval(tmp_path: Path) -> None:
    grid = read_grid(written_experiment(tmp_path, FILE))
    first = [FinishedCell(cell, make_measured_result(CURVES[cell.path]), None) for cell in grid.cells if not cell.seed]
    kept = keep_results(make_outcome(grid, first))
    means = {one.method: one.mean for one in kept.accuracies}
    difference = kept.find_difference("fedper", "fedavg", "even")
    assert (difference.seeds, difference.interval) == (1, None)
    assert difference.mean == pytest.approx(means["fedper"] - means["fedavg"])


def test_generated_differences_are_reported_and_kept(tmp_path: Path) -> None:
    grid = read_grid(written_experiment(tmp_path, FILE))
    results = [
        msgspec.structs.replace(make_measured_result(CURVES[cell.path]), generated_difference=difference)
        for cell, difference in zip(grid.cells, (None, 0.2, None, 0.4), strict=True)
    ]
    outcome = make_outcome(
        grid, [FinishedCell(cell, result, None) for cell, result in zip(grid.cells, results, strict=True)]
    )
    assert [one.generated_difference for one in keep_results(outcome).accuracies] == [None, 0.3]
    (section,) = [one for one in make_sections(outcome) if one.name == "generated"]
    assert "0.300 [-0.971, 1.571]" in section.sheet.markdown()


def test_tables_are_written_from_the_kept_results() -> None:
    tables = render_verdicts(read_claims(RESULTS), read_kept_results(RESULTS))
    assert TABLES.read_text() == replace_tables(TABLES.read_text(), tables), "run `make verdicts`"


@pytest.mark.parametrize("page", [TABLES, ROOT / "docs" / "experiments.md"], ids=lambda page: page.parent.name)
def test_pages_state_kept_figures_alone(page: Path) -> None:
    kept = list_figures(read_kept_results(RESULTS).values())
    unknown = [
        text
        for text in list_loose_figures(page.read_text())
        if float(text) not in {round(abs(figure), len(text) - 2) for figure in kept}
    ]
    assert unknown == []


def test_an_unknown_figure_is_noticed() -> None:
    page = f"It has 0.123 of `0.5555` and 10.25.\n{TABLES.read_text()}"
    assert "0.123" in list_loose_figures(page)
    assert not {"0.5555", "0.25"} & set(list_loose_figures(page))


def test_computed_claims_are_checked_by_tests() -> None:
    for claim in read_claims(RESULTS).computed:
        file, _, test = claim.checked_by.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), claim.checked_by


def test_claims_without_figures_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(TABLES.read_bytes())
    (tmp_path / "claims.toml").write_bytes((RESULTS / "claims.toml").read_bytes())
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        main([str(tmp_path), str(page)])
    (tmp_path / "broken.json").write_text('{"experiment": 1}')
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        read_kept_results(tmp_path)
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        replace_tables("a page without marks", "")
