"""A device of the demo."""

from pathlib import Path

import pytest

from fleet.datasets.digits import read_digits
from fleet.loop.fleet import LoopDevice
from fleet.loop.pictures import ArrivingPictures, plan_pictures


@pytest.fixture
def device(tmp_path: Path) -> LoopDevice:
    digits = read_digits()
    [plan] = plan_pictures(digits, (0, 1, 2), 1, seed=0)
    pictures = ArrivingPictures(tmp_path / "pictures", digits)
    return LoopDevice("garden", pictures, plan, tmp_path / "state", tmp_path / "answers.jsonl")
