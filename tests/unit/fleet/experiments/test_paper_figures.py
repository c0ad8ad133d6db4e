"""Figures for a paper: the numbers that can be read from an SVG are those of the report."""

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from fedvit.errors import ConfigError
from fleet.experiments.command import write_results
from fleet.experiments.outcome import mean_interval
from fleet.experiments.paper_figures import FigureStyle, check_font, write_bars, write_curves, write_ranks
from fleet.experiments.report_figures import plot_curves
from fleet.experiments.significance import MethodRanks
from profiles.report.experiment import ExperimentOutcome
from tests.support.codes import has_code
from tests.support.experiments import make_measured_outcome, read_grid, write_file, written_experiment

FILE = write_file(["even"], ["fedavg", "fedper", "local"], seeds=3)
CURVES = {
    "fedavg/even/seed-0": [0.2, 0.5], "fedavg/even/seed-1": [0.3, 0.6], "fedavg/even/seed-2": [0.25, 0.55],
    "fedper/even/seed-0": [0.4, 0.7],
}  # fmt: skip
"""FedPer has one seed, local none."""
SVG = FigureStyle(form="svg", width_in=5.0, font="sans-serif", font_size=7.0)


class Picture:
    """An SVG of matplotlib, whose coordinates are read by the numbers beside the axes' ticks."""

    def __init__(self, file: Path) -> None:
        self.root = ElementTree.parse(file).getroot()
        self.texts = [text.text or "" for text in self.root.iter() if text.tag.endswith("}text")]

    def find(self, name: str) -> ElementTree.Element | None:
        return next((one for one in self.root.iter() if one.get("id") == name), None)

    def points(self, name: str) -> np.ndarray:
        """Return the corners of a series in the figure's own points, (n, 2)."""
        group = self.find(name)
        assert group is not None, name
        path = next(one for one in group.iter() if one.tag.endswith("}path"))
        numbers = re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", path.get("d") or "")
        start = np.zeros(2)
        if group[0].tag.endswith("}defs"):  # an area, which is placed where it is used
            used = next(one for one in group.iter() if one.tag.endswith("}use"))
            start = np.array([used.get("x"), used.get("y")], dtype=float)
        return np.array(numbers, dtype=float) + start

    def values(self, name: str, axis: str) -> list[float]:
        """Return a series' values on the axis x or y."""
        ticks = []
        for one in self.root.iter():
            if re.fullmatch(rf"{axis}tick_\d+", one.get("id") or ""):
                mark = next(each for each in one.iter() if each.tag.endswith("}use"))
                text = next(each for each in one.iter() if each.tag.endswith("}text"))
                ticks.append((float(mark.get(axis) or 0), float((text.text or "").replace("\N{MINUS SIGN}", "-"))))
        scale, start = np.polyfit(*zip(*ticks, strict=True), deg=1)
        return [float(scale * at + start) for at in self.points(name)[:, "xy".index(axis)]]


@pytest.fixture
def outcome(tmp_path: Path) -> ExperimentOutcome:
    return make_measured_outcome(read_grid(written_experiment(tmp_path, FILE)), CURVES)


@pytest.mark.parametrize(
    ("band", "low", "high"),
    [("range", [0.2, 0.5], [0.3, 0.6]), ("deviation", [0.2, 0.5], [0.3, 0.6]),
     ("interval", [0.1258, 0.4258], [0.3742, 0.6742])],
)  # fmt: skip
def test_curves_and_their_bands(
    outcome: ExperimentOutcome, tmp_path: Path, band: str, low: list[float], high: list[float]
) -> None:
    """Student's t of two degrees of freedom is 4.303, so that an interval is 4.303 x 0.05 / sqrt 3 on both sides."""
    write_curves(outcome, "even", SVG._replace(band=band), tmp_path / "curves.svg")
    picture = Picture(tmp_path / "curves.svg")
    assert picture.values("curve-fedavg", "x") == pytest.approx([1, 2], abs=1e-3)
    assert picture.values("curve-fedavg", "y") == pytest.approx([0.25, 0.55], abs=1e-4)
    assert picture.values("curve-fedper", "y") == pytest.approx([0.4, 0.7], abs=1e-4)
    edges = picture.values("band-fedavg", "y")
    assert (min(edges), max(edges)) == pytest.approx((low[0], high[1]), abs=1e-4)
    assert {round(edge, 3) for edge in edges} == {round(edge, 3) for edge in (*low, *high)}
    assert picture.find("band-fedper") is None  # one seed
    assert picture.find("curve-local") is None
    assert "fedavg" in picture.texts
    assert "fedper (1 of 3 seeds)" in picture.texts


