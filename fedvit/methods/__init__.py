"""Federated methods by name. To add one: its file in this folder, and its line in the table.

An installed package adds its own by entry points (docs/plugins.md).
"""

import typing
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec

from fedvit import plugins
from fedvit.errors import ConfigError
from fedvit.known_names import check_method, check_options
from fedvit.known_values import check_option
from fedvit.label_forms import LabelForm
from fedvit.methods.adapters import PersonalAdapters
from fedvit.methods.analytic import Analytic
from fedvit.methods.apfl import APFL
from fedvit.methods.base import Method, check_fits, list_patches
from fedvit.methods.caff import CAFF
from fedvit.methods.ditto import Ditto
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fed_bias import FedBias
from fedvit.methods.fed_head import FedHead
from fedvit.methods.fed_lora import FedLora
from fedvit.methods.fed_prompt import FedPrompt
from fedvit.methods.fedala import FedALA
from fedvit.methods.fedas import FedAS
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.fedbabu import FedBABU
from fedvit.methods.fedbfpt import FedBFPT
from fedvit.methods.fedbn import FedBN
from fedvit.methods.fedcp import FedCP
from fedvit.methods.feddbe import FedDBE
from fedvit.methods.feddf import FedDF
from fedvit.methods.feddyn import FedDyn
from fedvit.methods.fednova import FedNova
from fedvit.methods.fedntd import FedNTD
from fedvit.methods.fedopt import FedOpt
from fedvit.methods.fedpac import FedPAC
from fedvit.methods.fedper import FedPer
from fedvit.methods.fedperfix import FedPerfix
from fedvit.methods.fedproto import FedProto
from fedvit.methods.fedprox import FedProx
from fedvit.methods.fedra import FedRA
from fedvit.methods.fedrep import FedRep
from fedvit.methods.fedrod import FedRoD
from fedvit.methods.fedsa_lora import FedSaLora
from fedvit.methods.fedtp import FedTP
from fedvit.methods.fedvpt_d import FedVptDeep
from fedvit.methods.ffa_lora import FfaLora
from fedvit.methods.flexlora import FlexLora
from fedvit.methods.gpfl import GPFL
from fedvit.methods.ifca import IFCA
from fedvit.methods.knn_per import KnnPer
from fedvit.methods.local import Local
from fedvit.methods.lora_fair import LoraFair
from fedvit.methods.moon import Moon
from fedvit.methods.per_fedavg import PerFedAvg
from fedvit.methods.personal_analytic import PersonalAnalytic
from fedvit.methods.personal_part import PersonalPart
from fedvit.methods.pfedhn import PFedHN
from fedvit.methods.pfedme import PFedMe
from fedvit.methods.pfedpg import PFedPG
from fedvit.methods.prefix import PersonalPrefix
from fedvit.methods.prompts import PersonalPrompts
from fedvit.methods.scaffold import Scaffold
from fedvit.methods.single_vpt import SingleVpt
from fedvit.methods.vanilla_attention import VanillaAttention
from fedvit.models import build_vit
from fedvit.models.vit import PatchViT

