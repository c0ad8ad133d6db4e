"""Results in files for other programs: the values of CSV and LaTeX are those of the report."""

import csv
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from fedvit.errors import ConfigError
from fleet.experiments.command import write_results
from fleet.experiments.outcome import make_outcome
from fleet.experiments.paper_figures import FigureStyle
from fleet.experiments.report import markdown_report
from fleet.experiments.result_files import read_results, write_csv, write_figures, write_latex
from fleet.experiments.significance import run_signed_rank_tests
from profiles.report.experiment import ExperimentOutcome
from tests.support.codes import has_code
from tests.support.experiments import make_measured_outcome, read_grid, write_file, written_experiment

FILE = write_file(["skewed_much", "even"], ["fedavg", "fedper"], more="target_accuracy = 0.5")
CURVES = {
    "fedavg/even/seed-0": [0.2, 0.5], "fedavg/even/seed-1": [0.3, 0.7],
    "fedper/even/seed-0": [0.4, 0.8], "fedper/even/seed-1": [0.5, 1.0],
    "fedavg/skewed_much/seed-0": [0.2, 0.4], "fedper/skewed_much/seed-0": [0.2, 0.6],
    "fedper/skewed_much/seed-1": [0.2, 0.8],
}  # fmt: skip
"""FedPer leads by 0.3 in both seeds of `even`; the other partition lacks a cell of FedAvg."""


@pytest.fixture
def outcome(tmp_path: Path) -> ExperimentOutcome:
    return make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), CURVES)


