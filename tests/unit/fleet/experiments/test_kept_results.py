"""The figures of experiments that are kept."""

from pathlib import Path

import msgspec
import pytest

from fedvit.errors import ConfigError
from fleet.experiments.folder import FinishedCell
from fleet.experiments.kept_results import KeptResults, keep_results, read_kept_results, write_kept_results
from fleet.experiments.outcome import make_outcome
from fleet.experiments.report_tables import make_sections
from profiles.report.curves import Accuracy
from profiles.report.experiment import FeatureAttack, Interval
from tests.support.codes import has_code
from tests.support.experiments import (
    make_difference,
    make_measured_outcome,
    make_measured_result,
    read_grid,
    write_file,
    written_experiment,
)

FILE = write_file(["even"], ["fedavg", "fedper"])
CURVES = {
    "fedavg/even/seed-0": [0.5], "fedavg/even/seed-1": [0.7], "fedper/even/seed-0": [0.8], "fedper/even/seed-1": [0.95],
}  # fmt: skip


def test_a_difference_is_found_from_both_sides() -> None:
    kept = KeptResults(experiment="e", scale="s", differences=[make_difference(0.01, 0.1)])
    found = kept.find_difference("b", "a", "p")
    assert (found.mean, found.interval) == (-0.055, Interval(-0.1, -0.01))
    with pytest.raises(ConfigError, check=has_code("FV2151")):
        kept.find_difference("a", "b", "other")


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


def test_attacks_are_kept_as_means_over_devices(tmp_path: Path) -> None:
    grid = read_grid(written_experiment(tmp_path, FILE))
    attacks = [
        FeatureAttack(
            device=device, attacker="encoder", seen_once=0.25, seen_ever=0.5, error_once=error, error_ever=0.5 * error,
            membership=1.0, class_distance=0.0, even_distance=0.5, picture=b"",
        )
        for device, error in (("a", 0.2), ("b", 0.4))
    ]  # fmt: skip
    result = msgspec.structs.replace(make_measured_result(CURVES[grid.cells[0].path]), attacks=attacks)
    (kept,) = keep_results(make_outcome(grid, [FinishedCell(grid.cells[0], result, None)])).attacks
    assert (kept.method, kept.partition, kept.attacker) == ("fedavg", "even", "encoder")
    assert (kept.error_once, kept.error_ever, kept.seen_once, kept.even_distance) == (0.3, 0.15, 0.25, 0.5)


def test_progress_and_novel_devices_are_kept(tmp_path: Path) -> None:
    settings = "target_accuracy = 0.65\nlate_rounds = 1\nevaluate_every = 1\n"
    grid = read_grid(written_experiment(tmp_path, settings + FILE))
    novel = Accuracy(mean=0.5, std_over_devices=0.0, weighted=0.5)
    results = [msgspec.structs.replace(make_measured_result(CURVES[cell.path]), novel=novel) for cell in grid.cells]
    outcome = make_outcome(
        grid, [FinishedCell(cell, result, None) for cell, result in zip(grid.cells, results, strict=True)]
    )
    fedavg, fedper = keep_results(outcome).accuracies
    assert (fedavg.rounds_to_target, fedper.rounds_to_target) == (None, 1.0)
    assert (fedavg.late, fedper.late) == (0.6, 0.875)
    assert (fedavg.novel, fedavg.novel_interval) == (0.5, Interval(0.5, 0.5))
