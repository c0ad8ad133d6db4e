"""Formats in which a trained model leaves the system: one row each, one module each.

`write(out, trained)` of a row's module fills the new folder `out`, and returns lines for the terminal.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from export.bundle.write import TrainedModel
from fedvit.errors import ConfigError


class Format(NamedTuple):
    """A format; its module is imported when it is used."""

    description: str
    module: str
    on_device: bool = True  # a device can write it, too
    every_task: bool = False  # it says what an answer means where images have not one class each


ONNX = "onnx"
FORMATS: Mapping[str, Format] = {
    ONNX: Format("a bundle for any ONNX runtime, measured on images", "export.bundle.write", every_task=True),
    "timm": Format("safetensors that timm loads", "export.formats.timm_folder"),
    "huggingface": Format("timm's files with a model card, for the Hugging Face Hub", "export.formats.huggingface"),
    "peft": Format("the LoRA adapter of a fed_lora run", "export.formats.peft"),
    "mlflow": Format(
        "a new version in MLflow's model registry", "export.formats.mlflow_registry", on_device=False, every_task=True
    ),
}
"""Name -> format. The first one is the default."""


def write_format(name: str, out: Path, trained: TrainedModel) -> list[str]:
    """Write a model in a format other than ONNX. Raises ConfigError if the format cannot hold this model."""
    if (form := trained.batch.labels) and not FORMATS[name].every_task:
        raise ConfigError(
            "FV2490", f"format {name} stands for one class for each image, the run's task is {form.task}: use {ONNX}"
        )
    write: Callable[[Path, TrainedModel], list[str]] = resolve_name(f"{FORMATS[name].module}:write")
    return write(out, trained)
