"""Models by name: every plain ViT of timm, also from a folder or the hub, and small ones, of images and of text; and
baselines that are no Transformers, residual networks and an LSTM. An installed package adds its own by entry points
(docs/plugins.md).

This package needs torch: modules that a device imports must not import it.
"""

from fedvit.models import light_timm as light_timm  # before anything else imports timm

# isort: split
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import timm
import torch
from huggingface_hub import constants
from timm.layers.attention import Attention
from timm.layers.config import set_fused_attn
from timm.layers.norm import LayerNorm
from timm.models import is_model_in_modules, load_state_dict
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedvit import plugins
from fedvit.errors import ConfigError
from fedvit.known_names import (
    HUB,
    LOCAL,
    check_model,
    check_model_options,
    check_option_names,
    find_packaged_model,
    unknown_model,
)
from fedvit.known_values import check_model_values
from fedvit.model_options import CNN as CNN
from fedvit.model_options import LSTM as LSTM
from fedvit.model_options import (
    OWN_MODELS,
    CnnOptions,
    ModelOptions,
    PackagedModel,
    ResnetOptions,
    SmallResnetOptions,
    SmallVitOptions,
    TextLstmOptions,
    TextTransformerOptions,
)
from fedvit.model_options import RESNET as RESNET
from fedvit.model_options import SMALL as SMALL
from fedvit.model_options import TEXT as TEXT
from fedvit.models.cnn import make_cnn
from fedvit.models.extra_head import ExtraHead
from fedvit.models.kv_adapter import KVAdapter
from fedvit.models.lora import Lora
from fedvit.models.lstm import make_text_lstm
from fedvit.models.mlp_adapter import MlpAdapter
from fedvit.models.model_patch import ModelPatch
from fedvit.models.prefix import FreePrefix
from fedvit.models.prompts import Prompts
from fedvit.models.resnet import make_resnet, make_small_resnet
from fedvit.models.rotary import RotaryViT
from fedvit.models.text import make_text_transformer
from fedvit.models.vit import PatchViT

MODEL_PATCHES: Mapping[str, type[ModelPatch]] = {
    "extra_head": ExtraHead,
    "kv_adapter": KVAdapter,
    "lora": Lora,
    "mlp_adapter": MlpAdapter,
    "prefix": FreePrefix,
    "prompts": Prompts,
}
"""Every addition to a model, by the name of its file."""

Options = dict[str, Any]

HUB_S = 5.0
"""Longest wait for an answer of the hub of weights."""


