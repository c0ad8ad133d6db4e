"""Laws of operators refuse those that break them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import export.rules
import fleet.contracts.operators
from export.graph import Unsupported
from export.rules import LOWERED, Operator
from export.trace import to_onnx, trace
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.operators import LAWS, agree_with_torch, be_in_its_example, use_what_devices_accept
from tests.support.codes import has_code

NUMBERS = torch.linspace(-2, 2, 12).reshape(3, 4)


def lower_sides(graph: Any, node: Any, value: Any) -> Any:
    sides = graph.unary("Relu", value), graph.unary("Relu", graph.unary("Neg", value))
    return graph.binary("Add", *sides, value.shape, value.dtype)


def use(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any], function: Callable[[Tensor], Tensor]) -> None:
    """Let a package have the operator aten.abs."""

    def load_operator(name: str) -> Operator | None:
        return Operator(rule, function, (NUMBERS,)) if name == "aten.abs.default" else None

    for module in (export.rules, fleet.contracts.operators):
        monkeypatch.setattr(module, "load_operator", load_operator)


@pytest.mark.parametrize("law", LAWS)
def test_a_sound_operator_breaks_no_law(law: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lower_sides, torch.abs)
    assert find_break(law, "aten.abs.default") is None


@pytest.mark.parametrize(
    ("rule", "function", "law", "reason"),
    [
        (lower_sides, torch.neg, be_in_its_example, "the function uses aten.neg.default"),
        (lambda graph, node, value: graph.unary("Relu", value), torch.abs, agree_with_torch, "result"),
        (
            lambda graph, node, value: graph.unary("Abs", value),
            torch.abs,
            use_what_devices_accept,
            "devices refuse Abs",
        ),
    ],
)
def test_a_broken_operator_is_found(
    rule: Callable[..., Any],
    function: Callable[[Tensor], Tensor],
    law: Law,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, rule, function)
    found = find_break(law, "aten.abs.default")
    assert found is not None
    assert reason in found


def test_without_a_package_the_operator_is_missing() -> None:
    assert torch.ops.aten.abs.default not in LOWERED
    traced = trace(lambda inputs: {"result": inputs["x"].abs()}, {"x": NUMBERS})
    with pytest.raises(Unsupported, check=has_code("FV1117", "aten.abs.default")):
        to_onnx(traced)


def test_the_key_of_a_graph_covers_the_code_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = trace(lambda inputs: {"result": inputs["x"].abs()}, {"x": NUMBERS})
    plain = traced.key
    monkeypatch.setattr(export.rules, "describe_packaged", lambda _: b"acme 1.0")
    assert traced.key != plain
