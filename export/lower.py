"""A traced function, operator by operator, as ONNX nodes: few, large, and with every shape known.

Torch's own exporter writes the backward pass of a transformer as hundreds of small operators, which takes
most of a minute. Here each operator of the trace has one function (export.operators and others), which appends to
a graph of views (export.graph).
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx

from export import convolutions, transformers  # noqa: F401 - they register their operators
from export.graph import DTYPES, GraphBuilder, Unsupported, Value
from export.operators import as_constant
from export.products import StepGraph
from export.rules import find_rule
from fedvit.precision import Compute


def lower(
    module: fx.GraphModule, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str], *, compute: Compute
) -> onnx.GraphProto:
    """The graph of a trace whose placeholders are `inputs`, in their order, and whose results are called `outputs`.

    `compute`: how to multiply by weights. "int8": by int8 weights as they are, the other operand rounded to int8 with a
    scale for each row; "fp16": both operands as float16.
    Raises Unsupported, naming the operator.
    """
    given = {name: Value(name, tuple(value.shape), value.dtype) for name, value in inputs.items()}
    graph = StepGraph(given, compute)
    found: dict[fx.Node, Any] = {}
    waiting = iter(given.values())

    def look_up(argument: Any) -> Any:
        return fx.node.map_arg(argument, lambda node: found[node])

    results: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(waiting)
        elif node.op == "get_attr":
            found[node] = as_constant(graph, getattr(module, node.target))
        elif node.op == "call_function":
            if node.target is operator.getitem:
                found[node] = found[node.args[0]][node.args[1]]
                continue
            rule = find_rule(node.target)
            if rule is None:
                raise Unsupported(
                    "FV1117",
                    f"operator {node.target} has no ONNX form here: add it, here or in a package",
                )
            found[node] = rule(graph, node, *look_up(node.args), **look_up(node.kwargs))
        else:
            results = [None if value is None else found[value] for value in node.args[0]]
    named = _outputs(graph, results, outputs)
    _drop_unused(graph, named)
    return helper.make_graph(
        _weights_last(graph, {value.name for value in given.values()}),
        "step",
        [helper.make_tensor_value_info(v.name, DTYPES[v.dtype], v.shape) for v in given.values()],
        [helper.make_tensor_value_info(name, DTYPES[v.dtype], v.shape) for name, v in named.items()],
        [*graph.constants.values()],
        value_info=[helper.make_tensor_value_info(v.name, DTYPES[v.dtype], v.shape) for v in graph.unknown],
    )


def _weights_last(graph: GraphBuilder, inputs: set[str]) -> list[onnx.NodeProto]:
    """The nodes, those first that follow from tensors of the Program alone, such as unpacked weights.

    onnxruntime works depth first and takes the operand whose node has the higher number before the others: of a
    product first the activations then, and a weight just before it is needed. The other way round it would begin with
    all weights of the model.
    """
    known = {name for name in inputs if name.startswith("tensor/")} | set(graph.constants)
    early: list[onnx.NodeProto] = []
    late: list[onnx.NodeProto] = []
    for node in graph.nodes.values():
        alone = known.issuperset(name for name in node.input if name)
        (early if alone else late).append(node)
        if alone:
            known.update(node.output)
    return early + late


def _outputs(graph: GraphBuilder, results: Sequence[Value], names: Sequence[str]) -> dict[str, Value]:
    """Give results their names; an input, a constant or a value that is named already gets a node of its own."""
    renamed: dict[str, str] = {}
    named: dict[str, Value] = {}
    plain = [graph.plain(value) for value in results]
    for name, source, value in zip(names, plain, results, strict=True):
        owner = next((node for node in graph.nodes.values() if source in node.output), None)
        if owner is None or source in renamed or owner.op_type in ("Reshape", "ConstantOfShape"):
            made = graph.nodes.get(graph.node("Identity", [source], value.shape)[0])
            assert made is not None
            made.output[0] = name
        else:
            renamed[source] = name
        named[name] = value
    for node in graph.nodes.values():
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    return named


def _drop_unused(graph: GraphBuilder, outputs: Mapping[str, Value]) -> None:
    """Remove nodes, node outputs and constants that nothing reads."""
    needed = set(outputs)
    for key, node in reversed([*graph.nodes.items()]):
        if not needed.intersection(node.output):
            del graph.nodes[key]
            continue
        while node.op_type == "LayerNormalization" and node.output[-1] not in needed:
            del node.output[-1]
        needed.update(node.input)
    graph.constants = {name: value for name, value in graph.constants.items() if name in needed}
