"""Counts of the story; the whole of it is in tests/e2e/test_loop.py."""

import json
from pathlib import Path

import pytest

from coordinator.config import RunConfig
from fleet.datasets.digits import read_digits
from fleet.loop.fleet import LoopDevice
from fleet.loop.story import LoopSettings, ServedClass, count_answers


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


@pytest.mark.parametrize("pretrained", [False, True])
def test_run_of_the_story_is_a_valid_one(tmp_path: Path, pretrained: bool) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    settings = LoopSettings(tmp_path, seed=3, pretrained=weights if pretrained else None)
    config = RunConfig(**settings.choose_run())
    assert config.seed == 3
    assert config.pretrained == (str(weights) if pretrained else False)
