"""The images that a method's server needs, and those that it does not read."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.compute.planning.checks import checked_config
from coordinator.compute.planning.server_data import read_server_images
from coordinator.config import make_config
from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from tests.support.codes import has_code


@pytest.mark.parametrize("values", [{"method": "feddf"}, {"method": "fedavg", "server_data": "images"}])
def test_a_method_and_its_images_come_together(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV2131")):
        checked_config({**values, "model": "vit_small_images"}, "run.toml")


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    values = {"method": "feddf", "model": "vit_small_images", "server_data": str(tmp_path / "nowhere")}
    config, method = make_config(values, "run.toml").run, make_method("feddf")
    vit = build_model(method, config.model, 3, seed=0)
    with pytest.raises(ConfigError, match="nowhere", check=has_code("FV1402")):
        read_server_images(config, method, vit)
