"""Tensors of models that are no Transformers, by the names and in the order of timm and torch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedvit.models.resnet import DEPTHS


def of_timms_resnet(name: str, timms: str) -> str:
    """Our name of a tensor of timm's ResNets."""
    if timms.startswith("layer"):
        stage, block, rest = timms.removeprefix("layer").split(".", 2)
        number = sum(DEPTHS[name][: int(stage) - 1]) + int(block)
        rest = rest.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut_norm").replace("bn", "norm")
        return f"blocks.{number}.{rest}"
    return timms.replace("conv1", "stem").replace("bn1", "norm_pre").replace("fc", "head")


def for_torchs_lstm(tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The tensors of a layer of torch's LSTM: its gates stand in another order, and it adds two biases."""

    def order(name: str) -> Tensor:
        enters, keeps, leaves, candidate = tensors[f"blocks.{layer}.{name}"].chunk(4)
        return torch.cat([enters, keeps, candidate, leaves])

    return {
        f"weight_ih_l{layer}": order("input_weight"),
        f"weight_hh_l{layer}": order("state_weight"),
        f"bias_ih_l{layer}": order("bias"),
        f"bias_hh_l{layer}": torch.zeros_like(tensors[f"blocks.{layer}.bias"]),
    }