def build_vit(
    name: str, classes: int, *, seed: int, options: Options | None = None, pretrained: bool | str = False
) -> PatchViT:
    """Make a ViT, or one of the other models, whose random parts follow from `seed`.

    `options` of a timm model are `image_size` and `patch_size`. `pretrained` is False, True (timm's own
    weights, from its cache or the network) or the path of a checkpoint file; then only the head is random, unless
    the weights have one for as many classes as timm's own.
    Raises ConfigError for an unknown name, a model that is not a plain ViT, and weights that do not load.
    """
    # the backward of fused attention has no decomposition into standard operators
    set_fused_attn(False)
    options = dict(options or {})
    check_model_options(name, options)
    check_model_values(name, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in OWN_MODELS:
            if pretrained:
                raise ConfigError(
                    "FV1113", f"model {name!r} has no pretrained weights, got pretrained = {pretrained!r}"
                )
            return _make(name, classes, OWN_MODELS[name](**options))
        if (entry := find_packaged_model(name)) is not None:
            return _make_packaged(entry, classes, options, pretrained)
        model = _timm(name, classes, options, pretrained)
        if isinstance(pretrained, str):
            torch.manual_seed(seed)
            _check_loaded(model, _timm(name, classes, options, False), name, pretrained)
        return RotaryViT(name, model) if isinstance(model, Eva) else PatchViT(name, model)


def _weight_init() -> Literal["skip", ""]:
    """Return timm's `weight_init` for the default device: on "meta" there are no values, and to draw them takes nine
    tenths of the time."""
    return "skip" if torch.get_default_device().type == "meta" else ""


def _small(name: str, classes: int, options: SmallVitOptions) -> PatchViT:
    vit = VisionTransformer(
        img_size=options.image_size, patch_size=options.patch_size, embed_dim=options.width, depth=options.depth,
        num_heads=options.heads, mlp_ratio=options.mlp_ratio, num_classes=classes, qkv_bias=options.qkv_bias,
        reg_tokens=options.registers, norm_layer=partial(LayerNorm, eps=options.norm_eps),
        weight_init=_weight_init(),
    )  # fmt: skip
    if options.head_width is not None:
        for block in vit.blocks:
            block.attn = Attention(
                options.width, options.heads, attn_head_dim=options.head_width, qkv_bias=options.qkv_bias
            )
        if not _weight_init():
            vit.init_weights(needs_reset=False)
    if options.first_values == "torch":
        for layer in vit.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    if options.position_std is not None:
        for position in (vit.pos_embed, vit.cls_token):
            assert position is not None
            nn.init.normal_(position, std=options.position_std)
    return PatchViT(name, vit)


def _make(name: str, classes: int, options: ModelOptions) -> PatchViT:
    """Make one of the models of OWN_MODELS."""
    match options:
        case SmallVitOptions():
            return _small(name, classes, options)
        case TextTransformerOptions():
            return make_text_transformer(name, classes, options)
        case TextLstmOptions():
            return make_text_lstm(name, classes, options)
        case SmallResnetOptions():
            return make_small_resnet(name, classes, options)
        case CnnOptions():
            return make_cnn(name, classes, options)
        case ResnetOptions():
            return make_resnet(name, classes, options)
    raise AssertionError(options)


def load_model(entry: EntryPoint) -> type[PackagedModel]:
    """Load a package's model: the class of its options. Raises ConfigError if it cannot be used."""
    return plugins.load_class(plugins.MODELS, entry, PackagedModel)  # type: ignore[type-abstract]


def _make_packaged(entry: EntryPoint, classes: int, options: Options, pretrained: bool | str) -> PatchViT:
    """Make a package's model. Raises ConfigError for unknown options, and for what is not such a model."""
    kind, name = load_model(entry), entry.name
    if pretrained:
        raise ConfigError("FV1113", f"model {name!r} has no pretrained weights, got pretrained = {pretrained!r}")
    check_option_names(name, options, [option.name for option in fields(kind)])
    made = plugins.make(plugins.MODELS, entry, lambda: kind(**options).build(name, classes))
    if not isinstance(made, PatchViT) or made.classes != classes:
        plugins.refuse(plugins.MODELS, entry, f"did not build a fedvit.models.vit.PatchViT with {classes} classes")
    return made


def _timm(name: str, classes: int, options: Options, pretrained: bool | str) -> VisionTransformer | Eva:
    if name.startswith((HUB, LOCAL)):
        check_model(name)
    elif not timm.is_model(name):  # also true with a tag, as in vit_base_patch16_224.augreg_in21k
        raise unknown_model(name, [*OWN_MODELS, *timm.list_models()])
    arguments: dict[str, Any] = {"num_classes": classes}
    if "image_size" in options:
        arguments["img_size"] = options["image_size"]
    if "patch_size" in options:
        arguments["patch_size"] = options["patch_size"]
    if _weight_init() and is_model_in_modules(name, ["vision_transformer"]):
        arguments["weight_init"] = _weight_init()
    if isinstance(pretrained, str):
        if not Path(pretrained).is_file():
            raise ConfigError("FV1113", f"pretrained weights of {name!r}: there is no file {pretrained!r}")
        arguments["pretrained_cfg_overlay"] = {"file": pretrained}
    try:
        # a model on the hub is described there, too
        asks_hub = name.startswith(HUB) or (pretrained is True and not name.startswith(LOCAL))
        with _quick_hub() if asks_hub else nullcontext():
            model = timm.create_model(name, pretrained=bool(pretrained), **arguments)
    except Exception as error:  # timm raises whatever hub, file system or torch raised
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        if pretrained:
            raise ConfigError(
                "FV1113", f"pretrained weights of {name!r} ({pretrained!r}) cannot be loaded: {reason}"
            ) from error
        raise ConfigError("FV1109", f"model {name!r} cannot be built with {options}: {reason}") from error
    if type(model) is VisionTransformer or type(model) is Eva:
        return model
    raise ConfigError("FV1112", f"model {name!r} is a {type(model).__name__}, not a plain Vision Transformer")


@contextmanager
def _quick_hub() -> Iterator[None]:
    """If the hub of weights cannot be reached, use earlier downloads only, without minutes of retries.

    Raises OSError, with the reason, if there is no earlier download.
    """
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_S)
    except Exception as error:  # noqa: BLE001 - of whichever client the hub's library uses
        unreachable = error
    else:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    except Exception as error:
        raise OSError(
            f"{constants.ENDPOINT} cannot be reached ({unreachable}), and they were not downloaded before: "
            "give --pretrained the path of a checkpoint, or start once where there is a network"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def checkpoint_notes(vit: PatchViT, file: str) -> list[str]:
    """The parts of a checkpoint that a model changes: its head, and positions for images of another size."""
    held = {name: tuple(value.shape) for name, value in load_state_dict(file).items()}
    own = {name: tuple(value.shape) for name, value in vit.vit.named_parameters()}
    resampled = [name for name, shape in own.items() if name in held and held[name] != shape and name != "head.weight"]
    notes = [
        f"{file}: {name} has shape {held[name]} there and {own[name]} here: it is resampled"
        for name in resampled
        if name != "head.bias"
    ]
    head = held.get("head.weight")
    which = f"for {head[0]} classes" if head else "none"
    return [*notes, f"{file}: its head ({which}) is replaced where the run has another number of classes"]


def _check_loaded(model: VisionTransformer | Eva, fresh: VisionTransformer | Eva, name: str, file: str) -> None:
    """Refuse a checkpoint that leaves a tensor at its random value: timm ignores missing names."""
    for key, value in fresh.named_parameters():
        if key.startswith("head.") or bool((value == value.flatten()[0]).all()):
            continue
        if torch.equal(model.get_parameter(key), value):
            raise ConfigError("FV1113", f"pretrained weights of {name!r}: file {file!r} has no tensor {key!r}")
