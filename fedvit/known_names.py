"""Valid names for a run's configuration, read from source files, so that typos are found without importing torch.

The tables themselves are in `fedvit.methods` and `fedvit.models`, and in timm; nothing is written down a second time.
Methods of other installed packages are read from what these declare.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

from fedvit import plugins
from fedvit.choices import did_you_mean, suggest_names
from fedvit.errors import ConfigError
from fedvit.model_options import CNN, LSTM, OWN_MODELS, RESNET, SMALL, TEXT, option_names

TIMM_OPTIONS = ("image_size", "patch_size")
HUB, LOCAL = "hf-hub:", "local-dir:"
"""Prefixes of timm's model names outside of its own list: the hub of weights, and a folder with a `config.json`."""

_FOLDER = Path(__file__).parent / "methods"


def check_names(
    method: str, options: Iterable[str] = (), model: str = SMALL, model_options: Iterable[str] = ()
) -> None:
    """Raises ConfigError for an unknown method, model, or option."""
    check_method(method, plugins.list_names(plugins.METHODS, method_classes()))
    if not is_packaged(method) and options:  # the options of a package's method are known once it is imported
        check_options(method, options, method_options(method))
    check_model(model)
    check_model_options(model, model_options)


# --- methods ------------------------------------------------------------------------------------------


def check_method(name: str, known: Iterable[str]) -> None:
    """Raises ConfigError when the name is not a known one."""
    if name not in set(known):
        raise ConfigError("FV1101", f"unknown method {name!r}{suggest_names(name, sorted(known))}")


def check_options(method: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError when the method lacks one of the options `given`."""
    known = list(known)
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            "FV1101", f"method {method!r} has no option {unknown[0]!r}{suggest_names(unknown[0], known, 'it has')}"
        )


@cache
def method_classes() -> Mapping[str, str]:
    """Method of fedvit itself -> its class, as the table METHODS of `fedvit.methods` has them."""
    for node in ast.parse((_FOLDER / "__init__.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "METHODS":
            assert isinstance(node.value, ast.Dict)
            return {
                key.value: value.id
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Name)
            }
    raise AssertionError("fedvit.methods has no table METHODS")


def is_packaged(method: str) -> bool:
    """Return whether an installed package declares a method. Raises ConfigError when another one has it, too."""
    return plugins.find_entry(plugins.METHODS, method, method_classes()) is not None


def method_options(method: str) -> tuple[str, ...]:
    """Return the options of a method of fedvit itself: the fields of its class and of the classes that it extends."""
    return tuple(option_annotations(method))


class Annotation(NamedTuple):
    type: ast.expr
    file: Path  # in which it is written


@cache
def option_annotations(method: str) -> Mapping[str, Annotation]:
    """Return the types of the options of a method of fedvit itself, as its source has them."""
    return _annotations(method_classes()[method])


def _annotations(kind: str) -> dict[str, Annotation]:
    if (place := _find_class(kind)) is None:  # ABC, and other classes without options
        return {}
    written, file = place
    found: dict[str, Annotation] = {}
    for base in written.bases:
        found |= _annotations(ast.unparse(base))
    for node in written.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and not ast.unparse(node.annotation).startswith("ClassVar")
        ):
            found[node.target.id] = Annotation(node.annotation, file)
    return found


@cache
def _find_class(name: str) -> tuple[ast.ClassDef, Path] | None:
    """Return a class in the files of the methods, and its file; None: it is in none of them. Parses only its file."""
    for file, source in _read_sources().items():
        if re.search(rf"^class {re.escape(name)}\b", source, re.MULTILINE):
            nodes = ast.parse(source).body
            return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), file
    return None


@cache
def _read_sources() -> dict[Path, str]:
    """Return the text of every file of the methods."""
    return {file: file.read_text() for file in sorted(_FOLDER.glob("*.py"))}


# --- models -------------------------------------------------------------------------------------------


def check_model(name: str) -> None:
    """Raises ConfigError for an unknown model; timm's tags, as in `name.augreg_in21k`, are not read.

    Whether the hub of weights has a model is not asked here.
    """
    if name in OWN_MODELS or find_packaged_model(name):
        return
    if name.startswith(LOCAL):
        file = Path(name.removeprefix(LOCAL)) / "config.json"
        if not file.is_file():
            raise ConfigError(
                "FV1106", f"model {name!r}: its file {file}, in which timm describes a model, does not exist"
            )
        return
    if name.startswith(HUB):
        if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name.removeprefix(HUB)) is None:
            raise ConfigError("FV1106", f"model {name!r}: expected {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION")
        return
    plain = name.partition(".")[0].removeprefix("timm/")
    if not _is_in_timm(plain):
        known = [
            *plugins.list_names(plugins.MODELS, OWN_MODELS),
            *re.findall(r"^@register_model\s+def (\w+)\(", _timm_sources(), re.MULTILINE),
        ]
        raise unknown_model(name, known)


def find_packaged_model(name: str) -> EntryPoint | None:
    """Find the place that an installed package declares for a model; None if it is not a package's.

    Raises ConfigError if fedvit, timm or another package has a model of that name, too.
    """
    entry = plugins.find_entry(plugins.MODELS, name, OWN_MODELS)
    if entry is not None and re.search(rf"^def {re.escape(name)}\(", _timm_sources(), re.MULTILINE):
        plugins.refuse(plugins.MODELS, entry, "has the name of a model of timm; rename the entry point")
    return entry


@cache
def _is_in_timm(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", _timm_sources()) is not None


@cache
def timm_arguments(model: str) -> Mapping[str, int]:
    """Return the whole numbers with which timm makes a plain ViT, such as `patch_size` and `depth`.

    Empty for a model that timm makes in another way.
    """
    plain = re.escape(model.partition(".")[0].removeprefix("timm/"))
    function = rf"^def {plain}\(.*?-> VisionTransformer:\n.*?(?=^\S|\Z)"
    written = re.search(function, _timm_sources(), re.MULTILINE | re.DOTALL)
    calls = [
        node.value
        for node in (ast.walk(ast.parse(written[0])) if written else ())
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    ]
    return {
        argument.arg: argument.value.value
        for call in calls
        if ast.unparse(call.func) == "dict"
        for argument in call.keywords
        if argument.arg and isinstance(argument.value, ast.Constant) and isinstance(argument.value.value, int)
    }


def unknown_model(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        "FV1105",
        f"unknown model {name!r}: none of {SMALL}, {RESNET}, {CNN}, {TEXT}, {LSTM}, and no name that timm knows"
        f"{did_you_mean(name, known)}",
    )


def check_model_options(model: str, given: Iterable[str]) -> None:
    """Raises ConfigError when one of the options `given` is not one of the model's."""
    if find_packaged_model(model):  # its options are known once it is imported
        return
    check_option_names(model, given, option_names(model) if model in OWN_MODELS else TIMM_OPTIONS)


def check_option_names(model: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raises ConfigError when one of the options `given` is not one of those that the model has."""
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            "FV1105", f"model {model!r} has no option {unknown[0]!r}{suggest_names(unknown[0], known, 'it has')}"
        )


@cache
def _timm_sources() -> str:
    """The text of timm's models: each registers itself in the file that it is written in."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ConfigError("FV1107", "timm is not installed here: pip install 'fedvit[server]'")
    folder = Path(spec.origin).parent / "models"
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("*.py")))
