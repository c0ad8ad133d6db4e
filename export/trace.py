"""A pure function of named tensors -> a plain inference ONNX graph with the same names.

The function may take gradients inside: it is traced with them, decomposed into core operators, and
written as ONNX nodes (export.lower). Weights, optimizer state and the batch are all inputs, so a graph is small,
holds no weights, and serves any number of devices.
"""

import hashlib
import json
import operator
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from onnx import helper
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from export import convolutions, graph, lower, operators, products, rules, transformers
from fedvit import precision
from fedvit.methods.step import Step
from fedvit.precision import Compute

OPSET = 20
IR_VERSION = 10
"""Version of ONNX files that onnxruntime 1.17 can read; written explicitly, as onnx's default moves ahead."""
INTEGERS_OPSET = 21
"""Operator set of graphs with integer products: its QuantizeLinear has a scale for each row of a matrix."""

_SOURCES = (convolutions, graph, lower, operators, precision, products, rules, transformers)
"""Modules that make a graph of a trace."""


@dataclass(frozen=True)
class Trace:
    """A function as a list of operators, before it becomes ONNX."""

    module: fx.GraphModule
    inputs: Mapping[str, Tensor]  # example values, in the order of the graph's inputs
    outputs: tuple[str, ...]
    any_length: int | None  # axes of this length may have any other
    compute: Compute  # see `export.lower.lower`

    @property
    def key(self) -> str:
        """The key of the content: operators, constants, names, shapes, libraries and the sources that make a graph."""
        content = hashlib.blake2b(digest_size=20)
        for source in (__file__, *(module.__file__ for module in _SOURCES)):
            assert source is not None
            content.update(Path(source).read_bytes())
        content.update(self.module.code.encode())
        content.update(rules.describe_packaged(node.target for node in self.module.graph.nodes if is_call(node)))
        for name, constant in sorted(self.module.named_buffers()):
            content.update(name.encode() + constant.detach().numpy().tobytes())
        described = {
            "inputs": [(name, list(value.shape), str(value.dtype)) for name, value in self.inputs.items()],
            "outputs": self.outputs,
            "any_length": self.any_length,
            "compute": self.compute,
            "opset": OPSET,
            "versions": {name: version(name) for name in ("torch", "onnx", "onnxruntime")},
        }
        content.update(json.dumps(described, sort_keys=True).encode())
        return content.hexdigest()


def is_call(node: fx.Node) -> bool:
    """Return whether a node calls an operator of torch."""
    return node.op == "call_function" and node.target is not operator.getitem


_one_at_a_time = threading.Lock()
"""torch's tracer has global state: two threads that trace at once corrupt each other's graphs."""


def trace(
    step: Step, inputs: Mapping[str, Tensor], *, any_length: int | None = None, compute: Compute = "fp32"
) -> Trace:
    """Record what `step` does with inputs of these names, shapes and dtypes.

    `compute`: see `export.lower.lower`. Where an elementwise function is meant for vectors of any length,
    `any_length` is that of the example's.
    """
    names = list(inputs)
    outputs: list[str] = []

    def flat(*values: Tensor) -> list[Tensor]:
        results = step(dict(zip(names, values, strict=True)))
        outputs[:] = results
        return list(results.values())

    examples = [value.clone() for value in inputs.values()]  # one tensor under two names would be taken for one input
    with _one_at_a_time:
        module = make_fx(flat, decomposition_table=_decompositions(), tracing_mode="fake")(*examples)
    return Trace(module, inputs, tuple(outputs), any_length, compute)


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Torch's decompositions, without those of operators that have an ONNX form, such as backward passes of norms."""
    return {name: rule for name, rule in core_aten_decompositions().items() if name not in rules.LOWERED}


def to_onnx(traced: Trace) -> bytes:
    """Export a trace. Raises Unsupported for an operator without ONNX form."""
    lowered = lower.lower(traced.module, traced.inputs, traced.outputs, compute=traced.compute)
    domains = {node.domain: 1 for node in lowered.node if node.domain}
    domains[""] = INTEGERS_OPSET if domains else OPSET
    opsets = [helper.make_opsetid(name, number) for name, number in sorted(domains.items())]
    model = helper.make_model(lowered, opset_imports=opsets, producer_name="fedvit")
    model.ir_version = IR_VERSION
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == traced.any_length:
                dim.dim_param = "length"
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content
