"""Operations per second of a matrix product on this machine, by precision: a lower bound for the time of every step.

Measured after a step in the same process.
"""

import time
from collections.abc import Callable

RUNS = 8
FILES = {"fp32": "product.onnx", "int8": "product-int8.onnx"}


def measure_gflops(run: Callable[[], object], side: int) -> float:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return float(2 * side**3 / min(seconds) / 1e9)
