"""Operations per second of a matrix product on this machine, by precision: a lower bound for the time of every step.

Measured after a step in the same process. Imports are inside functions, since each side has only its own libraries.
"""

import time
from collections.abc import Callable
from pathlib import Path

RUNS = 8
FILES = {"fp32": "product.onnx", "int8": "product-int8.onnx"}


def write_products(folder: Path, side: int) -> None:
    """Write graphs of one product of square matrices each; both are inputs, as the weights of a step are."""
    import onnx
    from onnx import helper

    floats, unsigned, signed = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, onnx.TensorProto.INT8
    one = helper.make_tensor("one", floats, [], [1.0])
    integers = helper.make_node("MatMulIntegerToFloat", ["a", "b", "one", "one"], ["y"], domain="com.microsoft")
    products = {
        "fp32": (helper.make_node("Gemm", ["a", "b"], ["y"]), floats, floats),
        "int8": (integers, unsigned, signed),
    }
    for precision, (node, left, right) in products.items():
        a, b, y = (
            helper.make_tensor_value_info(name, kind, [side, side])
            for name, kind in (("a", left), ("b", right), ("y", floats))
        )
        graph = helper.make_graph([node], "product", [a, b], [y], [one] if precision == "int8" else [])
        # not onnx's newest versions, which onnxruntime may not read yet
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        (folder / FILES[precision]).write_bytes(model.SerializeToString())


def measure_onnx_gflops(file: Path, threads: int) -> float:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    (side, _) = session.get_inputs()[0].shape
    rng = np.random.default_rng(0)
    kinds = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8}
    feeds = {one.name: rng.integers(0, 64, (side, side)).astype(kinds[one.type]) for one in session.get_inputs()}
    return _measure_best(lambda: session.run(None, feeds), side)


def measure_torch_gflops(side: int, precision: str) -> float:
    """fp32 or bf16, with the threads that torch was set to."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    a, b = torch.randn(side, side).to(kind), torch.randn(side, side).to(kind)
    return _measure_best(lambda: torch.mm(a, b), side)


def _measure_best(run: Callable[[], object], side: int) -> float:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(2 * side**3 / min(seconds) / 1e9)
