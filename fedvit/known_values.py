"""Checks of the values of options without torch, so that a mistake is found at once.

The types of a method's options are evaluated from its source; the method's class itself needs torch.
"""

import ast
import importlib
import math
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from fedvit import plugins
from fedvit.choices import NAMES, why_invalid
from fedvit.errors import ConfigError
from fedvit.known_names import check_names, find_packaged_model, is_packaged, option_annotations, timm_arguments
from fedvit.model_options import OWN_MODELS, SmallVitOptions, TextTransformerOptions, check_multiple, check_whole

SPARED_BLOCKS = "spared_blocks"
"""Key of `Meta.extra` of an option that counts blocks of the model: blocks that must remain beside them."""

PLUGINS = "plugins"
"""Key of `Meta.extra` of an option that is a plugin's name, or one of fedvit's `names`: the noun of its kind."""
KINDS = {kind.noun: kind for kind in plugins.KINDS}


def check_settings(method: str, options: Mapping[str, Any], model: str, model_options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an unknown method, model or option, and for a value that an option does not allow.

    Checks that need the class of a method, or the whole model, are made where torch is available.
    """
    check_names(method, options, model, model_options)
    check_model_values(model, model_options)
    if not is_packaged(method):
        hints = option_hints(method)
        for option, value in options.items():
            check_option(method, option, value, hints[option])
        if (depth := _depth(model, model_options)) is not None:
            check_blocks(options, hints, model, depth)


# --- methods ------------------------------------------------------------------------------------------


def check_option(method: str, option: str, value: Any, hint: Any) -> None:
    """Raises ConfigError if an option of a method, which has the type `hint`, does not allow the value."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        raise ConfigError("FV1104", f"option {option} = {value!r} of method {method!r} must be a finite number")
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        reason = why_invalid(error, value, hint)
        raise ConfigError("FV1104", f"option {option} = {value!r} of method {method!r}: {reason}") from None
    for extra in _extras(hint):
        if kind := KINDS.get(extra.get(PLUGINS, "")):
            plugins.check_value(kind, f"option {option} of method {method!r}", value, extra[NAMES], "FV1104")


def check_blocks(options: Mapping[str, Any], hints: Mapping[str, Any], model: str, depth: int) -> None:
    """Raises ConfigError if an option asks for more blocks than a model of `depth` blocks can spare."""
    for option, value in options.items():
        spared = next((extra[SPARED_BLOCKS] for extra in _extras(hints[option]) if SPARED_BLOCKS in extra), None)
        if spared is not None and value is not None and value > depth - spared:
            raise ConfigError(
                "FV1104",
                f"option {option} = {value} must be at most {depth - spared}: model {model!r} has {depth} blocks",
            )


def _extras(hint: Any) -> list[dict[str, Any]]:
    """Return what the annotations of a type say beside its limits."""
    own = [note.extra for note in getattr(hint, "__metadata__", ()) if isinstance(note, msgspec.Meta) and note.extra]
    return own + [extra for part in typing.get_args(hint) for extra in _extras(part)]


@cache
def option_hints(method: str) -> Mapping[str, Any]:
    """Return the types of the options of a method of fedvit itself."""
    return {
        option: _evaluate(annotation.type, annotation.file) for option, annotation in option_annotations(method).items()
    }


def _evaluate(expression: ast.expr, file: Path) -> Any:
    """Evaluate a type that is written in a file."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    namespace = {name: value for name in names if (value := _value(name, file)) is not None}
    holder = SimpleNamespace(__annotations__={"option": ast.unparse(expression)})
    return typing.get_type_hints(holder, namespace, include_extras=True)["option"]


@cache
def _value(name: str, file: Path) -> Any:
    """Return the value of a name that a file imports or assigns; None for a builtin."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return getattr(importlib.import_module(node.module), name)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return _evaluate(node.value, file)
    return None


# --- models -------------------------------------------------------------------------------------------


def check_model_values(model: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError if an option of a model does not allow its value."""
    if model in OWN_MODELS:
        OWN_MODELS[model](**options)
        return
    if find_packaged_model(model):  # checks its options itself
        return
    for option, value in options.items():
        check_whole("model", option, value)
    patch_size = options.get("patch_size", timm_arguments(model).get("patch_size"))
    if "image_size" in options and patch_size is not None:
        check_multiple("image_size", options["image_size"], "patch_size", patch_size)


def _depth(model: str, options: Mapping[str, Any]) -> int | None:
    """Return the number of a model's blocks; None if the model must be built to find it, or has no blocks."""
    if find_packaged_model(model):
        return None
    if model not in OWN_MODELS:
        return timm_arguments(model).get("depth")
    made = OWN_MODELS[model](**options)
    return made.depth if isinstance(made, SmallVitOptions | TextTransformerOptions) else None
