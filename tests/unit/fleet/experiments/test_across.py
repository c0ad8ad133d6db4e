"""Accuracy against an option: which rows become a line, in tables, pages and figures."""

from pathlib import Path

import msgspec
import pytest

from fedvit.errors import ConfigError
from fleet.experiments.across import make_studies
from fleet.experiments.folder import FinishedCell
from fleet.experiments.outcome import make_outcome
from fleet.experiments.paper_figures import FigureStyle
from fleet.experiments.report import html_report, markdown_report
from fleet.experiments.result_files import write_figures
from profiles.report.experiment import ExperimentOutcome
from tests.support.codes import has_code
from tests.support.experiments import make_measured_outcome, make_measured_result, read_grid, written_experiment

HEAD = 'dataset = "digits"\nimage_size = 16\ndevices = 10\nrounds = 1\nseeds = [0, 1]\n'
EVEN = '[partitions.even]\npartition = "iid"\n'


def measure(tmp_path: Path, text: str) -> ExperimentOutcome:
    """The second seed is 0.1 ahead of the first; each method is 0.01 ahead of the one before it."""
    grid = read_grid(written_experiment(tmp_path, HEAD + text))
    names = list(dict.fromkeys((cell.partition, cell.method) for cell in grid.cells))
    curves = {
        cell.path: [0.3 + 0.1 * cell.seed + 0.01 * names.index((cell.partition, cell.method))] for cell in grid.cells
    }
    return make_measured_outcome(grid, curves)


def test_numbers_become_lines_with_intervals(tmp_path: Path) -> None:
    """Shares of devices, of two methods, the larger one first in the file."""
    text = 'across = "cohort"\n' + EVEN
    for method in ("fedavg", "fedper"):
        for share in ("0.5", "0.1"):
            text += f'[methods.{method}-{share.replace(".", "")}]\nmethod = "{method}"\ncohort = {share}\n'
    outcome = measure(tmp_path, text)
    (study,) = make_studies(outcome)
    assert (study.name, study.option, study.values, study.is_numeric) == ("even", "cohort", [0.1, 0.5], True)
    assert [line.name for line in study.lines] == ["fedavg", "fedper"]
    assert [point.value for point in study.lines[0].points] == [0.1, 0.5]
    assert [point.accuracy for point in study.lines[0].points] == pytest.approx([0.36, 0.35])
    assert study.lines[1].points[0].errors == pytest.approx((12.706 * 0.05, 12.706 * 0.05), rel=1e-3)
    assert study.levels == {}
    assert "| 0.1 | 0.360 | 0.380 | 0.370 |" in markdown_report(outcome)
    assert "<h2>even: accuracy by cohort</h2>" in html_report(outcome)
    files = write_figures(outcome, FigureStyle(form="svg"), tmp_path)
    assert tmp_path / "across-even.svg" in files
    picture = (tmp_path / "across-even.svg").read_text()
    assert all(f'id="{name}"' in picture for name in ("across-fedavg", "across-fedper"))


def test_partitions_that_differ_in_the_option_share_a_picture(tmp_path: Path) -> None:
    text = 'across = "max_std"\n'
    for noise in (0, 5, 20):
        text += f'[partitions.noise-{noise}]\npartition = "feature_noise"\nmax_std = {noise}.0\n'
    outcome = measure(tmp_path, f'{text}[methods.fedavg]\nmethod = "fedavg"\n[methods.fedper]\nmethod = "fedper"\n')
    (study,) = make_studies(outcome)
    assert (study.name, study.values) == ("noise", [0.0, 5.0, 20.0])
    assert {line.name: len(line.points) for line in study.lines} == {"fedavg": 3, "fedper": 3}


def test_parts_become_bars_and_their_mean_is_the_papers_overall(tmp_path: Path) -> None:
    """FedPerfix's table 1: parts alone and with the head; lines without a common name are told by their values."""
    text = 'across = "part"\n' + EVEN + '[methods.all-local]\nmethod = "local"\n'
    for part in ("norm", "attn"):
        for head in ("false", "true"):
            name = f"{part}{'-head' if head == 'true' else ''}"
            text += f'[methods.{name}]\nmethod = "personal_part"\npart = "{part}"\nwith_head = {head}\n'
    outcome = measure(tmp_path, text)
    (study,) = make_studies(outcome)
    assert (study.values, study.is_numeric) == (["norm", "attn"], False)
    assert [line.name for line in study.lines] == ["with_head = False", "with_head = True"]
    assert "| norm | 0.360 | 0.370 | 0.350 | 0.365 |" in markdown_report(outcome)
    write_figures(outcome, FigureStyle(form="svg"), tmp_path)
    assert 'id="level-all-local"' in (tmp_path / "across-even.svg").read_text()


