"""fp32 operations per second of a matrix product on this machine: a lower bound for the time of every step.

Measured after a step in the same process. Imports are inside functions, since each side has only its own libraries.
"""

import time
from collections.abc import Callable
from pathlib import Path

RUNS = 8
FILE = "product.onnx"


def write_product(file: Path, side: int) -> None:
    """Write a graph of one Gemm of square matrices; both are inputs, as the weights of a step are."""
    import onnx
    from onnx import helper

    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [side, side]) for name in ("a", "b", "y")]
    graph = helper.make_graph([helper.make_node("Gemm", ["a", "b"], ["y"])], "product", values[:2], values[2:])
    # not onnx's newest versions, which onnxruntime may not read yet
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    file.write_bytes(model.SerializeToString())


def onnx_gflops(file: Path, threads: int) -> float:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (side, _) = session.get_inputs()[0].shape
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((side, side), np.float32) for name in ("a", "b")}
    return _best(lambda: session.run(None, feeds), side)


def torch_gflops(side: int) -> float:
    """With the threads that torch was set to."""
    import torch

    a, b = torch.randn(side, side), torch.randn(side, side)
    return _best(lambda: torch.mm(a, b), side)


def _best(run: Callable[[], object], side: int) -> float:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(2 * side**3 / min(seconds) / 1e9)
