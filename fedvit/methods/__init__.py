"""Federated methods by name. To add one: its file in this folder, and its line in the table."""

import math
import typing
from dataclasses import fields
from typing import Any

import msgspec

from fedvit.choices import why_invalid
from fedvit.errors import ConfigError
from fedvit.known_names import check_method, check_options
from fedvit.methods.adapters import PersonalAdapters
from fedvit.methods.apfl import APFL
from fedvit.methods.base import Method
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fed_bias import FedBias
from fedvit.methods.fed_head import FedHead
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.fed_prompt import FedPrompt
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.fedbabu import FedBABU
from fedvit.methods.fedbfpt import FedBFPT
from fedvit.methods.fedbn import FedBN
from fedvit.methods.fedper import FedPer
from fedvit.methods.fedperfix import FedPerfix
from fedvit.methods.fedprox import FedProx
from fedvit.methods.fedrep import FedRep
from fedvit.methods.fedrod import FedRoD
from fedvit.methods.fedtp import FedTP
from fedvit.methods.fedvpt_d import FedVptDeep
from fedvit.methods.knn_per import KnnPer
from fedvit.methods.local import Local
from fedvit.methods.per_fedavg import PerFedAvg
from fedvit.methods.personal_part import PersonalPart
from fedvit.methods.pfedhn import PFedHN
from fedvit.methods.pfedme import PFedMe
from fedvit.methods.pfedpg import PFedPG
from fedvit.methods.prefix import PersonalPrefix
from fedvit.methods.prompts import PersonalPrompts
from fedvit.methods.single_vpt import SingleVpt
from fedvit.methods.vanilla_attention import VanillaAttention
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT

METHODS: dict[str, type[Method]] = {
    "adapters": PersonalAdapters,
    "apfl": APFL,
    "eftvit": EFTViT,
    "fed_bias": FedBias,
    "fed_head": FedHead,
    "fed_lora": FedLora,
    "fed_prompt": FedPrompt,
    "fedavg": FedAvg,
    "fedbabu": FedBABU,
    "fedbfpt": FedBFPT,
    "fedbn": FedBN,
    "fedper": FedPer,
    "fedperfix": FedPerfix,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "fedtp": FedTP,
    "fedvpt_d": FedVptDeep,
    "knn_per": KnnPer,
    "local": Local,
    "per_fedavg": PerFedAvg,
    "personal_part": PersonalPart,
    "pfedhn": PFedHN,
    "pfedme": PFedMe,
    "pfedpg": PFedPG,
    "prefix": PersonalPrefix,
    "prompts": PersonalPrompts,
    "single_vpt": SingleVpt,
    "vanilla_attention": VanillaAttention,
}


def make_method(name: str, options: dict[str, Any] | None = None) -> Method:
    """The method `name` with some hyperparameters set. Raises ConfigError naming what is unknown or out of range."""
    check_method(name, METHODS)
    kind, options = METHODS[name], dict(options or {})
    check_options(name, options, [option.name for option in fields(kind)])
    hints = typing.get_type_hints(kind, include_extras=True)
    for option, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"option {option} = {value!r} of method {name!r} must be a finite number")
        try:
            msgspec.convert({option: value}, kind)
        except msgspec.ValidationError as error:
            reason = why_invalid(error, value, hints[option])
            raise ConfigError(f"option {option} = {value!r} of method {name!r}: {reason}") from None
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
    for model_patches in method.model_patches():
        model_patches.apply(vit, seed)
    return vit
