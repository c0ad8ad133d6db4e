"""Options of models, and configurations that a model cannot have."""

from typing import Any

import pytest

from coordinator.compute.planning.checks import checked_config
from fedvit.errors import ConfigError
from fedvit.models import LSTM, RESNET, SMALL, TEXT, build_vit
from tests.support.codes import has_code
from tests.support.plays import LSTM_MODEL, TEXT_MODEL

TINY = "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("model", "options", "code"),
    [
        (SMALL, {"widht": 64}, "FV1105"),
        (SMALL, {"width": 0}, "FV1104"),
        (SMALL, {"depth": -1}, "FV1104"),
        (SMALL, {"heads": 2.0}, "FV1104"),
        (SMALL, {"depth": True}, "FV1104"),
        (SMALL, {"patch_size": "8"}, "FV1104"),
        (SMALL, {"image_size": 30, "patch_size": 8}, "FV1109"),
        (SMALL, {"width": 30, "heads": 4}, "FV1109"),
        (SMALL, {"head_width": 0}, "FV1104"),
        (SMALL, {"head_width": 64.0}, "FV1104"),
        (SMALL, {"qkv_bias": "no"}, "FV1104"),
        (SMALL, {"registers": -1}, "FV1104"),
        (SMALL, {"mlp_ratio": "4"}, "FV1109"),
        (SMALL, {"mlp_ratio": 0}, "FV1109"),
        (SMALL, {"mlp_ratio": float("nan")}, "FV1109"),
        (SMALL, {"mlp_ratio": float("inf")}, "FV1109"),
        (SMALL, {"position_std": "1"}, "FV1104"),
        (SMALL, {"position_std": -1.0}, "FV1109"),
        (TINY, {"depth": 3}, "FV1105"),
        (TINY, {"image_size": "big"}, "FV1104"),
        (TINY, {"image_size": 0}, "FV1104"),
        (TINY, {"patch_size": 0}, "FV1104"),
        (TINY, {"image_size": 8}, "FV1109"),
        (TINY, {"image_size": [32, 64]}, "FV1104"),
        (RESNET, {"groups": 3}, "FV1109"),
        (RESNET, {"block": "wide"}, "FV1104"),
        (RESNET, {"stages": 0}, "FV1104"),
        (RESNET, {"patch_size": 4}, "FV1105"),
        ("resnet18", {"stem": "5x5"}, "FV1104"),
        ("resnet18", {"groups": 48}, "FV1109"),
        ("resnet18", {"width": 16}, "FV1105"),
        (TEXT, {**TEXT_MODEL, "context": 0}, "FV1104"),
        (TEXT, {**TEXT_MODEL, "heads": 3}, "FV1109"),
        (TEXT, {**TEXT_MODEL, "causal": 1}, "FV1104"),
        (TEXT, {**TEXT_MODEL, "form": "gpt"}, "FV1104"),
        (TEXT, {**TEXT_MODEL, "form": "fedtp", "qkv_bias": True}, "FV1109"),
        (TEXT, {**TEXT_MODEL, "mlp_ratio": 0}, "FV1109"),
        (TEXT, {**TEXT_MODEL, "image_size": 8}, "FV1105"),
        (LSTM, {**LSTM_MODEL, "embedding": 0}, "FV1104"),
        (LSTM, {**LSTM_MODEL, "width": 1.5}, "FV1104"),
        (LSTM, {**LSTM_MODEL, "heads": 2}, "FV1105"),
    ],
)
def test_model_refuses_options(model: str, options: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code)):
        build_vit(model, 10, seed=0, options=options)


@pytest.mark.parametrize(
    ("model", "values", "code"),
    [
        ("resnet50", {"method": "fedtp"}, "FV1111"),
        ("resnet50", {"method": "fedperfix"}, "FV1111"),
        ("resnet50", {"method": "pfedpg"}, "FV1111"),
        ("resnet50", {"method": "fedbfpt"}, "FV1111"),
        ("resnet50", {"method": "fedavg", "options": {"mask": 0.5}}, "FV1111"),
        ("resnet50", {"method": "fedavg", "pretrained": True}, "FV1113"),
        (TEXT, {"method": "eftvit"}, "FV1110"),
        (TEXT, {"method": "fed_prompt"}, "FV1110"),
        (TEXT, {"method": "fedtp", "options": {"knn_weight": 0.6}}, "FV1110"),
        (TEXT, {"method": "fedavg", "images": {"flip": True}}, "FV1110"),
        (TEXT, {"method": "fedavg", "pretrained": True}, "FV1113"),
    ],
)
def test_configuration_of_another_model_is_refused(model: str, values: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError, check=has_code(code)):
        checked_config({"model": model, "rounds": 1, **values}, "run.toml")
