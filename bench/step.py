"""`python -m bench step`: a training step on the devices' engine, compared with the same step in torch and timm."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from bench.cases import Case, encode_case
from bench.child import run_child
from bench.isa import restrict
from bench.machine import DEVICE_PACKAGES, TORCH_PACKAGES, count_installed_bytes, describe_machine
from bench.reporting import MEGA, Progress, Report
from fedvit.errors import FedvitError
from fedvit.kernels import EXTRA, find_library
from profiles.probes.host import usable_cores

PRODUCT_SIDE = 2048

Runs = dict[str, list[dict[str, Any]]]
"""JSON objects that the processes of "onnx", "torch" and "torch_bf16" printed."""


class StepSettings(Struct, frozen=True, kw_only=True):
    steps: int = 5  # in each process
    rounds: int = 3  # processes of each side, in turn
    kernels: bool = False  # one more side: onnx with the optional kernels
    isa: str | None = None  # one of bench.isa.ISAS, which all sides then see; None: what the processor has
    product_side: int = PRODUCT_SIDE


def run_step_bench(
    cases: Sequence[Case], settings: StepSettings, *, cache: Path | None = None, progress: Progress = lambda line: None
) -> Report:
    """Measure all sides of every case in turn, each in its own process on all cores.

    All cases are prepared first, so that a faulty case fails before anything is measured. Raises FedvitError when the
    kernels are not installed, when instructions cannot be hidden, and when a case cannot be prepared or run.
    """
    if settings.kernels and find_library() is None:
        raise FedvitError("FV0001", f"{EXTRA} is not installed, expected for --kernels: make kernels")
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        home, side = Path(folder), settings.product_side
        environment = restrict(settings.isa, home) if settings.isa else {}
        for case in cases:
            prepare_case(case, home / case.name, cache, progress, side)
        runs = [_run_sides(case, home / case.name, settings, environment, progress) for case in cases]

    def find_best(side: str, precision: str) -> float:
        return max(float(run["product_gflops"][precision]) for each in runs for run in each[side])

    products = {
        "side": settings.product_side,
        "onnx_gflops": find_best("onnx", "fp32"),
        "onnx_int8_gflops": find_best("onnx", "int8"),
        "torch_gflops": find_best("torch", "fp32"),
        "torch_bf16_gflops": find_best("torch_bf16", "bf16"),
    }
    sizes = {"onnx": count_installed_bytes(DEVICE_PACKAGES), "torch": count_installed_bytes(TORCH_PACKAGES)}
    results = [_summarize(case, each, products, sizes) for case, each in zip(cases, runs, strict=True)]
    return {
        "machine": describe_machine(), "isa": settings.isa, "steps": settings.steps, "rounds": settings.rounds,
        "products": products, "cases": results,
    }  # fmt: skip


def prepare_case(
    case: Case, folder: Path, cache: Path | None, progress: Progress, product_side: int = PRODUCT_SIDE
) -> None:
    """Run the server's part of a case in its own process. Raises FedvitError when it fails."""
    progress(f"{case.name}: preparing Program, graphs and tensors")
    run_child(
        "bench.prepare",
        encode_case(case),
        str(folder),
        str(product_side),
        str(cache or ""),
        what=f"{case.name}: preparing",
        on_line=lambda line: progress(f"{case.name}: {line}"),
    )


def _run_sides(
    case: Case, folder: Path, settings: StepSettings, environment: Mapping[str, str], progress: Progress
) -> Runs:
    steps, threads, side = str(settings.steps), str(usable_cores()), str(settings.product_side)
    commands = {
        "onnx": ("bench.onnx_side", str(folder), steps, threads, "plain"),
        "torch": ("bench.torch_side", encode_case(case), "fp32", steps, threads, side),
        "torch_bf16": ("bench.torch_side", encode_case(case), "bf16", steps, threads, side),
    }
    if settings.kernels:
        commands["onnx_kernels"] = ("bench.onnx_side", str(folder), steps, threads, "kernels")
    runs: Runs = {kind: [] for kind in commands}
    for number in range(settings.rounds):
        for kind, (module, *arguments) in commands.items():
            run = json.loads(run_child(module, *arguments, what=f"{case.name}: {kind}", environment=environment))
            runs[kind].append(run)
            progress(
                f"{case.name}: {kind} {number + 1}/{settings.rounds}: {run['step_s']:.3f} s a step, "
                f"peak {run['peak_rss_bytes'] / MEGA:.0f} MB"
            )
    return runs


def _summarize(case: Case, runs: Runs, products: dict[str, Any], sizes: dict[str, int]) -> Report:
    gflop = float(runs["onnx"][0]["gflop"])
    sides = {
        "onnx": _make_side(runs["onnx"], sizes["onnx"], gflop / products["onnx_gflops"]),
        "torch": _make_side(runs["torch"], sizes["torch"], gflop / products["torch_gflops"]),
        "torch_bf16": _make_side(runs["torch_bf16"], sizes["torch"], gflop / products["torch_bf16_gflops"]),
    }
    kernels = None
    if "onnx_kernels" in runs:
        kernels = _make_side(runs["onnx_kernels"], sizes["onnx"], gflop / products["onnx_gflops"])
    return {
        "name": case.name, "compute": case.compute, "batch_size": case.batch_size, "gflop": gflop, **sides,
        "ratio": _compare(sides["onnx"], sides), "kernels": kernels,
        "kernels_ratio": _compare(kernels, sides) if kernels else None,
    }  # fmt: skip


def _compare(onnx: Report, sides: dict[str, Report]) -> Report:
    """Ratios of onnx to torch: below 1, onnx is smaller."""
    torch = sides["torch"]
    return {
        "step": onnx["step_s"] / torch["step_s"],
        "step_bf16": onnx["step_s"] / sides["torch_bf16"]["step_s"],
        "peak_rss": onnx["peak_rss_bytes"] / torch["peak_rss_bytes"],
        "imports": onnx["import_s"] / torch["import_s"],
        "installed": onnx["installed_bytes"] / torch["installed_bytes"],
    }


def _make_side(runs: Sequence[dict[str, Any]], installed: int, floor_s: float) -> Report:
    """Medians over the processes of a side; of the peaks the highest."""
    times = [float(run["step_s"]) for run in runs]
    step_s = median(times)
    return {
        "step_s": step_s,
        "step_s_runs": times,
        "peak_rss_bytes": max(int(run["peak_rss_bytes"]) for run in runs),
        "import_s": median(float(run["import_s"]) for run in runs),
        "installed_bytes": installed,
        "gemm_floor_s": floor_s,
        "over_floor": step_s / floor_s,
    }
