"""The command `fleet partition`: its flags, its output, and its picture."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError
from fleet.commands.partition import partition_command
from fleet.partition import DealSettings, deal
from tests.support.codes import has_code
from tests.unit.fleet.test_partition import read_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """20 cats and 20 dogs."""
    folder = tmp_path / "source"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (4, 4), (number,) * 3).save(folder / name / f"{number}.png")
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(partition_command, list(map(str, arguments)), catch_exceptions=False)


def test_digits(tmp_path: Path) -> None:
    """The record is complete, and equal to the output of --json."""
    out = tmp_path / "parts"
    flags = ("--devices", "3", "--alpha", "0.5", "--size", "8")
    shown = invoke(*flags, "--out", out).stdout
    assert "device-2" in shown
    assert f"digits dealt out to 3 devices in {out}" in shown
    record = json.loads((out / "partition.json").read_bytes())
    assert (record["partition"], record["options"]) == ("dirichlet", {"alpha": 0.5, "cap": False, "min_samples": 10})
    totals = [sum(device["train"].values()) + sum(device["test"].values()) for device in record["devices"]]
    assert sum(totals) == len(list(out.rglob("*.png"))) == 1797
    assert min(totals) >= 10
    assert json.loads(invoke(*flags, "--out", tmp_path / "again", "--json").stdout) == record


def test_command_writes_the_files_of_deal(source: Path, tmp_path: Path) -> None:
    settings = DealSettings(options={"classes_per_device": 1}, seed=2, size=4)
    deal(str(source), "pathological", 4, tmp_path / "a", settings)
    invoke(
        "--dataset", source, "--devices", 4, "--partition", "pathological", "--seed", 2, "-p", "classes_per_device=1",
        "--size", 4, "--out", tmp_path / "b",
    )  # fmt: skip
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_unreadable_images_are_left_out(source: Path, tmp_path: Path) -> None:
    (source / "cat/bad.png").write_text("no image")
    shown = invoke("--dataset", source, "--devices", "2", "--out", tmp_path / "parts").stdout
    assert "left out 1 images" in shown
    assert len(DeviceData.open(tmp_path / "parts/device-0").train) > 0


def test_options_of_the_partition(source: Path, tmp_path: Path) -> None:
    result = invoke(
        "--dataset", source, "--devices", 2, "--out", tmp_path / "parts", "--json", "-p", "alpha=0.7", "-p", "cap=true",
        "--min-samples", 5,
    )  # fmt: skip
    assert json.loads(result.stdout)["options"] == {"alpha": 0.7, "cap": True, "min_samples": 5}


@pytest.mark.parametrize(
    ("flags", "value", "code"),
    [
        (("-p", "alpha"), "alpha", "FV1003"),
        (("-p", "alpha=1", "--alpha", "2"), "alpha", "FV1003"),
        (("-p", "alpha=much"), "much", "FV2002"),
        (("-p", "beta=1"), "beta", "FV2002"),
        (("--min-samples", "-1"), "-1", "FV2003"),
        (("--partition", "iid", "--alpha", "1"), "alpha", "FV2002"),
        (("--partition", "dirichle"), "did you mean 'dirichlet'", "FV2002"),
        (("--dataset", "gone"), "gone", "FV2001"),
    ],
)
def test_error_names_the_value(tmp_path: Path, flags: tuple[str, ...], value: str, code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code, value)):
        invoke("--out", tmp_path / "parts", *flags)


def test_columns_and_the_official_test_split(tmp_path: Path) -> None:
    saved = Path(__file__).parents[1] / "datasets" / "saved"
    out = tmp_path / "parts"
    shown = invoke(
        "--dataset", saved, "--column", "image=picture", "--column", "domain=site", "--devices", 2, "--partition",
        "natural", "--test-share", "official", "--out", out, "--json",
    )  # fmt: skip
    record = json.loads(shown.stdout)
    assert record["test_share"] == "official"
    assert [sum(device["test"].values()) for device in record["devices"]] == [0, 2]  # both are of the second site
    with pytest.raises(ConfigError, check=has_code("FV2011", "imgae")):
        invoke("--dataset", saved, "--column", "imgae=picture", "--out", tmp_path / "other")


def test_validation_images_in_place_of_test_images(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "parts"
    flags = ("--dataset", source, "--devices", 2, "--partition", "iid", "--test-share", "0.5", "--out", out)
    record = json.loads(invoke(*flags, "--validation-share", "0.2", "--json").stdout)
    assert record["validation_share"] == 0.2
    for device in record["devices"]:
        train, test = sum(device["train"].values()), sum(device["test"].values())
        assert test == 2
        assert 9 <= train + test <= 11  # half of 20 images, rounded for each class


def test_help_lists_the_options_of_every_partition() -> None:
    shown = " ".join(invoke("--help").stdout.split())
    for text in ("dirichlet: alpha=0.3, cap=false, min_samples=10", "classes_per_device=2", "max_std=20.0"):
        assert text in shown


def test_plot(source: Path, tmp_path: Path) -> None:
    """4 devices by 2 classes, as lines and as a file; with --json as a file alone."""
    out = tmp_path / "parts"
    flags = ("--dataset", source, "--min-samples", "1", "--plot")
    shown = invoke(*flags, "--out", out).stdout
    lines = [line for line in shown.splitlines() if line.count("|") == 2]
    assert [line.split()[0] for line in lines] == [f"device-{number}" for number in range(4)]
    json.loads(invoke(*flags, "--out", tmp_path / "again", "--json").stdout)
    for folder in (out, tmp_path / "again"):
        with Image.open(folder / "partition.png") as picture:
            assert picture.format == "PNG"


def test_overwrite(source: Path, tmp_path: Path) -> None:
    flags = ("--dataset", source, "--out", tmp_path / "parts", "--min-samples", "1")
    invoke(*flags)
    with pytest.raises(ConfigError):
        invoke(*flags)
    assert invoke(*flags, "--overwrite", "--devices", "2").exit_code == 0
    assert not (tmp_path / "parts/device-2").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--devices", "0"),
        ("--test-share", "1"),
        ("--test-share", "offical"),
        ("--test-share", "nan"),
        ("--size", "0"),
    ],
)
def test_values_that_click_refuses(flags: tuple[str, str]) -> None:
    assert invoke(*flags).exit_code == 2
