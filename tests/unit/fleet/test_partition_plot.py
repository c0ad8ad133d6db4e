"""Pictures and tables of a partition."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from msgspec.structs import replace
from PIL import Image
from rich.console import Console

from fedvit.errors import StorageFailed
from fleet.partition import DeviceCounts, PartitionSummary
from fleet.partition_plot import bar_lines, summary_table, write_plot
from tests.support.codes import has_code

COUNTS = (("device-0", 400), ("device-1", 100))


def test_the_area_of_a_disc_is_its_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 and 100 of the same class: four times the area; a count of 0 has no disc."""
    areas: list[float] = []
    scatter = Axes.scatter

    def record(self: Axes, *arguments: Any, **options: Any) -> Any:
        areas.extend(options["s"])
        return scatter(self, *arguments, **options)

    monkeypatch.setattr(Axes, "scatter", record)
    devices = tuple(DeviceCounts(name, {"ant": count, "bee": 0}, {"ant": 0, "bee": 0}) for name, count in COUNTS)
    write_plot(replace(summary(("ant", "bee"), {}, {}), devices=devices), tmp_path / "plot.png")
    assert len(areas) == 2
    assert areas[0] / areas[1] == pytest.approx(4)


@pytest.mark.parametrize(("devices", "classes"), [(1, 1), (20, 100), pytest.param(300, 2, marks=pytest.mark.slow)])
def test_any_size_can_be_drawn(tmp_path: Path, devices: int, classes: int) -> None:
    names = tuple(f"class with a long name {number}" for number in range(classes))
    counts = tuple(
        DeviceCounts(f"device-{number}", dict.fromkeys(names, number), dict.fromkeys(names, 0))
        for number in range(devices)
    )
    write_plot(replace(summary(names, {}, {}), devices=counts), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as picture:
        assert max(picture.size) < 300 * 14 + 400
        assert np.asarray(picture).std() > 0


def test_bars_are_as_high_as_counts() -> None:
    assert bar_lines(["a"], np.zeros((1, 1), dtype=np.int64)) == ["a |  | 0"]
    # bars are as high as counts: Eighths of the largest count, 80, rounded up: 1 -> 1/8, 40 -> 4/8, 80 -> 8/8, 0 ->
    # blank
    assert bar_lines(["d"], np.array([[0, 1, 40, 80]])) == ["d |  ▁▁▄▄██| 121"]


@pytest.mark.parametrize("classes", [10, 31, 60, 61, 100, 1000])
def test_lines_fit_a_terminal(classes: int) -> None:
    lines = bar_lines(["device-0", "device-19"], np.full((2, classes), 10_000))
    assert max(map(len, lines)) <= 80
    assert len({line.rindex("|") for line in lines}) == 1


def summary(classes: tuple[str, ...], train: dict[str, int], test: dict[str, int]) -> PartitionSummary:
    """One device."""
    return PartitionSummary(
        dataset="made", classes=classes, size=4, partition=None, options={}, seed=0, test_share=0.2,
        devices=(DeviceCounts("device-0", train, test),),
    )  # fmt: skip


TEN, ELEVEN = (tuple(f"class-{number}" for number in range(count)) for count in (10, 11))


@pytest.mark.parametrize(
    ("classes", "train", "test", "row"),
    [
        (("ant", "bumblebee", "[red]"), {"ant": 8, "[red]": 3}, {"ant": 1, "[red]": 1}, ["11", "2", "9", "·", "4"]),
        (TEN, dict.fromkeys(TEN, 4000), dict.fromkeys(TEN, 4000), ["40000", "40000", *["8000"] * 10]),
        (ELEVEN, {"class-3": 1, "class-4": 2}, {}, ["3", "0", "2", "class-4"]),
        (ELEVEN, {}, {}, ["0", "0", "0"]),
    ],
    ids=["a class without images is a dot", "ten classes fit", "many classes are summed up", "without samples"],
)
def test_summary_table(classes: tuple[str, ...], train: dict[str, int], test: dict[str, int], row: list[str]) -> None:
    screen, nothing = io.StringIO(), dict.fromkeys(classes, 0)
    Console(file=screen, width=80).print(summary_table(summary(classes, nothing | train, nothing | test)))
    assert screen.getvalue().splitlines()[2].split() == ["device-0", *row]
    if classes[0] == "ant":
        assert screen.getvalue().splitlines()[0].split() == ["device", "train", "test", "ant", "bum…", "[re…"]


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, check=has_code("FV1701", "gone")):
        write_plot(summary(("ant", "bee"), {"ant": 1, "bee": 1}, {"ant": 0, "bee": 0}), tmp_path / "gone/partition.png")
