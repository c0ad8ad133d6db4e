"""Experiments of the papers have the values that the papers or their released code have."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_digits

from fleet.experiments.cells import Grid, GridCell
from fleet.experiments.settings import read_experiment
from fleet.partitions import partition
from tests.support.experiments import read_grid

FOLDER = Path(__file__).parents[4] / "fleet" / "experiments"
FEDTP = sorted((FOLDER / "fedtp").glob("*.toml"))
OF_DIGITS = [file for file in sorted(FOLDER.glob("*/*-small.toml")) if 'dataset = "digits"\n' in file.read_text()]
RELEASED_MODEL = {
    "patch_size": 4, "width": 128, "heads": 8, "head_width": 64, "qkv_bias": False, "position_std": 1.0,
    "first_values": "torch", "norm_eps": 1e-5,
}  # fmt: skip
"""Options of FedTP's released model; its depth differs in Table 8."""


@cache
def read_file(file: Path) -> Grid:
    return read_grid(file, "digits")


def cells(file: Path, method: str) -> list[GridCell]:
    """Return the cells whose values no search chooses."""
    return [cell for cell in read_file(file).cells if cell.run["method"] == method]


@pytest.mark.parametrize("file", FEDTP, ids=lambda path: path.stem)
def test_fedtps_server_descends_with_the_released_rate_or_a_searched_one(file: Path) -> None:
    searches = read_file(FOLDER / "fedtp" / "fedtp-table2-mid.toml").searches
    tried: set[Any] = {point.values["server_lr"] for one in searches if one.method == "fedtp" for point in one.points}
    assert 0.01 in tried
    for cell in cells(file, "fedtp"):
        assert cell.run["options"]["server_lr"] in (tried if file.stem.endswith("-mid") else {0.01})


@pytest.mark.parametrize("file", [path for path in FEDTP if "table" in path.stem], ids=lambda path: path.stem)
def test_fedtps_local_rows_train_all_devices_in_every_round(file: Path) -> None:
    for cell in cells(file, "local"):
        assert cell.run["cohort"] == 1.0


@pytest.mark.parametrize(
    "file",
    [path for path in FEDTP if not re.match("shakespeare|cifar10-|.*-(small|mid)$", path.stem)],
    ids=lambda path: path.stem,
)
def test_full_scale_files_have_fedtps_released_model(file: Path) -> None:
    for cell in cells(file, "fedtp"):
        options = cell.run["model_options"]
        assert {name: options[name] for name in RELEASED_MODEL} == RELEASED_MODEL
        assert cell.run["options"]["dropout"] == 0.1


@pytest.mark.parametrize("file", OF_DIGITS, ids=lambda path: path.stem)
def test_digits_can_be_dealt_out_as_a_file_says(file: Path) -> None:
    experiment = read_experiment(file).experiment
    for table in experiment.partitions.values():
        kind, options = table["partition"], {name: value for name, value in table.items() if name != "partition"}
        for seed in experiment.seeds:
            assert len(partition(kind, load_digits().target, experiment.devices, seed, **options)) == experiment.devices
