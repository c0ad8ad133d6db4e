"""Values of options that are checked without torch, held against the classes and models that have them."""

import typing
from typing import Any

import pytest

from fedvit.errors import ConfigError
from fedvit.known_names import timm_arguments
from fedvit.known_values import check_settings, option_hints
from fedvit.methods import METHODS, make_method
from fedvit.models import SMALL, build_vit
from tests.support.codes import has_code

TIMM = "vit_tiny_patch16_224"


@pytest.mark.parametrize("method", METHODS)
def test_types_read_from_source_are_those_of_the_class(method: str) -> None:
    hints = typing.get_type_hints(METHODS[method], include_extras=True)
    assert option_hints(method) == {option: hints[option] for option in option_hints(method)}


@pytest.mark.parametrize("name", [TIMM, f"{TIMM}.augreg_in21k", "vit_small_patch8_224", "deit3_small_patch16_224"])
def test_sizes_read_from_timms_source_are_those_of_the_model(name: str) -> None:
    vit = build_vit(name, 2, seed=0)
    assert timm_arguments(name)["depth"] == vit.depth
    assert timm_arguments(name)["patch_size"] == vit.patch_size


def test_a_timm_model_without_known_sizes_is_left_to_its_build() -> None:
    assert timm_arguments("hf-hub:timm/vit_tiny_patch16_224") == {}
    check_settings("eftvit", {"local_blocks": 99}, "hf-hub:timm/vit_tiny_patch16_224", {"image_size": 100})


@pytest.mark.parametrize("options", [{"lr": -1}, {"lr": float("nan")}, {"batch_size": 16.5}, {"optimizer": "adam"}])
def test_the_method_itself_says_the_same(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104")) as early:
        check_settings("eftvit", options, SMALL, {})
    with pytest.raises(ConfigError) as later:
        make_method("eftvit", options)
    assert str(early.value) == str(later.value)


def test_each_number_of_a_list_must_be_finite() -> None:
    with pytest.raises(ConfigError, check=has_code("FV1104", "lambdas = [0.1, inf]")):
        check_settings("analytic", {"lambdas": [0.1, float("inf")]}, SMALL, {})
