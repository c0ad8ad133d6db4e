"""An owner at a real `edge-client label`, in a terminal."""

import sys
from pathlib import Path

import pytest
from PIL import Image

from fleet.loop.labels import give_labels
from fleet.processes import program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Classes cat and dog, and four images without a label."""
    folder = tmp_path / "images"
    for name in ("cat", "dog", "unlabelled"):
        (folder / name).mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (8, 8), (number * 60,) * 3).save(folder / "unlabelled" / f"{number}.png")
    return folder


def find_class(name: str) -> str:
    return "dog" if name < "2" else "cat"


@pytest.mark.parametrize(("most", "given"), [(3, {"dog": 2, "cat": 1}), (9, {"dog": 2, "cat": 2})])
def test_labels_are_given_until_there_are_enough(
    tmp_path: Path, folder: Path, most: int, given: dict[str, int]
) -> None:
    command = [*program("edge_client.cli"), "label", "--data", str(folder)]
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert give_labels(command, environment, ["dog", "cat"], find_class, most) == given
    for name in ("cat", "dog"):
        assert len(list((folder / name).iterdir())) == given[name]


def test_program_that_ends_gets_no_labels(folder: Path) -> None:
    assert not give_labels([sys.executable, "-c", "pass"], {}, ["dog", "cat"], find_class, 3)
