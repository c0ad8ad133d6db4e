"""The page of kept results."""

from pathlib import Path

from fleet.experiments.kept_results import KeptAccuracy, KeptResults
from fleet.experiments.measured import render_measured
from profiles.report.experiment import Interval, MeanAttack
from tests.support.experiments import make_difference


def test_table_of_an_experiment(tmp_path: Path) -> None:
    """Differences are to the method that most of them have; columns without a figure are left out."""
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper/first.toml").touch()
    accuracies = [
        KeptAccuracy(
            method="a", partition="p", seeds=5, mean=0.5, chosen={"lr": 0.1}, at_edge={"lr": "lowest"}, bytes_up=1000
        ),
        KeptAccuracy(
            method="b", partition="p", seeds=5, mean=0.25, interval=Interval(0.2, 0.3), generated_difference=0.0
        ),
    ]
    kept = KeptResults(
        experiment="first", scale="digits", accuracies=accuracies, differences=[make_difference(0.2, 0.3)]
    )
    later = KeptAccuracy(
        method="c", partition="q", seeds=1, mean=0.125, late=0.1, novel=0.5, novel_interval=Interval(0.4, 0.6),
        rounds_to_target=4.5, seconds_to_target=2.0,
    )  # fmt: skip
    attack = MeanAttack(
        method="c", partition="q", attacker="encoder", seen_once=0.25, seen_ever=0.5, error_once=0.75, error_ever=0.6,
        membership=0.9, class_distance=0.3, even_distance=0.4,
    )  # fmt: skip
    other = KeptResults(experiment="other", scale="texts", accuracies=[later], attacks=[attack])
    page = render_measured([kept, other, KeptResults(experiment="none", scale="none")], tmp_path)
    assert page.split("\n## ")[1:] == [
        "first\n\n[digits](paper/first.toml); 5 seeds.\n\n"
        "| partition | method | accuracy | less a | chosen | edge | generated apart | up |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| p | a | 0.500 |  | lr=0.1 | lr: lowest |  | 1 kB |\n"
        "| p | b | 0.250 [0.200, 0.300] | -0.250 [-0.300, -0.200] |  |  | 0.000 |  |\n",
        "other\n\ntexts; 1 seed.\n\n"
        "| partition | method | accuracy | late | novel | rounds to target | s to target |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| q | c | 0.125 | 0.100 | 0.500 [0.400, 0.600] | 4.5 | 2.0 |\n\n"
        "| partition | method | attacker has | patches once | error once | patches ever | error ever | member AUC |"
        " class distance | if even |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| q | c | encoder | 0.250 | 0.750 | 0.500 | 0.600 | 0.900 | 0.300 | 0.400 |\n",
    ]
