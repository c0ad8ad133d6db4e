"""The order in which pictures are labelled."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_client.owner import guessing
from edge_client.owner.guessing import serving_guesser, sort_least_sure
from edge_client.owner.labelling import Labelling
from edge_client.storage.models import DeviceModels
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.served import add_model, split_digits, write_digits


def test_least_sure_pictures_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model that serves: mostly those of new classes, in the order in which they are shown."""
    state, folder = tmp_path / "state", tmp_path / "images"
    with pytest.raises(ConfigError, check=has_code("FV1491")):
        serving_guesser(state, 1)
    DeviceModels(state).promote(add_model(state, write_digits(tmp_path / "bundle", 0), 1))
    parts = split_digits(0)
    for name, digits in (("known", parts.stream), ("new", parts.unknown)):
        for number, pixels in enumerate(digits.pixels[:30]):
            file = folder / "unlabelled" / f"{name}-{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        shutil.copy(folder / "unlabelled" / "new-0.png", folder / name)
    labelling, guesser = Labelling(folder), serving_guesser(state, 1)
    order = sort_least_sure(labelling.waiting, guesser)
    labelling.sort(order)
    assert labelling.current == order[0]
    sure = [guesser(path).probability for path in order]
    assert sure == sorted(sure)
    assert np.mean([path.name.startswith("new") for path in order[:20]]) > 0.7
    monkeypatch.setattr(guessing, "MOST_SORTED", 2)
    for number, path in enumerate(order):
        os.utime(path, (number, number))
    again = sort_least_sure(order, guesser)
    assert (set(again[:2]), again[2:]) == (set(order[-2:]), order[:-2]), "the newest ones are answered"
    damaged = folder / "unlabelled" / "damaged.png"
    damaged.write_bytes(b"no picture")
    assert sort_least_sure([damaged, order[-1]], guesser) == [order[-1], damaged]
