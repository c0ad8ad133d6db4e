"""A pure function of named tensors -> a plain inference ONNX graph with the same names.

The function may take gradients inside: it is traced with them, decomposed into core operators, and
exported by torch's exporter. Weights, optimizer state and the batch are all inputs, so a graph is small,
holds no weights, and serves any number of devices.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fedvit.methods.step import Step

OPSET = 20
IR_VERSION = 10
"""What an onnxruntime of 1.17 or newer can read; written explicitly because onnx's default moves ahead."""
LARGE_BYTES = 1024


@dataclass(frozen=True)
class Trace:
    """A function as a list of operators, before it becomes ONNX."""

    module: fx.GraphModule
    inputs: Mapping[str, Tensor]  # example values, in the order of the graph's inputs
    outputs: tuple[str, ...]

    @property
    def key(self) -> str:
        """Names the content: equal exactly when operators, constants, names, shapes, libraries and this file are."""
        content = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=20)
        content.update(self.module.code.encode())
        for name, constant in sorted(self.module.named_buffers()):
            content.update(name.encode() + constant.detach().numpy().tobytes())
        described = {
            "inputs": [(name, list(value.shape), str(value.dtype)) for name, value in self.inputs.items()],
            "outputs": self.outputs,
            "opset": OPSET,
            "versions": {name: version(name) for name in ("torch", "onnx", "onnxscript", "onnxruntime")},
        }
        content.update(json.dumps(described, sort_keys=True).encode())
        return content.hexdigest()


def trace(step: Step, inputs: Mapping[str, Tensor]) -> Trace:
    """Record what `step` does with inputs of these names, shapes and dtypes."""
    names = list(inputs)
    outputs: list[str] = []

    def flat(*values: Tensor) -> list[Tensor]:
        results = step(dict(zip(names, values, strict=True)))
        outputs[:] = results
        return list(results.values())

    table = dict(core_aten_decompositions().items())
    module = make_fx(flat, decomposition_table=table, tracing_mode="fake")(*inputs.values())
    return Trace(module, inputs, tuple(outputs))


class _Flat(nn.Module):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: Tensor) -> list[Tensor]:
        results: list[Tensor] = self.module(*values)
        return results


def to_onnx(traced: Trace) -> bytes:
    """Export a trace; takes seconds to a minute."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's notes on its own internals
        program = torch.onnx.export(
            _Flat(traced.module).eval(), tuple(traced.inputs.values()), dynamo=True, verbose=False, opset_version=OPSET
        )
    assert program is not None  # only the old exporter, which writes a file, returns None
    model = program.model_proto
    _rename(model, list(traced.inputs), list(traced.outputs))
    _shrink_constants(model.graph)
    model.ir_version = IR_VERSION
    model.doc_string = ""
    for node in model.graph.node:  # stack traces and module paths of the exporter: larger than the graph
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    del model.graph.value_info[:]
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _shrink_constants(graph: onnx.GraphProto) -> None:
    """Make nodes of constants that repeat one number: the exporter writes out zeros as large as the activations."""
    nodes = list(graph.node)
    for tensor in list(graph.initializer):
        value = numpy_helper.to_array(tensor)
        if value.nbytes <= LARGE_BYTES or not (value == value.flat[0]).all():
            continue
        shape = numpy_helper.from_array(np.array(value.shape, np.int64), f"{tensor.name}/shape")
        number = numpy_helper.from_array(value.reshape(-1)[:1])
        nodes.insert(0, onnx.helper.make_node("ConstantOfShape", [shape.name], [tensor.name], value=number))
        graph.initializer.remove(tensor)
        graph.initializer.append(shape)
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(model: onnx.ModelProto, inputs: list[str], outputs: list[str]) -> None:
    """Give the graph's inputs and outputs our names."""
    graph = model.graph
    if len(graph.input) != len(inputs) or len(graph.output) != len(outputs):
        raise RuntimeError(
            f"the exporter made {len(graph.input)} inputs and {len(graph.output)} outputs "
            f"of {len(inputs)} and {len(outputs)}"
        )
    renamed = {old.name: new for old, new in zip(graph.input, inputs, strict=True)}
    # an output that is an input or is named twice needs a node of its own
    taken: set[str] = set(renamed)
    for output, new in zip(graph.output, outputs, strict=True):
        if output.name in taken:
            graph.node.append(onnx.helper.make_node("Identity", [renamed.get(output.name, output.name)], [new]))
        else:
            renamed[output.name] = new
            taken.add(output.name)
        output.name = new
    for value in graph.input:
        value.name = renamed[value.name]
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