def test_curves_end_with_the_first_seed_that_stops(tmp_path: Path) -> None:
    """A rule of [stop] may end the better seeds earlier: the mean of those left would fall."""
    grid = read_grid(written_experiment(tmp_path, write_file(["even"], ["fedavg"])))
    curves = {"fedavg/even/seed-0": [0.5, 0.9], "fedavg/even/seed-1": [0.3, 0.4, 0.5]}
    axes = Figure().add_subplot()
    plot_curves(axes, make_measured_outcome(grid, curves), "even", lambda values: (min(values), max(values)))
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_xydata(), [(1, 0.4), (2, 0.65)])


def test_seeds_that_were_never_tested_in_the_same_round_have_no_curve(tmp_path: Path) -> None:
    """[stop] by time ends them in different rounds, before the first that `evaluate_every` names."""
    grid = read_grid(written_experiment(tmp_path, write_file(["even"], ["fedavg", "fedper"])))
    curves = {"fedavg/even/seed-0": [0.5], "fedavg/even/seed-1": [0.3, 0.4], "fedper/even/seed-0": [0.6]}
    outcome = make_measured_outcome(grid, curves)
    (cell,) = outcome.find_cells("fedavg", "even")[1:]
    assert cell.result is not None
    cell.result.rounds[0] = msgspec.structs.replace(cell.result.rounds[0], accuracy=None)
    write_results(outcome, tmp_path)
    axes = Figure().add_subplot()
    plot_curves(axes, outcome, "even", lambda values: (min(values), max(values)))
    assert [line.get_gid() for line in axes.get_lines()] == ["curve-fedper"]


def test_bars_and_their_intervals(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    write_bars(outcome, "even", SVG, tmp_path / "bars.svg")
    picture = Picture(tmp_path / "bars.svg")
    entry = outcome.comparison("fedavg", "even")
    assert entry is not None
    assert entry.interval == mean_interval([0.5, 0.6, 0.55])
    assert entry.interval is not None
    assert max(picture.values("bar-fedavg", "x")) == pytest.approx(entry.accuracy, abs=1e-4)
    assert picture.values("interval-fedavg", "x") == pytest.approx([entry.interval.low, entry.interval.high], abs=1e-4)
    assert max(picture.values("bar-fedper", "x")) == pytest.approx(0.7, abs=1e-4)
    assert picture.find("interval-fedper") is None  # one seed
    assert picture.find("bar-local") is None
    assert "fedper (1 of 3 seeds)" in picture.texts


def test_ranks(tmp_path: Path) -> None:
    ranks = MethodRanks({"fedavg": 3.5, "fedper": 1.5, "local": 2.0, "apfl": 3.0}, 8, 1.1, 0.01)
    write_ranks(ranks, SVG, tmp_path / "ranks.svg")
    picture = Picture(tmp_path / "ranks.svg")
    places = {method: picture.points(f"rank-{method}")[0, 0] for method in ranks.means}
    inch = (places["fedavg"] - places["fedper"]) / 2  # points of one rank
    for method, mean in ranks.means.items():
        assert (places[method] - places["fedper"]) / inch == pytest.approx(mean - 1.5, abs=1e-3)
        assert any(method in text and f"{mean:.2f}" in text for text in picture.texts)
    low, high = picture.points("critical-difference")[:, 0]
    assert (high - low) / inch == pytest.approx(1.1, abs=1e-3)
    cliques = [picture.points(f"clique-{place}")[:, 0] for place in range(3)]
    assert picture.find("clique-3") is None
    for (low, high), (first, last) in zip(cliques, [(1.5, 2.0), (2.0, 3.0), (3.0, 3.5)], strict=True):
        assert (high - low) / inch == pytest.approx(last - first + 0.06, abs=1e-3)


def test_width_font_and_form(outcome: ExperimentOutcome, tmp_path: Path) -> None:
    write_bars(outcome, "even", SVG, tmp_path / "a.svg")
    picture = Picture(tmp_path / "a.svg")
    assert picture.root.get("width") == "360pt"  # 5 inches of 72 points
    sizes = {one.get("style", "") for one in picture.root.iter() if one.tag.endswith("}text")}
    assert all("7px" in style for style in sizes)
    assert all("sans-serif" in style for style in sizes)
    write_bars(outcome, "even", SVG, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    for name in ("a.pdf", "b.pdf"):
        write_curves(outcome, "even", FigureStyle(width_in=4.0), tmp_path / name)
    content = (tmp_path / "a.pdf").read_bytes()
    assert content.startswith(b"%PDF-")
    assert re.search(rb"/MediaBox \[ 0 0 288 ", content)
    assert b"/Type3" not in content  # which journals refuse
    assert content == (tmp_path / "b.pdf").read_bytes()


def test_an_unknown_font_is_named() -> None:
    check_font("serif")
    check_font("DejaVu Sans")
    with pytest.raises(ConfigError) as refused:
        check_font("Comic Serif 9")
    assert has_code("FV2126", "Comic Serif 9")(refused.value)
