"""Counts of the story; the whole of it is in tests/e2e/test_loop.py."""

import json
import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from coordinator.config import RunConfig
from coordinator.model_view import read_model
from coordinator.record.record import open_record
from coordinator.rounds.models.requests import promote_canary
from fedvit.errors import ConfigError
from fleet.datasets.digits import read_digits
from fleet.loop.fleet import LoopDevice
from fleet.loop.story import LoopSettings, ServedClass, clear_folder, count_answers, count_canaries
from tests.support.codes import has_code
from tests.support.models import BETTER, FIRST, compare_on


def test_answers_by_true_class(device: LoopDevice) -> None:
    """A line that is being written is not read, nor one of another model, nor a picture without an answer."""
    name = {label: f"{read_digits().labels.tolist().index(label)}.png" for label in (0, 1)}
    lines = [
        {"picture": name[0], "model": "a-1", "label": "0"},
        {"picture": name[0], "model": "a-1"},
        {"picture": name[1], "model": "a-1", "label": "0"},
        {"picture": name[1], "model": "b-1", "label": "1"},
        {"picture": name[1], "error": "cannot read image"},
    ]
    assert count_answers([device], "a-1") == {}
    device.answers.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"picture": "0.p')
    assert count_answers([device], "a-1") == {"0": ServedClass(2, 1, 1), "1": ServedClass(1, 0, 0)}


def test_canaries_are_counted_after_their_model_was_promoted(tmp_path: Path) -> None:
    with open_record(tmp_path / "runs") as store:
        compare_on(store, "r-1", {"a": FIRST, "b": FIRST}, after=0)
        compare_on(store, "r-2", {"a": BETTER, "b": BETTER}, canary="site=berlin")
        assert count_canaries(read_model(store, "r-2")) == 1
        promote_canary(store, "r-2", "its time is over")
        assert [count_canaries(read_model(store, name)) for name in ("r-1", "r-2")] == [0, 1]


@pytest.mark.parametrize("removed", range(4))
def test_folder_of_an_earlier_demo_is_known_after_a_kill_while_it_was_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    home = tmp_path / "demo"
    for name in ("a", "b", "answers", "z"):  # file systems list in the order of creation, or in reverse
        (home / name).mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", Mock(wraps=os.rmdir, side_effect=[DEFAULT] * removed + [KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            clear_folder(home)
    assert [path.name for path in clear_folder(home).iterdir()] == ["answers"]


def test_folder_of_no_demo_is_kept(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(ConfigError, check=has_code("FV2007", "no earlier demo")):
        clear_folder(tmp_path)
    assert (tmp_path / "photos").is_dir()


@pytest.mark.parametrize("pretrained", [False, True])
def test_run_of_the_story_is_a_valid_one(tmp_path: Path, pretrained: bool) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    settings = LoopSettings(tmp_path, seed=3, pretrained=weights if pretrained else None)
    config = RunConfig(**settings.choose_run())
    assert config.seed == 3
    assert config.pretrained == (str(weights) if pretrained else False)
