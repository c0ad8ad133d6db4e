"""One measured process: a graph under onnxruntime's own profiler. Prints one JSON object."""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from bench.onnx_side import START, start_values
from edge_client.work.steps import PIECE_ELEMENTS
from fedvit.blobs import BlobStore
from fedvit.engine import open_session
from fedvit.errors import ConfigError
from fedvit.program import SEEDS, Program, decode_program
from fedvit.tensors import Tensors
from profiles.probes.host import peak_rss_bytes

NUMBERS: dict[str, Any] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(int64)": np.int64,
    "tensor(int32)": np.int32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8, "tensor(bool)": np.bool_,
}  # fmt: skip


def main() -> None:
    """Arguments: the prepared folder, the graph's name, runs, threads."""
    folder, name, runs, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    start = json.loads((folder / START).read_text())
    blobs = BlobStore(folder)
    program = decode_program(blobs.get(start["program"]))
    if name not in program.graphs:
        raise ConfigError("FV0002", f"there is no graph {name!r}, the program has {', '.join(program.graphs)}")
    graph = blobs.path(program.graphs[name].digest)
    began = time.perf_counter()
    session = open_session(graph, threads, profile=folder / "profile")
    load_s = time.perf_counter() - began
    feeds = make_random_feeds(session, program, start_values(program, start["groups"], blobs))
    times = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - began)
    nodes = list_node_events(json.loads(Path(session.end_profiling()).read_text()), runs + 1)
    measured = {
        "load_s": load_s,
        "run_s": sorted(times[1:])[runs // 2],
        "peak_rss_bytes": peak_rss_bytes(),
        "graph_bytes": graph.stat().st_size,
        "nodes": nodes,
    }
    sys.stdout.write(json.dumps(measured) + "\n")


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


def list_node_events(profile: list[dict[str, Any]], runs: int) -> list[dict[str, Any]]:
    """List the profiler's events of all nodes in all runs but the first: type, microseconds, FLOPs of a product."""
    events = [event for event in profile if event.get("cat") == "Node" and event["name"].endswith("kernel_time")]
    events.sort(key=lambda event: event["ts"])
    counted = events[len(events) // runs :]
    return [
        {"op": event["args"]["op_name"], "us": event["dur"], "flops": count_product_flops(event["args"])}
        for event in counted
    ]


def count_product_flops(args: Mapping[str, Any]) -> int:
    """Count the FLOPs of a matrix product, 2 per multiply-add, by the shapes in the profile; 0 for other operators.

    The inner length follows from the left operand's size, whether or not it is transposed.

    >>> shapes = {"input_type_shape": [{"float": [2, 3]}, {"float": [3, 5]}], "output_type_shape": [{"float": [2, 5]}]}
    >>> count_product_flops({"op_name": "Gemm", **shapes}), count_product_flops({"op_name": "Add", **shapes})
    (60, 0)
    """
    if not any(word in args["op_name"] for word in ("Gemm", "MatMul")):
        return 0
    shapes: list[list[int]] = [next(iter(args[side][0].values())) for side in ("input_type_shape", "output_type_shape")]
    left, out = shapes
    if len(left) < 2 or len(out) < 2:
        return 2 * math.prod(out) * left[-1]
    return 2 * math.prod(out) * (math.prod(left[-2:]) // out[-2])


if __name__ == "__main__":
    main()
