"""Laws of operators, on the call that each brings."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from edge_client.trust.operators import RULES
from export.rules import Operator, load_operator
from export.trace import Trace, is_call, to_onnx, trace
from export.verify import verify
from fedvit.errors import ExportMismatch
from fedvit.onnx_model import read_model
from fleet.contracts.laws import Law, fail, require


class _Example(NamedTuple):
    operator: Operator
    inputs: Mapping[str, Tensor]

    def call(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"result": self.operator.function(*inputs.values())}

    def trace(self) -> Trace:
        return trace(self.call, self.inputs)


def be_in_its_example(name: str) -> None:
    """The function of its example uses it."""
    used = sorted({str(node.target) for node in _load(name).trace().module.graph.nodes if is_call(node)})
    require(name in used, f"the function uses {', '.join(used) or 'no operator'}")


def agree_with_torch(name: str) -> None:
    """Its graph computes what torch computes."""
    example = _load(name)
    try:
        verify(to_onnx(example.trace()), example.call, example.inputs, f"operator {name}")
    except ExportMismatch as error:
        fail(str(error))


def use_what_devices_accept(name: str) -> None:
    """Its nodes are ones that devices accept: they refuse graphs with others."""
    kinds = {node.operator for node in read_model(to_onnx(_load(name).trace())).nodes}
    require(kinds <= RULES.keys(), f"devices refuse {', '.join(sorted(kinds - RULES.keys()))}")


LAWS: tuple[Law, ...] = (be_in_its_example, agree_with_torch, use_what_devices_accept)


def _load(name: str) -> _Example:
    operator = load_operator(name) or fail("no package declares it")
    return _Example(operator, {f"batch/{place}": value for place, value in enumerate(operator.arguments)})
