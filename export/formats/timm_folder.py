"""A folder that timm loads: `timm.create_model("local-dir:FOLDER", pretrained=True)`, with logits as in the run.

It is written without timm, by names and shapes. LoRA additions are added into the weights that they belong to.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from export.bundle.measure import LEAST_SCALE, RunGraph, random_pictures
from export.bundle.write import TrainedModel, new_folder
from fedvit.errors import ConfigError
from fedvit.files import atomic_write
from fedvit.model_options import LORA_ALPHA, OWN_MODELS, SMALL, SmallVitOptions
from fedvit.tensors import Tensors, pack

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PREFIX = "tensor/"
_LORA = re.compile(r"(blocks\.\d+\.attn\.qkv)\.lora_([qv])\.([ab])")
_TIMM = re.compile(
    r"(cls_token|reg_token|pos_embed|patch_embed\.proj\.\w+|(norm_pre|norm|fc_norm|head)\.\w+|attn_pool\..+"
    r"|blocks\.\d+\.(norm1|norm2|ls1|ls2|attn\.(qkv|proj|q_norm|k_norm)|mlp\.(fc1|fc2))\.\w+)"
)
_BASE = "vit_tiny_patch16_224"
"""Architecture of timm whose arguments describe our small model completely."""
_NORM_EPS = 1e-6
"""The epsilon of timm's layer norms; a model with another one cannot be described by arguments."""
_TOLERANCE = 1e-3
"""Largest difference of answers with merged additions, relative to the largest."""


def write(out: Path, trained: TrainedModel) -> list[str]:
    """Write the folder. Raises ConfigError if timm has no such model."""
    with new_folder(out) as folder:
        fill(folder, trained)
    return [f"timm folder: {out}", f'  timm.create_model("local-dir:{out}", pretrained=True)']


def fill(folder: Path, trained: TrainedModel) -> None:
    """Write configuration and weights into a folder."""
    config = make_config(trained)
    atomic_write(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    atomic_write(folder / WEIGHTS, pack(merge_lora(list_tensors(trained), trained)))


def make_config(trained: TrainedModel) -> dict[str, Any]:
    """Describe the model as timm's own folders do. Raises ConfigError if timm has no such model."""
    architecture, arguments = _describe(trained)
    batch, tensors = trained.batch, list_tensors(trained)
    side = batch.image_size
    return {
        "architecture": architecture,
        "num_classes": len(trained.classes),
        "num_features": int(tensors["head.weight"].shape[1]),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "fedvit",
            "custom_load": False,
            "input_size": [3, side, side],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": list(batch.mean),
            "std": list(batch.std),
            "num_classes": len(trained.classes),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "label_names": list(trained.classes),
            **({"license": trained.licence} if trained.licence else {}),
        },
    }


def list_tensors(trained: TrainedModel) -> Tensors:
    """Return the model's tensors by timm's names. Raises ConfigError for images that the model remembers."""
    if trained.origin.remembered:
        raise ConfigError("FV1909", f"method {trained.origin.method!r} answers with features of images: choose onnx")
    return {name.removeprefix(_PREFIX): value for name, value in trained.values.items() if name.startswith(_PREFIX)}


def find_lora(tensors: Tensors) -> Iterator[tuple[str, str]]:
    """Yield the projections with LoRA additions, and whether they are of queries or values."""
    for name in tensors:
        if (match := _LORA.fullmatch(name)) and match[3] == "a":
            yield match[1], match[2]


def lora_scale(trained: TrainedModel, rank: int) -> float:
    """Return the factor of the product of both LoRA factors."""
    return float((trained.options or {}).get("alpha", LORA_ALPHA)) / rank


def merge_lora(tensors: Tensors, trained: TrainedModel) -> Tensors:
    """Add LoRA additions into their weights. Raises ConfigError for other additions, which timm has no place for."""
    merged = {name: value for name, value in tensors.items() if not _LORA.fullmatch(name)}
    if others := sorted(name for name in merged if not _TIMM.fullmatch(name)):
        raise ConfigError("FV1909", f"tensor {others[0]!r} is an addition that timm's model does not have: choose onnx")
    for projection, part in find_lora(tensors):
        a, b = tensors[f"{projection}.lora_{part}.a"], tensors[f"{projection}.lora_{part}.b"]
        weight = np.array(merged[f"{projection}.weight"], np.float32)
        rows = len(weight) // 3
        first = 0 if part == "q" else 2 * rows
        weight[first : first + rows] += lora_scale(trained, len(a)) * np.matmul(b, a)
        merged[f"{projection}.weight"] = weight
    if trained.options is None and len(merged) < len(tensors):
        _check_answers(trained, merged)
    return merged


def _check_answers(trained: TrainedModel, merged: Tensors) -> None:
    """Raise ConfigError if the run's graph answers otherwise with merged weights: a device does not know `alpha`."""
    values = {**trained.values, **{f"{_PREFIX}{name}": value for name, value in merged.items()}}
    added = [name for name in values if _LORA.fullmatch(name.removeprefix(_PREFIX))]
    values |= {name: np.zeros_like(values[name]) for name in added}
    images = next(random_pictures(trained.batch)).images[:2]
    want, got = (RunGraph(trained.graph, each, trained.batch, 1)(images) for each in (trained.values, values))
    if not np.abs(got - want).max() <= _TOLERANCE * max(float(np.abs(want).max()), LEAST_SCALE):
        raise ConfigError(
            "FV1909",
            f"method {trained.origin.method!r}: its alpha is not {LORA_ALPHA:g}, and a device does not know it: choose "
            "onnx, or export the model at the coordinator",
        )


def _describe(trained: TrainedModel) -> tuple[str, dict[str, Any]]:
    """Return timm's architecture and its arguments."""
    name, options, side = trained.origin.model, trained.model_options, trained.batch.image_size
    if name == SMALL and options is not None:
        small = SmallVitOptions(**options)
        if small.norm_eps != _NORM_EPS or small.head_width is not None:
            raise ConfigError("FV1909", "model options norm_eps and head_width have no argument in timm: choose onnx")
        return _BASE, {
            "img_size": small.image_size, "patch_size": small.patch_size, "embed_dim": small.width,
            "depth": small.depth, "num_heads": small.heads, "mlp_ratio": small.mlp_ratio, "qkv_bias": small.qkv_bias,
            "reg_tokens": small.registers,
        }  # fmt: skip
    if name in OWN_MODELS or ":" in name:
        where = "; the coordinator knows its options" if name == SMALL else ""
        raise ConfigError("FV1909", f"model {name!r} cannot be described by a name of timm here{where}: choose onnx")
    return name, {"img_size": side, "patch_size": trained.batch.patch_size}
