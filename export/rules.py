"""The register of operators with an ONNX form, and facts of a trace's nodes that their rules read.

An installed package adds operators that have none here by entry points (docs/plugins.md).
"""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from export.graph import Shape
from fedvit import plugins
from fedvit.plugins import package_of

Rule = Callable[..., Any]
LOWERED: dict[Any, Rule] = {}


class Operator(NamedTuple):
    """The rule of a package for an operator of torch, and a call of a function that uses it, for its contract."""

    rule: Rule
    function: Callable[..., Tensor]
    arguments: tuple[Tensor, ...]


def lowers(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the decorated rule for these operators."""

    def register(rule: Rule) -> Rule:
        LOWERED.update(dict.fromkeys(operators, rule))
        return rule

    return register


def find_rule(operator: Any) -> Rule | None:
    """Find the rule of an operator, here or in a package. Raises ConfigError if a package's cannot be used."""
    if operator in LOWERED:
        return LOWERED[operator]
    packaged = load_operator(str(operator))
    return packaged.rule if packaged else None


def load_operator(name: str) -> Operator | None:
    """Load a package's operator by torch's name, such as "aten.abs.default"; None if no package has it.

    Raises ConfigError if it cannot be used.
    """
    entry = plugins.find_entry(plugins.OPERATORS, name, set(map(str, LOWERED)))
    return plugins.load_object(plugins.OPERATORS, entry, Operator) if entry else None


def describe_packaged(operators: Iterable[Any]) -> bytes:
    """Describe the rules of packages for operators of a trace: their packages and files, for the key of a graph."""
    described = b""
    for name in sorted({str(operator) for operator in operators if operator not in LOWERED}):
        if (packaged := load_operator(name)) is not None:
            (entry,) = plugins.read_entries(plugins.OPERATORS)[name]
            described += f"{name} {package_of(entry)} {entry.dist and entry.dist.version}".encode()
            if file := inspect.getsourcefile(packaged.rule):
                described += Path(file).read_bytes()
    return described


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