METHODS: dict[str, type[Method]] = {
    "adapters": PersonalAdapters,
    "analytic": Analytic,
    "apfl": APFL,
    "caff": CAFF,
    "ditto": Ditto,
    "eftvit": EFTViT,
    "fed_bias": FedBias,
    "fed_head": FedHead,
    "fed_lora": FedLora,
    "fed_prompt": FedPrompt,
    "fedala": FedALA,
    "fedas": FedAS,
    "fedavg": FedAvg,
    "fedbabu": FedBABU,
    "fedbfpt": FedBFPT,
    "fedbn": FedBN,
    "fedcp": FedCP,
    "feddbe": FedDBE,
    "feddf": FedDF,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedntd": FedNTD,
    "fedopt": FedOpt,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedperfix": FedPerfix,
    "fedproto": FedProto,
    "fedprox": FedProx,
    "fedra": FedRA,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "fedsa_lora": FedSaLora,
    "fedtp": FedTP,
    "fedvpt_d": FedVptDeep,
    "ffa_lora": FfaLora,
    "flexlora": FlexLora,
    "gpfl": GPFL,
    "ifca": IFCA,
    "knn_per": KnnPer,
    "local": Local,
    "lora_fair": LoraFair,
    "moon": Moon,
    "per_fedavg": PerFedAvg,
    "personal_analytic": PersonalAnalytic,
    "personal_part": PersonalPart,
    "pfedhn": PFedHN,
    "pfedme": PFedMe,
    "pfedpg": PFedPG,
    "prefix": PersonalPrefix,
    "prompts": PersonalPrompts,
    "scaffold": Scaffold,
    "single_vpt": SingleVpt,
    "vanilla_attention": VanillaAttention,
}
"""Names of fedvit's own methods."""


def method_names() -> list[str]:
    """All methods, those of installed packages included, of which some may be unusable."""
    return sorted(plugins.list_names(plugins.METHODS, METHODS))


def method_class(name: str) -> type[Method]:
    """The class of the method `name`, imported from its package where it is not one of fedvit's.

    Raises ConfigError when there is no such method, or when its package declares something that cannot be used.
    """
    check_method(name, method_names())
    entry = plugins.find_entry(plugins.METHODS, name, METHODS)
    if entry is None:
        return METHODS[name]
    kind = plugins.load_class(plugins.METHODS, entry, Method, needs=["source"])  # type: ignore[type-abstract]
    if kind.one_gradient and kind.local_step is not Method.local_step:
        # graphs with one gradient come from `objective` alone, so the two engines would train different things
        plugins.refuse(
            plugins.METHODS,
            entry,
            "has a `local_step` of its own, which devices would not run: add `one_gradient = False` to the class, or "
            "change `objective` instead",
            "FV1103",
        )
    return kind


def make_method(name: str, options: dict[str, Any] | None = None) -> Method:
    """The method `name` with some hyperparameters set. Raises ConfigError naming what is unknown or out of range."""
    kind, options = method_class(name), dict(options or {})
    check_options(name, options, [option.name for option in fields(kind)])
    hints = _read_hints(kind)
    for option, value in options.items():
        check_option(name, option, value, hints[option])
    method = msgspec.convert(options, kind)
    if method.momentum and method.optimizer != "sgd":
        raise ConfigError(
            "FV1104", f"option momentum = {method.momentum} is for sgd, the optimizer is {method.optimizer!r}"
        )
    if method.optimizer_bits != 32 and not method.one_gradient:
        raise ConfigError(
            "FV1104", f"option optimizer_bits = {method.optimizer_bits}: {name!r} makes whole steps, with 32 bits alone"
        )
    return method


@lru_cache(maxsize=64)  # a server makes the method of each device in each round
def _read_hints(kind: type[Method]) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def build_model(
    method: Method,
    model: str,
    classes: int,
    *,
    seed: int,
    options: dict[str, Any] | None = None,
    pretrained: bool | str = False,
) -> PatchViT:
    """The model of that name with what the method adds to it. Raises ConfigError as `build_vit` does, and for
    a model that does not suit the method."""
    vit = build_vit(model, classes, seed=seed, options=options, pretrained=pretrained)
    vit.seed = seed
    check_fits(method, vit)
    for patch in list_patches(method):
        patch.apply(vit, seed)
    return vit


def set_task(method: Method, vit: PatchViT, form: LabelForm | None) -> None:
    """Set the task that a model is trained for. Raises ConfigError for one that does not suit model or method."""
    if form is None:
        return
    if vit.reads_text:
        raise ConfigError("FV2490", f"model {vit.name!r} reads text, whose task is the next character: leave task out")
    vit.label_form = form
    check_fits(method, vit)
