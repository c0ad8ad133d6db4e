"""Measures the compute speed of this device in some seconds, with the operators of training.

Runs in a separate process, which releases onnxruntime's memory, and contains an illegal instruction.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from fedvit.engine import has_kernels, open_session
from fedvit.errors import DeviceTrouble
from fedvit.resources import ProductKind, ProductRate, Speed

GRAPHS = Path(__file__).parent / "graphs"
TRIALS = Path(__file__).parent / "trials"
"""Programs of whole training steps, for `edge-client certify`."""
PATIENCE_S = 60.0
"""The slowest board takes half of it; a service does not train before."""

PRODUCTS: tuple[tuple[ProductKind, int, int, int, int], ...] = (
    ("weights", 1, 200, 768, 3072),
    ("weights", 1, 200, 768, 768),
    ("weights", 1, 800, 384, 1152),
    ("weights", 1, 800, 768, 192),
    ("weights", 1, 800, 192, 768),
    ("weights", 1, 2000, 128, 256),
    ("gradient", 1, 768, 200, 768),
    ("gradient", 1, 1536, 200, 768),
    ("gradient", 1, 384, 800, 768),
    ("gradient", 1, 192, 1600, 768),
    ("gradient", 1, 128, 2000, 256),
    ("attention", 24, 197, 64, 197),
    ("attention", 24, 197, 197, 64),
    ("attention", 48, 50, 64, 50),
    ("attention", 256, 65, 16, 65),
    ("integers", 1, 200, 768, 3072),
    ("integers", 1, 200, 768, 768),
    ("halves", 1, 200, 768, 3072),
    ("halves", 1, 200, 768, 768),
)
"""Kind, batch, rows, inner, columns: sizes of Vision Transformers from 128 to 768 wide."""
ROWS, WIDTH = 800, 768
"""Shape of other operators' tensors: 2.5 MB, like an activation of some images."""
LEAST_RUNS, MOST_RUNS, ENOUGH_S = 4, 24, 0.12
"""Runs of one operator; the median counts, as for a step."""


class ProbeTooSlow(DeviceTrouble):
    """The probe was given up after PATIENCE_S."""


def find_trial_graph(digest: str, folder: Path = TRIALS) -> Path:
    """Return the file of a graph of TRIALS."""
    return folder / f"{digest.partition(':')[2]}.onnx"


def measure_speed(threads: int) -> Speed:
    """Measure with a number of threads.

    Raises DeviceTrouble, with a hint, if the engine does not work, and ProbeTooSlow after PATIENCE_S.
    """
    command = [sys.executable, "-P", "-m", "profiles.probes.speed", str(threads)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeTooSlow("FV1420", f"the speed probe was not done within {PATIENCE_S:.0f} s") from None
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        why = f"signal {-ended.returncode}" if ended.returncode < 0 else lines[-1] if lines else "no output"
        raise DeviceTrouble("FV1420", f"the speed probe failed: {why}; `edge-client doctor` looks for the cause")
    return msgspec.json.decode(ended.stdout, type=Speed)


def _measure(threads: int) -> Speed:
    load_per_core = os.getloadavg()[0] / (os.cpu_count() or 1)  # of the minute before: the probe itself is not in it
    rng = np.random.default_rng(0)
    products = []
    for kind, batch, rows, inner, columns in PRODUCTS:
        feeds = _operands(kind, batch, rows, inner, columns, rng)
        flops = 2 * batch * rows * inner * columns
        run_s = _run_s(kind, feeds, threads)
        if run_s is not None:
            products.append(ProductRate(kind, batch, rows, inner, columns, flops / run_s))
    chain_s = _run_s("chain", {"x": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}, threads)
    return Speed(
        threads=threads,
        products=tuple(products),
        bytes_per_s=_passes(rng, threads),
        node_s=(chain_s or 0.0) / CHAIN,
        load_per_core=load_per_core,
        kernels=has_kernels(),
    )


CHAIN = 200
"""Operators of the graph "chain" (profiles.probe_graphs)."""


def _operands(
    kind: ProductKind, batch: int, rows: int, inner: int, columns: int, rng: np.random.Generator
) -> dict[str, Any]:
    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    match kind:
        case "weights":
            return {"a": floats(rows, inner), "b": floats(columns, inner), "c": floats(columns)}
        case "gradient":
            return {"a": floats(inner, rows), "b": floats(inner, columns), "c": floats(rows, columns)}
        case "attention":
            return {"a": floats(batch, rows, inner), "b": floats(batch, inner, columns)}
        case "halves":
            return {"a": floats(rows, inner).astype(np.float16), "b": floats(inner, columns).astype(np.float16)}
    return {
        "a": rng.integers(0, 128, (rows, inner), np.uint8),
        "b": rng.integers(-64, 64, (inner, columns), np.int8),
        "s": np.array(0.1, np.float32),
        "t": floats(columns),
    }


def _passes(rng: np.random.Generator, threads: int) -> dict[str, float]:
    """Operators that are no products: bytes read and written in a second."""
    x = rng.standard_normal((ROWS // 4, 4, WIDTH), np.float32)
    vector = rng.standard_normal(WIDTH, np.float32)
    feeds: dict[str, dict[str, Any]] = {
        "Add": {"x": x, "b": x.copy()},
        "Transpose": {"x": x},
        "Softmax": {"x": x},
        "LayerNormalization": {"x": x, "s": vector, "b": vector},
        "Erf": {"x": x},
        "Exp": {"x": x},
        "Gelu": {"x": x},
        "ReduceMean": {"x": x},
        "Concat": {"x": x, "b": x.copy()},
        "DequantizeLinear": {
            "x": rng.integers(-127, 128, (ROWS, WIDTH), np.int8),
            "s": np.full(ROWS, 0.1, np.float32),
            "z": np.zeros(ROWS, np.int8),
        },
    }
    rates = {}
    for op, given in feeds.items():
        run_s = _run_s(op, given, threads)
        if run_s is not None:
            written = {"ReduceMean": 0, "Concat": 2 * x.nbytes}.get(op, x.nbytes)
            rates[op] = (sum(array.nbytes for array in given.values()) + written) / run_s
    return rates


def _run_s(name: str, feeds: Mapping[str, Any], threads: int) -> float | None:
    """Seconds of one run; None where this onnxruntime has not the operator."""
    try:
        session = open_session(GRAPHS / f"{name}.onnx", threads)
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions share no base of their own
        return None
    session.run(None, dict(feeds))  # allocates
    times: list[float] = []
    while len(times) < LEAST_RUNS or (len(times) < MOST_RUNS and sum(times) < ENOUGH_S):
        began = time.perf_counter()
        session.run(None, dict(feeds))
        times.append(time.perf_counter() - began)
    return median(times)


def main(arguments: Sequence[str]) -> None:
    """Argument: threads. Prints a Speed as JSON."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(_measure(int(arguments[0])))))


if __name__ == "__main__":
    main(sys.argv[1:])
