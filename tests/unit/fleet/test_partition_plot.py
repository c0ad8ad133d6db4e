"""Pictures and tables of a partition."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedvit.errors import StorageFailed
from fleet.partition import DeviceCounts, PartitionSummary
from fleet.partition_plot import bar_lines, draw_bubbles, summary_table, write_plot


def blue_by_row(picture: Image.Image) -> list[int]:
    """Pixels of discs in each row of them; the last row is the legend."""
    blue = (np.asarray(picture) == (0x35, 0x67, 0xA6)).all(axis=2)
    rows = np.flatnonzero(blue.any(axis=1))
    return [int(blue[part].sum()) for part in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)]


def test_the_area_of_a_disc_is_its_count() -> None:
    """400 and 100 of the same class: four times the pixels; nothing where the count is 0. Pixels at the edge of
    a disc of radius 19 are 3 % of it."""
    large, small, _ = blue_by_row(
        draw_bubbles("t", ["device-0", "device-1"], ["ant", "bee"], np.array([[400, 0], [100, 0]]))
    )
    assert large / small == pytest.approx(4, rel=0.15)
    assert large == pytest.approx(np.pi * (0.48 * 40) ** 2, rel=0.08)


def test_legend_has_discs_of_the_largest_count_a_quarter_and_a_sixteenth() -> None:
    """Whose areas are 1 + 1/4 + 1/16 = 1.3125 of the largest disc; of a largest count of 1 there is one disc."""
    large, legend = blue_by_row(draw_bubbles("t", ["device-0"], ["ant", "bee"], np.array([[400, 0]])))
    assert legend / large == pytest.approx(1.3125, rel=0.15)
    one, legend = blue_by_row(draw_bubbles("t", ["device-0"], ["ant"], np.array([[1]])))
    assert legend == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize(("devices", "classes"), [(1, 1), (20, 100), (3, 200), (300, 2)])
def test_any_size_can_be_drawn(devices: int, classes: int) -> None:
    """No picture is wider or higher than 300 of the smallest cells, names and margins."""
    counts = np.random.default_rng(0).integers(0, 50, (devices, classes))
    names = [f"class with a long name {number}" for number in range(classes)]
    picture = draw_bubbles("a title", [f"device-{number}" for number in range(devices)], names, counts)
    assert max(picture.size) < 300 * 14 + 400
    assert np.asarray(picture).std() > 0


def test_a_long_title_is_not_cut() -> None:
    narrow, broad = (draw_bubbles(title, ["a"], ["b"], np.array([[1]])).width for title in ("x", "x" * 200))
    assert broad > narrow + 500


def test_nothing_dealt_out() -> None:
    assert draw_bubbles("t", ["a"], ["b"], np.zeros((1, 1), dtype=np.int64)).width > 0
    assert bar_lines(["a"], np.zeros((1, 1), dtype=np.int64)) == ["a |  | 0"]


def test_bars_are_as_high_as_counts() -> None:
    """Eighths of the largest count, 80, rounded up: 1 -> 1/8, 40 -> 4/8, 80 -> 8/8, 0 -> blank."""
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
    with pytest.raises(StorageFailed, match="gone"):
        write_plot(summary(("ant", "bee"), {"ant": 1, "bee": 1}, {"ant": 0, "bee": 0}), tmp_path / "gone/partition.png")
