"""Options of the models that are made here, and checks of options; an error names the option and its value.

This module needs no torch, so that a wrong value is found before torch is imported.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fedvit.errors import ConfigError

SMALL = "vit_small_images"
"""The model that needs no timm name."""
TEXT = "transformer_small_text"
"""The model of text."""
LSTM = "lstm_small_text"
"""The recurrent model of text."""
RESNET = "resnet_small_images"
"""The convolutional model that needs no timm name."""
CNN = "cnn_small_images"
"""The plain convolutional network."""
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")
"""Residual networks of timm that are made here, with group norms."""
LORA_ALPHA = 16.0
"""Low-rank additions are multiplied by this, over their rank."""
RESNET_WIDTH = 64
"""Channels of the first stage of `RESNETS`."""

# --- checks -------------------------------------------------------------------------------------------


def check_whole(owner: str, option: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError("FV1104", f"{owner} option {option} = {value!r} must be a whole number of at least {least}")


def check_number(owner: str, option: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError("FV1104", f"{owner} option {option} = {value!r} must be a finite number")


def check_switch(owner: str, option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError("FV1104", f"{owner} option {option} = {value!r} must be true or false")


def check_choice(owner: str, option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError("FV1104", f"{owner} option {option} = {value!r} must be one of {list(choices)}")


def check_multiple(option: str, value: int, divisor_option: str, divisor: int) -> None:
    if value % divisor:
        raise ConfigError(
            "FV1109", f"model option {option} = {value} is not a multiple of {divisor_option} = {divisor}"
        )


def _check_mlp(ratio: Any, width: int) -> None:
    number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
    if not (number and 1 <= width * ratio < math.inf):
        raise ConfigError("FV1109", f"model option mlp_ratio = {ratio!r} must be a number, at least 1 / width")


def _check_groups(width: int, groups: int) -> None:
    if width % groups:
        raise ConfigError(
            "FV1109", f"model option groups = {groups} does not divide the {width} channels of the first stage"
        )


# --- options of models --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of one model. Raises ConfigError on construction for a value out of range."""

    def check_wholes(self, *options: str) -> None:
        """Raises ConfigError unless each of these options is a whole number of at least 1."""
        for option in options:
            check_whole("model", option, getattr(self, option))


class PackagedModel(ModelOptions, ABC):
    """Options of a model that an installed package makes (docs/plugins.md); each has a default.

    A class derived from it is a frozen dataclass.
    """

    contract_options: ClassVar[Mapping[str, Any]] = {}
    """Options of a small model, which the laws of models train in seconds."""

    @abstractmethod
    def build(self, name: str, classes: int) -> Any:
        """Make the model of that name, a `PatchViT`; its random values are torch's next ones."""


@dataclass(frozen=True, kw_only=True)
class SmallVitOptions(ModelOptions):
    image_size: int = 32
    patch_size: int = 4
    width: int = 64
    depth: int = 6
    heads: int = 4
    mlp_ratio: float = 2.0
    head_width: int | None = None  # None: width / heads
    qkv_bias: bool = True
    registers: int = 0
    position_std: float | None = None  # of positions and class token at first; None: as timm's begin, near zero
    first_values: str = "timm"  # of linear layers: "timm": normal with 0.02, biases 0; "torch": torch.nn.Linear's own
    norm_eps: float = 1e-6  # of layer norms

    def __post_init__(self) -> None:
        self.check_wholes("image_size", "patch_size", "width", "depth", "heads")
        _check_mlp(self.mlp_ratio, self.width)
        if self.head_width is not None:
            self.check_wholes("head_width")
        check_switch("model", "qkv_bias", self.qkv_bias)
        check_whole("model", "registers", self.registers, least=0)
        check_multiple("image_size", self.image_size, "patch_size", self.patch_size)
        check_multiple("width", self.width, "heads", self.heads)
        if self.position_std is not None:
            check_number("model", "position_std", self.position_std)
            if self.position_std < 0:
                raise ConfigError("FV1109", f"model option position_std = {self.position_std!r} must be >= 0")
        check_choice("model", "first_values", self.first_values, ("timm", "torch"))
        check_number("model", "norm_eps", self.norm_eps)
        if self.norm_eps <= 0:
            raise ConfigError("FV1109", f"model option norm_eps = {self.norm_eps!r} must be > 0")


@dataclass(frozen=True, kw_only=True)
class TextTransformerOptions(ModelOptions):
    context: int = 80
    width: int = 128
    depth: int = 2
    heads: int = 8
    mlp_ratio: float = 2.0
    head_width: int | None = None  # None: width / heads
    qkv_bias: bool = False
    causal: bool = True  # false: a position reads the characters behind it, too, among them its own answer
    form: str = "vit"  # "vit": blocks as of a Vision Transformer; "fedtp": as in FedTP's released code

    def __post_init__(self) -> None:
        self.check_wholes("context", "width", "depth", "heads")
        _check_mlp(self.mlp_ratio, self.width)
        if self.head_width is not None:
            self.check_wholes("head_width")
        check_switch("model", "qkv_bias", self.qkv_bias)
        check_switch("model", "causal", self.causal)
        check_choice("model", "form", self.form, ("vit", "fedtp"))
        if self.form == "fedtp" and self.qkv_bias:
            raise ConfigError("FV1109", "model option qkv_bias = True is for form = 'vit', not 'fedtp'")
        check_multiple("width", self.width, "heads", self.heads)


@dataclass(frozen=True, kw_only=True)
class TextLstmOptions(ModelOptions):
    context: int = 80
    embedding: int = 8
    width: int = 256
    depth: int = 2

    def __post_init__(self) -> None:
        self.check_wholes("context", "embedding", "width", "depth")


@dataclass(frozen=True, kw_only=True)
class SmallResnetOptions(ModelOptions):
    image_size: int = 32
    width: int = 16
    stages: int = 3
    depth: int = 1
    block: str = "basic"
    groups: int = 4

    def __post_init__(self) -> None:
        self.check_wholes("image_size", "width", "stages", "depth", "groups")
        check_choice("model", "block", self.block, ("basic", "bottleneck"))
        _check_groups(self.width, self.groups)


@dataclass(frozen=True, kw_only=True)
class CnnOptions(ModelOptions):
    image_size: int = 32
    width: int = 16  # channels of the first convolution; the second has twice as many
    groups: int | None = None  # of group norms behind convolutions; None: no norms

    def __post_init__(self) -> None:
        check_whole("model", "image_size", self.image_size, least=16)
        self.check_wholes("width")
        if self.groups is not None:
            self.check_wholes("groups")
            _check_groups(self.width, self.groups)


@dataclass(frozen=True, kw_only=True)
class ResnetOptions(ModelOptions):
    image_size: int = 224
    stem: str = "7x7"
    groups: int = 32  # of a norm, as in Wu and He

    def __post_init__(self) -> None:
        self.check_wholes("image_size", "groups")
        check_choice("model", "stem", self.stem, ("7x7", "3x3"))
        _check_groups(RESNET_WIDTH, self.groups)


OWN_MODELS: Mapping[str, type[ModelOptions]] = {
    SMALL: SmallVitOptions,
    TEXT: TextTransformerOptions,
    LSTM: TextLstmOptions,
    RESNET: SmallResnetOptions,
    CNN: CnnOptions,
    **dict.fromkeys(RESNETS, ResnetOptions),
}
"""Model that is made here, not by timm, and has no pretrained weights -> its options."""


def option_names(model: str) -> tuple[str, ...]:
    """Return the names of the options of a model of OWN_MODELS."""
    return tuple(option.name for option in fields(OWN_MODELS[model]))
