"""Graphs that read another file, openly or in disguise."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from fedvit.protobuf import bytes_field, number_field


def make_model(location: str | None, *, where: str = "graph") -> bytes:
    """Make y = x + w, with w in another file if one is named: as an initializer, or inside of a node."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    if location is None:
        tensor.raw_data = np.arange(4, dtype=np.float32).tobytes()
    else:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    if where == "node":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [tensor] if where == "graph" else [])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model.SerializeToString()


def disguise(location: str) -> bytes:
    """Make the graph above with bit 32 set in the tags of the fields that name the file.

    onnxruntime's reader of protobuf drops that bit; read as a number it makes another field of them.
    """
    bare = onnx.ModelProto.FromString(make_model(location))
    [tensor] = bare.graph.initializer
    entries = [bytes_field(13 | 1 << 29, entry.SerializeToString()) for entry in tensor.external_data]
    for name in ("external_data", "data_location"):
        tensor.ClearField(name)
    weight = tensor.SerializeToString() + b"".join(entries) + number_field(14 | 1 << 29, TensorProto.EXTERNAL)
    del bare.graph.initializer[:]
    graph = bare.graph.SerializeToString() + bytes_field(5, weight)
    bare.ClearField("graph")
    whole: bytes = bare.SerializeToString() + bytes_field(7, graph)
    return whole
