"""Searches for options of methods: what is tried, what is chosen, what runs again, and what the report says."""

import io
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import scipy.stats
from click.testing import CliRunner
from msgspec.structs import replace
from rich.console import Console

from fedvit.errors import ConfigError
from fleet.commands.experiment import experiment_command
from fleet.experiments.cells import Grid, GridCell, SearchPoint, as_text
from fleet.experiments.command import select_cells
from fleet.experiments.folder import RESULT_FILE, CellFolder, FinishedCell
from fleet.experiments.kept_results import keep_results
from fleet.experiments.outcome import make_outcome, mean_interval
from fleet.experiments.report import html_report, markdown_report, terminal_report
from fleet.experiments.scheduler import Dealer
from fleet.experiments.search import Schedule, list_rounds, search_state
from profiles.report.experiment import Values
from tests.support.codes import has_code
from tests.support.experiments import (
    ExperimentRun,
    make_measured_result,
    read_closed,
    read_grid,
    run_experiment,
    written_experiment,
)
from tests.support.forked import Forked
from tests.support.waiting import WAIT_S

FILE = """
dataset = "digits"
image_size = 8
devices = 2
rounds = 2
seeds = [0, 1]
test_share = 0.5

[model]
options = { patch_size = 4, width = 16, depth = 1, heads = 2 }

[partitions.even]
partition = "iid"

[common]
batch_size = 16
epochs = 2

[methods.fedavg]
method = "fedavg"
momentum = 0.9
tune = { lr = [1e-6, 0.05, 50] }
"""
NINE = FILE.replace("tune = { lr = [1e-6, 0.05, 50] }", "tune = { lr = [0.1, 0.2, 0.3], clip_norm = [1, 2, 3] }")
HALVING = NINE.replace("rounds = 2", "rounds = 30") + '\n[tuning]\nsearch = "halving"\nseeds = [7]\n'


def follow(grid: Grid, accuracy: Callable[[GridCell], float | str | None]) -> Schedule:
    """All cells come to their end: with an accuracy, unusable for the reason given, or failed."""
    schedule = Schedule(grid, Path("nowhere"))
    places = schedule.take_runnable()
    for place in places:
        value = accuracy(place.cell)
        if isinstance(value, float):
            over = FinishedCell(place.cell, replace(make_measured_result([value]), digest=place.cell.digest), None)
        else:
            over = FinishedCell(place.cell, None, None if value else "disk full", value)
        places += schedule.add(over)
    return schedule


