"""Federated methods by name. To add one: its file in this folder, and its line in the table."""

import math
from dataclasses import fields
from typing import Any

import msgspec

from fedvit.errors import ConfigError
from fedvit.methods.base import Method
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT

METHODS: dict[str, type[Method]] = {
    "eftvit": EFTViT,
    "fedavg": FedAvg,
}


def make_method(name: str, options: dict[str, Any] | None = None) -> Method:
    """The method `name` with some hyperparameters set. Raises ConfigError naming what is unknown or out of range."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}, known are {', '.join(sorted(METHODS))}")
    kind, options = METHODS[name], dict(options or {})
    known = [option.name for option in fields(kind)]
    if unknown := sorted(options.keys() - set(known)):
        raise ConfigError(f"method {name!r} has no option {unknown[0]!r}, it has {', '.join(known)}")
    for option, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"option {option} = {value!r} of method {name!r} must be a finite number")
        try:
            msgspec.convert({option: value}, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"option {option} = {value!r} of method {name!r}: {str(error).partition(' - at')[0]}"
            ) from None
    method = msgspec.convert(options, kind)
    if method.momentum and method.optimizer != "sgd":
        raise ConfigError(f"option momentum = {method.momentum} is for sgd, the optimizer is {method.optimizer!r}")
    return method


def build_model(
    method: Method,
    model: str,
    classes: int,
    *,
    seed: int,
    options: dict[str, Any] | None = None,
    pretrained: bool | str = False,
) -> PatchViT:
    """The model of that name with what the method adds to it. Raises ConfigError as `build_vit` does."""
    vit = build_vit(model, classes, seed=seed, options=options, pretrained=pretrained)
    for surgery in method.surgery():
        surgery.apply(vit, seed)
    return vit