def read_table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def read_tabular(file: Path) -> tuple[list[list[str]], str]:
    """Rows of a LaTeX table with its headings, and its caption. Checks the structure of the file."""
    text = file.read_text()
    for environment in ("table", "tabular"):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}") == 1
    unescaped = re.sub(r"\\[{}]", "", text)
    assert unescaped.count("{") == unescaped.count("}")
    assert not re.search(r"(?<!\\)[_#]", re.sub(r"\\label\{.*?\}", "", text))
    alignment = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    top, middle, bottom = (text.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom"))
    assert alignment
    assert text.index(r"\caption") < top < middle < bottom
    body = [line for line in text[top:bottom].splitlines() if not line.endswith("rule")]
    rows = [re.split(r"(?<!\\)&", line.removesuffix(r" \\")) for line in body]
    assert all(line.endswith(r" \\") for line in body)
    assert {len(row) for row in rows} == {len(alignment[1])}
    caption = re.search(r"\\caption\{(.*)\}\n", text)
    assert caption
    return [[cell.strip() for cell in row] for row in rows], caption[1]


def test_csv_has_the_figures_of_the_report(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    files = write_csv(outcome, run_signed_rank_tests(outcome, holm=True), tmp_path)
    assert [file.name for file in files] == ["methods.csv", "cells.csv", "rounds.csv", "devices.csv", "tests.csv"]
    rows = read_table(tmp_path / "methods.csv")
    assert len(rows) == len(outcome.comparisons) == 4
    for row, entry in zip(rows, outcome.comparisons, strict=True):
        assert (row["method"], row["partition"], float(row["accuracy"])) == (
            entry.method, entry.partition, entry.accuracy,
        )  # fmt: skip
        assert (row["seeds"], row["seeds_of"]) == (str(len(entry.seeds)), "2")
        low = "" if entry.interval is None else repr(entry.interval.low)
        assert row["interval_low"] == low  # a single seed has none
    by_name = {(row["method"], row["partition"]): row for row in rows}
    assert by_name["fedavg", "skewed_much"]["interval_low"] == by_name["fedavg", "skewed_much"]["std_over_seeds"] == ""
    assert by_name["fedper", "even"]["is_leader"] == "True"
    assert by_name["fedper", "skewed_much"]["is_leader"] == "False"  # a seed is missing
    difference = outcome.difference("fedper", "even")
    assert difference is not None
    assert float(by_name["fedper", "even"]["difference"]) == difference.mean == pytest.approx(0.3)


def test_csv_marks_unfinished_cells(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    grid = read_grid(written_experiment(tmp_path, FILE))
    cells = [
        replace(cell, failure="disk, full") if cell.name == "fedavg/skewed_much/seed-1" else cell
        for cell in outcome.cells
    ]
    write_csv(replace(outcome, cells=cells), [], tmp_path)
    states = {
        f"{row['method']}/{row['partition']}/seed-{row['seed']}": row for row in read_table(tmp_path / "cells.csv")
    }
    assert states.keys() == {cell.path for cell in grid.cells}
    assert states["fedavg/skewed_much/seed-1"]["state"] == "failed"
    assert states["fedavg/skewed_much/seed-1"]["failure"] == "disk, full"
    assert states["fedavg/skewed_much/seed-1"]["accuracy"] == ""
    assert {name: float(states[name]["accuracy"]) for name in CURVES} == {name: at[-1] for name, at in CURVES.items()}
    rounds = read_table(tmp_path / "rounds.csv")
    seen: dict[str, list[float]] = {}
    for row in rounds:
        seen.setdefault(f"{row['method']}/{row['partition']}/seed-{row['seed']}", []).append(float(row["accuracy"]))
    assert seen == CURVES
    devices = read_table(tmp_path / "devices.csv")
    assert [float(row["accuracy"]) for row in devices] == [
        cell.result.accuracy.mean for cell in outcome.cells if cell.result
    ]


def test_latex_has_the_cells_of_the_report(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    files = write_latex(outcome, run_signed_rank_tests(outcome, holm=False), tmp_path)
    assert [file.stem for file in files] == ["accuracy", "differences", "progress", "costs", "tests"]
    rows, caption = read_tabular(tmp_path / "accuracy.tex")
    assert rows[0] == ["method", r"skewed\_much", "even"]
    shown = [line for line in markdown_report(outcome).splitlines() if line.startswith("| fed")][:2]
    for row, line in zip(rows[1:], shown, strict=True):
        plain = [re.sub(r"\\textbf\{(.*)\}", r"**\1**", cell) for cell in row]
        plain = [cell.replace(r"$\pm$", "±").replace("$-$", "-") for cell in plain]
        assert plain == [cell.strip() for cell in line.strip("|").split("|")]
    assert rows[1][1] == "0.400 (1 of 2 seeds)"
    assert rows[2][2].startswith(r"\textbf{0.900 $\pm$ 0.141 [")
    assert caption.startswith("tiny: accuracy. ")
    assert r"fedavg/skewed\_much/seed-1" in caption.replace("$-$", "-")
    for file in files:
        read_tabular(file)


def test_bold_needs_an_interval_above_all_others(tmp_path: Path) -> None:
    near = {**CURVES, "fedper/even/seed-0": [0.4, 0.51], "fedper/even/seed-1": [0.4, 0.9]}
    outcome = make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), near)
    write_latex(outcome, [], tmp_path)
    assert r"\textbf" not in (tmp_path / "accuracy.tex").read_text()


def test_figures_of_every_partition(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    files = write_figures(outcome, FigureStyle(form="svg"), tmp_path)
    assert [file.name for file in files] == [
        "curves-skewed_much.svg", "bars-skewed_much.svg", "curves-even.svg", "bars-even.svg", "ranks.svg",
    ]  # fmt: skip
    assert "fedavg (1 of 2 seeds)" in (tmp_path / "curves-skewed_much.svg").read_text()


class TestRead:
    def test_folder_name_and_file(
        self, outcome: ExperimentOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "experiments" / "tiny"
        folder.mkdir(parents=True)
        write_results(outcome, folder)
        monkeypatch.chdir(tmp_path)
        for name in ("tiny", "tiny.toml", "experiments/tiny", str(folder), "experiments/tiny/results.json"):
            assert read_results(name) == outcome

    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        for name in ("no-such", str(tmp_path)):
            with pytest.raises(ConfigError) as refused:
                read_results(name)
            assert has_code("FV2125", repr(name))(refused.value)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"even"', '"../../even"'), ('"fedper"', '"-rf"'), ('"reference":null', '"reference":"other"'),
            ('"across":null', '"across":"../../x"'),
            ('"seeds":[0,1]', '"seeds":"all"'), ('{"schema"', '[{"schema"'), ('"method":"fedper"', '"method":"fedrep"'),
        ],
    )  # fmt: skip
    def test_hostile_results_are_refused(self, outcome: ExperimentOutcome, tmp_path: Path, old: str, new: str) -> None:
        text = msgspec.json.encode(outcome).decode()
        assert old in text
        (tmp_path / "results.json").write_text(text.replace(old, new))
        with pytest.raises(ConfigError) as refused:
            read_results(str(tmp_path))
        assert has_code("FV2125", str(tmp_path))(refused.value)


def test_an_experiment_without_results_has_no_files(tmp_path: Path) -> None:
    outcome = make_outcome(read_grid(written_experiment(tmp_path, FILE)), [])
    assert write_figures(outcome, FigureStyle(), tmp_path / "none") == []
