"""The pictures of the story: dealt out over devices and time, and arriving without a label."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedvit.data.layout import UNLABELLED, read_class_folders
from fedvit.errors import ConfigError
from fleet.datasets.digits import read_digits
from fleet.loop.pictures import LABELLED, LEAST_NEW, ArrivingPictures, choose_classes, plan_pictures


def test_every_picture_arrives_once_at_one_device() -> None:
    digits = read_digits()
    plans = plan_pictures(digits, (0, 1, 2), 2, seed=3)
    rows = np.concatenate([np.concatenate(plan) for plan in plans])
    assert len(np.unique(rows)) == len(rows)
    for plan in plans:
        assert np.bincount(digits.labels[plan.labelled]).tolist() == [59, 60]
        assert set(digits.labels[plan.usual].tolist()) == {0, 1}
        assert set(digits.labels[plan.new].tolist()) == {2}
        assert len(plan.new) >= LEAST_NEW
        assert set(digits.labels[plan.later].tolist()) == {0, 1, 2}
    assert LABELLED == 60


def test_classes_by_name_the_last_one_is_new() -> None:
    digits = read_digits()
    assert choose_classes(digits, ()) == (0, 1, 2)
    assert choose_classes(digits, ("7", "0", "3")) == (7, 0, 3)
    for names in (("7", "0"), ("7", "0", "cat"), ("7", "7", "0")):
        with pytest.raises(ConfigError) as error:
            choose_classes(digits, names)
        assert error.value.code == "FV2127"


def test_too_few_pictures() -> None:
    digits = read_digits()
    few = replace(digits, images=digits.images[np.arange(300)], labels=digits.labels[:300])
    with pytest.raises(ConfigError) as error:
        plan_pictures(few, (0, 1, 2), 2, seed=0)
    assert error.value.code == "FV2127"


def test_pictures_arrive_without_a_label(tmp_path: Path) -> None:
    digits = read_digits()
    [plan] = plan_pictures(digits, (0, 1, 2), 1, seed=0)
    pictures = ArrivingPictures(tmp_path / "garden", digits)
    pictures.write_labelled(plan.labelled)
    assert read_class_folders(pictures.folder).layout.classes == ("0", "1")
    stop = threading.Event()
    pictures.receive(plan.new[:3].tolist(), 0.0, stop)
    stop.set()
    pictures.receive(plan.new[3:].tolist(), 0.0, stop)
    arrived = sorted(path.name for path in (tmp_path / "garden" / UNLABELLED).iterdir())
    assert arrived == sorted(f"{row}.png" for row in plan.new[:3])
    assert {pictures.find_class(name) for name in arrived} == {"2"}
