"""Bytes that the operators of a training step read and write."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import onnx

from bench.onnx_side import START
from fedvit.blobs import BlobStore
from fedvit.program import decode_program

FREE = {"Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators whose output is their input's memory."""


def count_moved_bytes(folder: Path) -> int:
    """Count the bytes of one step of a case that `bench.prepare` wrote, if no operators are fused.

    An optimizer's update reads and writes each trained number and slot, and reads the gradient.
    """
    blobs = BlobStore(folder)
    program = decode_program(blobs.get(json.loads((folder / START).read_text())["program"]))
    [phase] = program.train
    batch, moved = program.batch, sum(_list_moves(blobs.get(program.graphs[phase.graph].digest)))
    if not phase.update:
        return moved
    trained = sum(math.prod(program.tensors[name].shape) for group in phase.groups for name in program.names(group))
    return moved * -(-batch.batch_size // batch.run_size) + 4 * trained * (3 + 2 * len(phase.slots))


def _list_moves(content: bytes) -> Iterator[int]:
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(content)).graph
    sizes = {one.name: len(one.raw_data) for one in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        form = value.type.tensor_type
        width = onnx.helper.tensor_dtype_to_np_dtype(form.elem_type).itemsize
        sizes[value.name] = width * math.prod(dim.dim_value for dim in form.shape.dim)
    for node in graph.node:
        if node.op_type not in FREE:
            yield sum(sizes[name] for name in {*node.input, *node.output} - {""})
