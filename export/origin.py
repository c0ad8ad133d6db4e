"""The key of a graph's inputs, by which a known graph is found without tracing.

Everything is in it that tracing could look at: this project's sources, versions of libraries, the method's options and
every attribute of the model's modules; of tensors that a method is given as inputs the shapes. What is not understood
makes no key, and neither does code of other packages, which may call more code: the graph is then traced, as it would
be without.
"""

import enum
import functools
import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

import export
import fedvit
from fedvit import plugins
from fedvit.methods.base import Method
from fedvit.models.vit import PatchViT
from fedvit.program import Batch

LIBRARIES = ("torch", "timm", "onnx", "onnxruntime", "numpy", "msgspec")
OURS = (fedvit, export)


class _Unknown(Exception):
    """A graph may depend on this value in an unknown way."""


def origin_of(method: Method, vit: PatchViT, batch: Batch, graph: str) -> str | None:
    """The key of one of the method's graphs; None where it has no key."""
    if plugins.read_entries(plugins.OPERATORS):  # their code may be in the graph
        return None
    try:
        described = [_describe(value) for value in (method.as_traced(), vit, batch, graph)]
    except _Unknown:
        return None
    content = hashlib.blake2b(_surroundings(), digest_size=20)
    content.update(json.dumps(described, sort_keys=True).encode())
    return content.hexdigest()


@functools.cache
def _surroundings() -> bytes:
    content = hashlib.blake2b(digest_size=20)
    for package in OURS:
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            content.update(source.name.encode() + source.read_bytes())
    content.update(json.dumps({name: version(name) for name in LIBRARIES}).encode())
    return content.digest()


def _describe(value: object) -> Any:
    """Describe a value as JSON. Raises _Unknown."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case torch.dtype() | torch.device() | msgspec.UnsetType():
            return str(value)
        case nn.Module():
            return _module(value)
        case Tensor():
            return [list(value.shape), str(value.dtype), _bytes(value)]
        case np.ndarray() | np.generic():
            return [list(value.shape), str(value.dtype), value.tobytes().hex()]
        case enum.Enum():
            return [_code(type(value)), value.name]
        case functools.partial():
            return [_code(value.func), _describe(value.args), _describe(value.keywords)]
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            return _code(value)
        case tuple() | list():
            return [_code(type(value)), *map(_describe, value)]
        case set() | frozenset():
            return [_code(type(value)), *sorted(json.dumps(_describe(one)) for one in value)]
        case Mapping():
            return [_code(type(value)), *([_describe(key), _describe(one)] for key, one in value.items())]
        case msgspec.Struct():
            return [_code(type(value)), {name: _describe(getattr(value, name)) for name in value.__struct_fields__}]
    if is_dataclass(value):
        return [_code(type(value)), {one.name: _describe(getattr(value, one.name)) for one in fields(value)}]
    raise _Unknown


def _module(module: nn.Module) -> Any:
    """Describe the attributes of a module and its parts; parameters are inputs of a graph, buffers are constants."""
    attributes = dict(vars(module))
    parameters = attributes.pop("_parameters")
    attributes.pop("seed", None)  # of a model: only first values follow from it, which are inputs
    return [
        _code(type(module)),
        {name: [list(one.shape), str(one.dtype)] if one is not None else None for name, one in parameters.items()},
        {name: _describe(one) for name, one in attributes.items()},
    ]


def _bytes(value: Tensor) -> str:
    if value.device.type != "cpu":
        raise _Unknown
    return hashlib.blake2b(value.detach().contiguous().numpy().tobytes(), digest_size=20).hexdigest()


def _code(of: Any) -> Any:
    """A class or a function by name: the sources of this project and the versions of libraries are in every key."""
    module, name = getattr(of, "__module__", None), getattr(of, "__qualname__", None)
    if module is None or name is None or "<" in name:  # what a function made depends on what that was given
        raise _Unknown
    if not _is_standard(module):
        raise _Unknown
    return [module, name]


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in {
        "builtins",
        "collections",
        "functools",
        "typing",
        "fedvit",
        "export",
        *LIBRARIES,
    }