def test_options_of_models_count_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    rows = "".join(
        f'[methods.deep-{depth}]\nmethod = "fedavg"\nmodel_options = {{ depth = {depth} }}\n' for depth in (1, 2)
    )
    (study,) = make_studies(measure(tmp_path, 'across = "depth"\n' + EVEN + rows))
    assert [(line.name, len(line.points)) for line in study.lines] == [("deep", 2)]
    with pytest.raises(ConfigError, match="across = 'width'") as caught:
        read_grid(written_experiment(tmp_path, HEAD + 'across = "width"\n' + EVEN + rows))
    assert has_code(caught, "FV2107")


def test_a_method_whose_option_is_searched_has_one_figure(tmp_path: Path) -> None:
    """Its value may be another one on each partition."""
    text = 'across = "lr"\n' + EVEN + '[methods.searched]\nmethod = "fedavg"\ntune = { lr = [0.1, 1.0] }\n'
    for rate in ("0.01", "0.1"):
        text += f'[methods.fedavg-{rate.replace(".", "")}]\nmethod = "fedavg"\nlr = {rate}\n'
    grid = read_grid(written_experiment(tmp_path, HEAD + text))
    points = [point for search in grid.searches for point in search.points]
    cells = [*grid.cells, *(cell for point in points for cell in (*point.tries[0], *point.cells))]
    outcome = make_outcome(grid, [FinishedCell(cell, make_measured_result([0.5]), None) for cell in cells])
    (study,) = make_studies(outcome)
    assert (study.values, study.levels) == ([0.01, 0.1], {"searched": 0.5})
    assert "| 0.01 | 0.500 | 0.500 |" in markdown_report(outcome)


def test_lists_are_values(tmp_path: Path) -> None:
    rows = "".join(
        f'[methods.{name}]\nmethod = "analytic"\nlambdas = {value}\n'
        for name, value in (("a", [0.1]), ("b", [0.1, 1.0]))
    )
    outcome = measure(tmp_path, 'across = "lambdas"\n' + EVEN + rows)
    for same in (outcome, msgspec.json.decode(msgspec.json.encode(outcome), type=ExperimentOutcome)):
        (study,) = make_studies(same)
        assert study.values == ["[0.1]", "[0.1, 1.0]"]


def test_an_option_of_partitions_is_not_that_of_methods(tmp_path: Path) -> None:
    """Dirichlet's alpha, of which one partition has the default, and APFL's."""
    text = 'across = "alpha"\n[partitions.usual]\npartition = "dirichlet"\n'
    for alpha in ("0.1", "1.0"):
        text += f'[partitions.dir-{alpha.replace(".", "")}]\npartition = "dirichlet"\nalpha = {alpha}\n'
    text += '[methods.fedavg]\nmethod = "fedavg"\n'
    for alpha in ("0.25", "0.75"):
        text += f'[methods.apfl-{alpha.replace(".", "")}]\nmethod = "apfl"\nalpha = {alpha}\n'
    (study,) = make_studies(measure(tmp_path, text))
    assert (study.values, study.levels) == ([0.1, 0.3, 1.0], {})
    assert {line.name: len(line.points) for line in study.lines} == {"fedavg": 3, "apfl-025": 3, "apfl-075": 3}
    one = "[partitions.dir]" + text.split("[partitions.dir-10]")[1]
    (study,) = make_studies(measure(tmp_path / "one", f'across = "alpha"\n{one}'))
    assert (study.values, list(study.levels)) == ([0.25, 0.75], ["fedavg"])


SMALL = sorted(Path("fleet/experiments").glob("*/*-small.toml"))
FILES = [file for file in SMALL if "\nacross = " in (text := file.read_text()) and "pretrained" not in text]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_of_the_papers_draw_lines(file: Path) -> None:
    """Each picture has a line, or bars, of at least two values."""
    grid = read_grid(file, "digits")
    outcome = make_measured_outcome(grid, {cell.path: [0.5] for cell in grid.cells})
    studies = make_studies(outcome)
    assert studies
    assert all(any(len(line.points) > 1 for line in study.lines) for study in studies)
