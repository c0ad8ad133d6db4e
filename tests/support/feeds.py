"""Random inputs of graphs."""

from typing import Any

import numpy as np
import onnxruntime

from edge_client.work.steps import PIECE_ELEMENTS
from fedvit.program import SEEDS, Program
from fedvit.tensors import Tensors

NUMBERS: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


def make_random_feeds(session: onnxruntime.InferenceSession, program: Program, values: Tensors) -> dict[str, Any]:
    """Every input of a graph: tensors with their start values, all others random within their ranges."""
    rng = np.random.default_rng(0)
    limits = list_integer_limits(program)
    feeds: dict[str, Any] = {}
    for node in session.get_inputs():
        kind = NUMBERS[node.type]
        _, _, tensor = node.name.partition("/")
        if node.name.startswith(("tensor/", "anchor/")) and tensor in values:
            feeds[node.name] = values[tensor]
        elif node.name in ("batch/weight", "hyper/step", "hyper/last", "gathered/weight", "fact/class_counts"):
            feeds[node.name] = np.ones(node.shape, kind)
        elif np.issubdtype(kind, np.floating):
            # the graph of an update takes pieces of any length
            shape = [length if isinstance(length, int) else PIECE_ELEMENTS for length in node.shape]
            drawn = 0.02 * rng.standard_normal(shape)
            # slots hold squares of gradients, which are positive
            feeds[node.name] = np.asarray(np.abs(drawn) if node.name.startswith("slot/") else drawn, kind)
        else:
            low, high = limits.get(node.name, (0, 2))
            feeds[node.name] = np.sort(rng.integers(low, high, node.shape), axis=-1).astype(kind)
    return feeds


def list_integer_limits(program: Program) -> dict[str, tuple[int, int]]:
    """List [low, high) of the inputs that are whole numbers."""
    classes = (0, len(program.classes))
    limits = {"batch/labels": classes, "gathered/labels": classes, "batch/kept": (0, program.batch.patches)}
    limits["batch/seeds"] = (0, SEEDS)
    phases = (*program.train, *program.evaluate.adapt)
    return limits | {f"draw/{draw.name}": (draw.low, draw.high) for phase in phases for draw in phase.draws}
