"""Additions are written with the run's factor, or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest

from coordinator.compute.planning.batch import method_batch
from export.bundle.card import Origin
from export.bundle.write import TrainedModel
from export.formats import write_format
from export.trace import to_onnx, trace
from fedvit.errors import ConfigError
from fedvit.methods import build_model, make_method
from fedvit.methods.step import example_inputs, predict_step, steps_of
from fedvit.models import SMALL
from tests.support.codes import has_code
from tests.support.tiny import TINY_CLASSES, TINY_MODEL, TINY_OPTIONS


def make_trained(alpha: float) -> TrainedModel:
    """A model whose additions matter; as on a device, the method's options are unknown."""
    method = make_method("fed_lora", {**TINY_OPTIONS, "alpha": alpha})
    vit = build_model(method, SMALL, TINY_CLASSES, seed=0, options=TINY_MODEL)
    batch, rng = method_batch(method, vit), np.random.default_rng(0)
    inputs = example_inputs(method, vit, batch, steps_of(method, vit)["predict"])
    values = {f"tensor/{name}": value.numpy() for name, value in method.tensors(vit).items()}
    for name in (name for name in values if ".lora_" in name):
        values[name] = rng.normal(0.0, 0.1, values[name].shape).astype(np.float32)
    return TrainedModel(
        graph=to_onnx(trace(predict_step(method, vit), inputs)), values=values, batch=batch,
        classes=tuple(map(str, range(TINY_CLASSES))),
        origin=Origin(run="r", method="fed_lora", model="vit_tiny_patch16_224", round=1, device=None, made_by="t"),
    )  # fmt: skip


def test_device_refuses_a_factor_that_it_does_not_know(tmp_path: Path) -> None:
    trained = make_trained(32.0)
    for name in ("timm", "huggingface", "peft"):
        with pytest.raises(ConfigError, check=has_code("FV1909", "alpha")):
            write_format(name, tmp_path / name, trained)
    assert not [*tmp_path.iterdir()]


def test_device_writes_additions_with_the_usual_factor(tmp_path: Path) -> None:
    assert write_format("peft", tmp_path / "adapter", make_trained(16.0))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 16.0 / (config["r"] // 2)