class TestFile:
    def test_points_are_all_combinations(self, tmp_path: Path) -> None:
        grid = read_grid(written_experiment(tmp_path, NINE))
        (search,) = grid.searches
        assert [as_text(point.values) for point in search.points] == [
            f"lr={lr},clip_norm={clip}" for lr in (0.1, 0.2, 0.3) for clip in (1, 2, 3)
        ]
        assert (grid.methods["fedavg"]["lr"], grid.methods["fedavg"]["clip_norm"]) == ([0.1, 0.2, 0.3], [1, 2, 3])
        assert grid.cells == ()
        for point in search.points:
            ((tried,),) = point.tries  # one rung, one seed
            assert (tried.seed, tried.deal.validation_share, tried.rounds) == (0, 0.2, 2)
            assert [cell.path for cell in point.cells] == ["fedavg/even/seed-0", "fedavg/even/seed-1"]
            for cell in (tried, *point.cells):
                assert cell.run["options"].items() >= point.values.items()

    def test_own_cells_are_those_of_an_experiment_without_a_search(self, tmp_path: Path) -> None:
        """What is finished stays finished when a search chooses the value that was set."""
        (search,) = read_grid(written_experiment(tmp_path, FILE)).searches
        plain = FILE.replace("tune = { lr = [1e-6, 0.05, 50] }", "lr = 0.05")
        assert search.points[1].cells == read_grid(written_experiment(tmp_path, plain)).cells

    def test_other_shares_of_validation_images_are_in_other_folders(self, tmp_path: Path) -> None:
        """A cell of the former share may be running when the file is changed."""
        texts = (FILE, FILE + "\n[tuning]\nvalidation_share = 0.4\n")
        points = [read_grid(written_experiment(tmp_path, text)).searches[0].points[0] for text in texts]
        small, large = (CellFolder(point.tries[0][0], tmp_path) for point in points)
        dealer = Dealer()
        dealer.deal(small)
        before = sorted(small.parts.rglob("*.png"))
        dealer.deal(large)
        assert sorted(small.parts.rglob("*.png")) == before
        assert len(sorted(large.parts.rglob("test/*/*.png"))) > len(sorted(small.parts.rglob("test/*/*.png")))

    def test_seeds_are_three_where_none_are_named(self, tmp_path: Path) -> None:
        grid = read_grid(written_experiment(tmp_path, FILE.replace("seeds = [0, 1]", "")))
        assert grid.experiment.seeds == (0, 1, 2)

    def test_option_of_a_method_that_is_called_tune(self, tmp_path: Path) -> None:
        text = FILE.replace('"fedavg"\nmomentum = 0.9', '"fedbabu"')
        plain = read_grid(written_experiment(tmp_path, text.replace("{ lr = [1e-6, 0.05, 50] }", '"head"')))
        assert (plain.searches, plain.methods["fedavg"]["tune"]) == ((), "head")
        searched = read_grid(written_experiment(tmp_path, text.replace("{ lr", '{ tune = ["head", "all"], lr')))
        assert len(searched.searches[0].points) == 6

    @pytest.mark.parametrize(
        ("old", "new", "code"),
        [
            ("{ lr =", "{ lrr =", "FV1101"),
            ("{ lr =", "{ updates =", "FV1101"),
            ("[1e-6, 0.05, 50]", "[]", "FV2111"),
            ("[1e-6, 0.05, 50]", "0.05", "FV2111"),
            ("{ lr = [1e-6, 0.05, 50] }", "[0.1]", "FV2111"),
            ("{ lr = [1e-6, 0.05, 50] }", "{}", "FV2111"),
            ("[1e-6, 0.05, 50]", "[50.0, 0.05, 50]", "FV2111"),
            ("[1e-6, 0.05, 50]", "[0.05, [1]]", "FV2111"),
            ("[1e-6, 0.05, 50]", '["a/b"]', "FV1006"),
            ("[1e-6, 0.05, 50]", "[0.05, -1]", "FV1104"),
            ("momentum = 0.9", "lr = 0.1", "FV2111"),
            ("[common]", "[tuning]\nsaerch = 'grid'\n[common]", "FV1002"),
            ("[common]", "[tuning]\nvalidation_share = 1\n[common]", "FV2107"),
            ("devices = 2", "validation_share = 0.1\ndevices = 2", "FV2111"),
            ("[common]", "[tuning]\nkeep = 0.5\n[common]", "FV2111"),
            ("[common]", "[tuning]\nseeds = [1, 1]\n[common]", "FV2107"),
            ("tune = { lr = [1e-6, 0.05, 50] }", "[tuning]", "FV2111"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, old: str, new: str, code: str) -> None:
        assert old in FILE
        with pytest.raises(ConfigError, check=has_code(code)):
            read_grid(written_experiment(tmp_path, FILE.replace(old, new, 1)))

    def test_only(self, tmp_path: Path) -> None:
        text = FILE + '\n[methods.other]\nmethod = "fedper"\n'
        grid = read_grid(written_experiment(tmp_path, text))
        assert select_cells(grid, ("other/*",)).searches == ()
        assert select_cells(grid, ("fedavg/*",)) == grid._replace(cells=())

    def test_dry_run(self, tmp_path: Path) -> None:
        """Nine points for 10 rounds and three for 30, then two seeds of 30 rounds."""
        file = written_experiment(tmp_path, HALVING)
        arguments = [str(file), "--out", str(tmp_path / "out"), "--dry-run"]
        shown = CliRunner().invoke(experiment_command, arguments, catch_exceptions=False).stdout
        assert "fedavg/even/search/lr=0.1,clip_norm=1/rounds-10/seed-7\n" in shown
        assert "fedavg/even: search among 9 points: 9 for 10 rounds then 3 for 30 rounds\n" in shown
        assert shown.endswith(
            "2 cells of 30 rounds on 2 devices, 12 cells of a search with 180 rounds in all, 14 to run\n"
        )


class TestStanding:
    def test_best_third_gets_more_rounds(self, tmp_path: Path) -> None:
        """After 10 rounds .3 is the best rate, after 30 rounds .2 is; the best clip_norm is 2."""
        grid = read_grid(written_experiment(tmp_path, HALVING))

        def accuracy(cell: GridCell) -> float:
            lr, clip = cell.run["options"]["lr"], cell.run["options"]["clip_norm"]
            return (lr if cell.rounds == 10 else 0.5 - abs(lr - 0.2)) - 0.01 * abs(clip - 2)

        schedule = follow(grid, accuracy)
        at = search_state(grid.searches[0], schedule.over)
        assert at.chosen is not None
        assert [one.rounds for one in at.tries] == [10] * 6 + [30] * 3
        assert at.chosen.values == {"lr": 0.3, "clip_norm": 2}
        assert len(schedule.cells) == 9 + 3 + 2 == schedule.total()
        assert list_rounds(grid.searches[0]) == [10] * 9 + [30] * 3

    def test_of_equal_points_the_first_is_chosen(self, tmp_path: Path) -> None:
        grid = read_grid(written_experiment(tmp_path, FILE))
        assert search_state(grid.searches[0], follow(grid, lambda cell: 0.5).over).chosen == grid.searches[0].points[0]

    def test_unusable_point_is_not_chosen(self, tmp_path: Path) -> None:
        grid = read_grid(written_experiment(tmp_path, FILE))
        schedule = follow(grid, lambda cell: 0.0 if cell.run["options"]["lr"] == 50 else "training diverged")
        at = search_state(grid.searches[0], schedule.over)
        assert at.chosen == grid.searches[0].points[2]
        assert at.tries[0].unusable == "training diverged"

    def test_failed_cell_leaves_the_search_open(self, tmp_path: Path) -> None:
        """A full disk says nothing of a rate: the other cells are not begun before it was tried."""
        grid = read_grid(written_experiment(tmp_path, FILE))
        schedule = follow(grid, lambda cell: None if cell.run["options"]["lr"] == 50 else 0.5)
        at = search_state(grid.searches[0], schedule.over)
        assert (at.chosen, at.over, at.ahead) == (None, False, (2, 2))
        assert len(schedule.cells) == 3

    @pytest.mark.parametrize(("best", "at_edge"), [(1e-6, {"lr": "lowest"}), (0.05, {}), (50, {"lr": "highest"})])
    def test_best_value_at_an_edge_is_kept(self, tmp_path: Path, best: float, at_edge: dict[str, str]) -> None:
        grid = read_grid(written_experiment(tmp_path, FILE))
        schedule = follow(grid, lambda cell: 0.6 if cell.run["options"]["lr"] == best else 0.5)
        (kept,) = keep_results(make_outcome(grid, schedule.over.values())).accuracies
        assert (kept.mean, kept.chosen, kept.at_edge) == (0.6, {"lr": best}, at_edge)

    @pytest.mark.parametrize(
        ("best", "beyond", "tried", "at_edge"),
        [
            (0.1, 2, [], {}),
            (0.2, 0, [], {"lr": "highest"}),
            (0.4, 2, [0.4, 0.8], {}),
            (3.2, 2, [0.4, 0.8], {"lr": "highest"}),
            (0.02, 2, [0.01], {}),
            (0.004, 2, [0.01, 0.005], {"lr": "lowest"}),
            (0.0125, 3, [0.01, 0.005], {}),
        ],
    )
    def test_values_beyond_an_edge_are_tried_while_they_are_better(
        self, tmp_path: Path, best: float, beyond: int, tried: list[float], at_edge: dict[str, str]
    ) -> None:
        text = FILE.replace("[1e-6, 0.05, 50]", "[0.02, 0.04, 0.1, 0.2]") + f"\n[tuning]\nbeyond = {beyond}\n"
        grid = read_grid(written_experiment(tmp_path, text))
        schedule = follow(grid, lambda cell: 1 - abs(math.log(cell.run["options"]["lr"] / best)))
        (search,) = make_outcome(grid, schedule.over.values()).searches
        assert [one.values["lr"] for one in search.tried][4:] == tried
        assert search.at_edge == at_edge
        best_tried = min((one.values["lr"] for one in search.tried), key=lambda lr: abs(math.log(lr / best)))
        assert search.chosen == {"lr": best_tried}
        finished = [entry.cell.run["options"]["lr"] for entry in schedule.over.values() if not entry.cell.tried]
        assert finished == [best_tried] * 2

    def test_what_is_ahead_is_computed_once_for_each_ending(self, tmp_path: Path) -> None:
        """A display asks several times a second, and a point beyond an edge takes a whole configuration."""
        grid = read_grid(written_experiment(tmp_path, FILE + "\n[tuning]\nbeyond = 1\n"))
        made: list[Values] = []

        def make_point(values: Values) -> SearchPoint | None:
            made.append(values)
            return grid.searches[0].make_point(values)

        counted = grid._replace(searches=(grid.searches[0]._replace(make_point=make_point),))
        schedule = follow(counted, lambda cell: float(cell.run["options"]["lr"]))
        before = schedule.ahead(), len(made)
        assert made
        assert (schedule.ahead(), len(made)) == before

    @pytest.mark.parametrize("option", ["momentum = [0.5, 0.9]", "schedule = ['constant', 'cosine']"])
    def test_values_that_a_method_refuses_are_not_tried(self, tmp_path: Path, option: str) -> None:
        text = FILE.replace("momentum = 0.9\n", "").replace("lr = [1e-6, 0.05, 50]", option) + "[tuning]\nbeyond = 2\n"
        grid = read_grid(written_experiment(tmp_path, text))
        schedule = follow(grid, lambda cell: 0.6 if "0.9" in cell.path or "cosine" in cell.path else 0.5)
        (search,) = make_outcome(grid, schedule.over.values()).searches
        assert len(search.tried) == 2
        assert search.chosen is not None

    def test_each_option_has_values_beyond(self, tmp_path: Path) -> None:
        """Whole numbers stay whole."""
        text = FILE.replace("epochs = 2\n", "").replace("[1e-6, 0.05, 50]", "[0.1, 0.2], epochs = [2, 4]")
        grid = read_grid(written_experiment(tmp_path, text + "\n[tuning]\nbeyond = 1\n"))
        schedule = follow(grid, lambda cell: cell.run["options"]["lr"] / 10 + cell.run["options"]["epochs"] / 100)
        (search,) = make_outcome(grid, schedule.over.values()).searches
        assert [tuple(one.values.values()) for one in search.tried][4:] == [(0.4, 4), (0.4, 8)]
        assert search.at_edge == {"lr": "highest", "epochs": "highest"}

    def test_single_value_needs_no_search(self, tmp_path: Path) -> None:
        grid = read_grid(written_experiment(tmp_path, FILE.replace("[1e-6, 0.05, 50]", "[0.05]")))
        assert [place.cell.path for place in Schedule(grid, tmp_path).take_runnable()] == [
            "fedavg/even/seed-0", "fedavg/even/seed-1",
        ]  # fmt: skip


@pytest.fixture(scope="module")
def run_here(graph_cache: Path) -> Callable[[Path, Path], ExperimentRun]:
    return partial(run_experiment, graph_cache=graph_cache)


# a model that is large enough for 72 steps to show which rate is the good one
REAL = (
    FILE.replace("seeds = [0, 1]\ntest_share = 0.5", "seeds = [0]")
    .replace("devices = 2\nrounds = 2", "devices = 3\nrounds = 3")
    .replace("width = 16, depth = 1", "width = 32, depth = 2")
    .replace("epochs = 2", "epochs = 1")
    .replace("momentum = 0.9", "")
)


@pytest.mark.slow
def test_search_finds_the_good_rate_among_silly_ones(
    tmp_path: Path, run_here: Callable[[Path, Path], ExperimentRun]
) -> None:
    """With one rate more, that alone is tried; the cells of the chosen rate stay."""
    outcome, ran, lines = run_here(written_experiment(tmp_path, REAL), tmp_path)
    (search,) = outcome.searches
    assert search.chosen == {"lr": 0.05}, lines
    assert search.at_edge == {}
    low, good, high = search.tried
    assert low.accuracy is not None
    assert good.accuracy is not None
    assert good.accuracy > max(low.accuracy, high.accuracy or 0.0) + 0.1
    assert ran[-1] == "fedavg/even/seed-0"
    assert len(ran) == 4
    assert outcome.comparisons[0].seeds == [0]
    more = REAL.replace("1e-6, 0.05", "1e-6, 1e-5, 0.05")
    again, ran, _ = run_here(written_experiment(tmp_path, more), tmp_path)
    assert ran == ["fedavg/even/search/lr=1e-05/rounds-3/seed-0"]
    assert again.comparisons == outcome.comparisons


def test_device_with_too_few_images_is_found_before_anything_runs(
    tmp_path: Path, run_here: Callable[[Path, Path], ExperimentRun]
) -> None:
    """Digits on 300 devices: about three training images each, most of them the only ones of their class."""
    text = FILE.replace("devices = 2", "devices = 300")
    with pytest.raises(ConfigError, check=has_code("FV2112")):
        run_here(written_experiment(tmp_path, text), tmp_path)
    assert not (tmp_path / "cells").exists()


@pytest.mark.slow
def test_search_that_was_killed_is_resumed(
    tmp_path: Path, graph_cache: Path, run_here: Callable[[Path, Path], ExperimentRun]
) -> None:
    """kill -9 in the second of three cells: the first is not run again, the second resumes after its closed rounds."""
    text = FILE.replace("[0, 1]", "[0]").replace("[1e-6, 0.05, 50]", "[0.01, 0.05, 0.1]") + "\n[tuning]\nrounds = 4\n"
    text = text.replace("epochs = 2", "epochs = 1")
    file, out = written_experiment(tmp_path, text), tmp_path / "out"
    done, fatal = (f"fedavg/even/search/lr={rate}/rounds-4/seed-0" for rate in (0.01, 0.05))
    first, second = out / "cells" / done, out / "cells" / fatal
    process = Forked("tests.support.experiments", [str(file), str(out), str(graph_cache), fatal], tmp_path / "log", {})
    try:
        assert process.wait(WAIT_S) == -signal.SIGKILL, (tmp_path / "log").read_text()
    finally:
        process.kill()
    assert (first / RESULT_FILE).is_file()
    assert not (second / RESULT_FILE).exists()
    before = read_closed(second)
    assert [number for number, _ in before] == [1, 2]
    outcome, ran, _ = run_here(file, out)
    assert ran[0] == fatal
    assert len(ran) == 3
    assert read_closed(second)[:2] == before
    assert len(read_closed(second)) == 4
    assert outcome.searches[0].chosen is not None
    assert len(outcome.comparisons) == 1


class TestOutcome:
    """Two methods and three seeds; FedAvg is searched, its best rate of three is the highest."""

    ACCURACY: ClassVar = {"fedavg": (0.2, 0.25, 0.45), "base": (0.1, 0.2, 0.3)}

    @pytest.fixture
    def grid(self, tmp_path: Path) -> Grid:
        text = FILE.replace("[0, 1]", "[0, 1, 2]").replace("50", "0.1")
        base = '[methods.base]\nmethod = "fedavg"\n'
        return read_grid(written_experiment(tmp_path, text.replace("[methods.fedavg]", f"{base}[methods.fedavg]")))

    def value(self, cell: GridCell) -> float | str:
        if cell.deal.validation_share is None:
            return self.ACCURACY[cell.method][cell.seed]
        rate = float(cell.run["options"]["lr"])
        return "training diverged" if rate == 0.05 else rate

    def test_intervals(self, grid: Grid) -> None:
        outcome = make_outcome(grid, follow(grid, self.value).over.values())
        for entry in outcome.comparisons:
            assert entry.interval is not None
            values = self.ACCURACY[entry.method]
            low, high = scipy.stats.t.interval(0.95, 2, sum(values) / 3, scipy.stats.sem(values))
            assert (entry.interval.low, entry.interval.high) == (pytest.approx(low), pytest.approx(high))
        (difference,) = outcome.differences
        assert (difference.method, difference.reference, difference.seeds) == ("fedavg", "base", [0, 1, 2])
        assert difference.mean == pytest.approx(0.1)
        paired = (0.1, 0.05, 0.15)
        low, high = scipy.stats.t.interval(0.95, 2, 0.1, scipy.stats.sem(paired))
        assert (difference.interval.low, difference.interval.high) == (pytest.approx(low), pytest.approx(high))

    def test_interval_of_a_single_seed(self) -> None:
        assert mean_interval([0.5]) is None

    def test_reports(self, grid: Grid) -> None:
        """Mean .3, s .1323, t(2) 4.303: .3 ± .3286; the difference .1 ± .05 * 4.303 / sqrt 3 = .1242."""
        outcome = make_outcome(grid, follow(grid, self.value).over.values())
        table, page = markdown_report(outcome), html_report(outcome)
        screen = io.StringIO()
        Console(file=screen, width=80).print(terminal_report(outcome))
        note = "chosen: lr=0.1; lr = 0.1 is the highest value tried, higher ones may be better"
        accuracy, difference = "0.300 ± 0.132 [-0.029, 0.629]", "+0.100 [-0.024, 0.224]"
        assert f"| fedavg | {accuracy} |" in table  # the interval of the difference has 0
        assert f"difference in accuracy to base\n\n| method | even |\n| --- | --- |\n| fedavg | {difference} |" in table
        assert f"search for fedavg on even: {note}\n" in table
        assert "| lr=1e-06 |  | 2 | 0.000 |" in table
        assert "| lr=0.05 | unusable: training diverged | 2 | - |" in table
        assert "| lr=0.1 | chosen | 2 | 0.100 |" in table
        for text in (note, "lr=1e-06", "unusable: training diverged", difference, accuracy):
            assert text in page
        shown = " ".join(screen.getvalue().split())
        assert note in shown
        assert "[-0.024, 0.224]" in shown
        assert max(len(line.rstrip()) for line in screen.getvalue().splitlines()) <= 80

    def test_search_that_is_not_finished(self, grid: Grid) -> None:
        """The methods' other cells are there all the same."""
        schedule = follow(grid, lambda cell: None if cell.deal.validation_share else self.value(cell))
        outcome = make_outcome(grid, schedule.over.values())
        assert [entry.method for entry in outcome.comparisons] == ["base"]
        table = markdown_report(outcome)
        assert "search for fedavg on even: not finished" in table
        assert "3 of 6 cells are not finished" in table
