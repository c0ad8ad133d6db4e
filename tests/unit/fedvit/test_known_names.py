"""Names that are known without torch, held against the tables that they are read from."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import timm

from fedvit import known_names
from fedvit.errors import ConfigError
from fedvit.known_names import check_model, method_classes, method_options
from fedvit.methods import METHODS
from tests.support.codes import has_code


def test_known_methods_are_those_of_the_table() -> None:
    assert method_classes() == {name: kind.__name__ for name, kind in METHODS.items()}


@pytest.mark.parametrize("method", METHODS)
def test_known_options_of_a_method_are_its_fields(method: str) -> None:
    assert set(method_options(method)) == {option.name for option in fields(METHODS[method])}


def test_known_models_are_all_that_timm_has() -> None:
    """Each is a whole word of timm's sources, which is what is looked for."""
    assert set(timm.list_models()) <= set(re.findall(r"\w+", known_names._timm_sources()))
    for name in ["vit_tiny_patch16_224", "vit_tiny_patch16_224_in21k", "timm/vit_base_patch16_224.augreg_in21k"]:
        check_model(name)
    with pytest.raises(ConfigError, check=has_code("FV1105", "'vit_tiny_patch16_224'")):
        check_model("vit_tiny_patch16_22")


def test_models_of_a_folder_and_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_model(f"local-dir:{tmp_path}")
    (tmp_path / "config.json").touch()
    for name in [f"local-dir:{tmp_path}", "hf-hub:timm/vit_tiny_patch16_224", "hf-hub:owner/my.model-1@v1.0"]:
        check_model(name)
    with pytest.raises(ConfigError):
        check_model("hf-hub:vit_tiny_patch16_224")
