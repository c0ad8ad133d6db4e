"""Verdicts follow the rule, and the pages state no figure that was not kept."""

import re
from pathlib import Path

import pytest

from fedvit.errors import ConfigError
from fleet.experiments.kept_results import (
    KeptAccuracy,
    KeptDifference,
    KeptResults,
    list_figures,
    read_kept_results,
)
from fleet.experiments.measured import PAGE, render_measured
from fleet.experiments.verdicts import (
    Claims,
    MeasuredClaim,
    Verdict,
    judge,
    list_loose_figures,
    main,
    read_claims,
    render_verdicts,
    replace_tables,
)
from tests.support.codes import has_code
from tests.support.experiments import make_difference

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "docs" / "results"
TABLES = ROOT / "fleet" / "experiments" / "README.md"


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


def test_tables_are_written_from_the_kept_results() -> None:
    tables = render_verdicts(read_claims(RESULTS), read_kept_results(RESULTS))
    assert TABLES.read_text() == replace_tables(TABLES.read_text(), tables), "run `make verdicts`"


def test_page_of_kept_results_is_written_from_them() -> None:
    page = render_measured(read_kept_results(RESULTS).values(), TABLES.parent)
    assert (TABLES.parent / PAGE).read_text() == page, "run `make verdicts`"


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
    (tmp_path / "README.md").write_bytes(TABLES.read_bytes())
    (tmp_path / "claims.toml").write_bytes((RESULTS / "claims.toml").read_bytes())
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        main([str(tmp_path), str(tmp_path)])
    (tmp_path / "broken.json").write_text('{"experiment": 1}')
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        read_kept_results(tmp_path)
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        replace_tables("a page without marks", "")
