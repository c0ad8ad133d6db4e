"""The register of operators with an ONNX form, and facts of a trace's nodes that their rules read."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from export.graph import Shape

Rule = Callable[..., Any]
LOWERED: dict[Any, Rule] = {}


def lowers(*operators: Any) -> Callable[[Rule], Rule]:
    """Register the decorated rule for these operators."""

    def register(rule: Rule) -> Rule:
        LOWERED.update(dict.fromkeys(operators, rule))
        return rule

    return register


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
