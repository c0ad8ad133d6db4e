"""`python -m bench step`: a training step on devices' engine, compared with the same step in torch and timm, in float32
and with bfloat16 autocast."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.cases import Case, encode_case
from bench.child import run_child
from bench.machine import DEVICE_PACKAGES, TORCH_PACKAGES, Machine, installed_bytes, this_machine
from fedvit.errors import FedvitError
from fedvit.kernels import EXTRA, find_library
from profiles.probes.host import usable_cores

PRODUCT_SIDE = 2048
MEGA = 1e6

Progress = Callable[[str], None]


class Side(Struct, frozen=True, kw_only=True):
    """One side of a case: medians over its processes, but for the peak, which is the highest."""

    step_s: float  # median over processes of the median over a process's steps
    step_s_runs: tuple[float, ...]  # one process each
    peak_rss_bytes: int
    import_s: float
    installed_bytes: int
    gemm_floor_s: float  # the step's products alone, at the best rate of this side's own product
    over_floor: float  # step_s / gemm_floor_s


class Ratio(Struct, frozen=True, kw_only=True):
    """onnx divided by torch in float32, if nothing else is said: below 1, onnx is smaller."""

    step: float
    step_bf16: float  # by torch with bfloat16 autocast
    peak_rss: float
    imports: float
    installed: float


class CaseResult(Struct, frozen=True, kw_only=True):
    name: str
    compute: str  # of products with weights: fp32 or int8
    batch_size: int
    gflop: float  # of one step, forward and backward, counted on the device's graph
    onnx: Side
    torch: Side
    torch_bf16: Side
    ratio: Ratio
    kernels: Side | None  # onnx with the optional kernels, if they were asked for
    kernels_ratio: Ratio | None  # of these


class ProductRates(Struct, frozen=True, kw_only=True):
    """Best rates of one large square product, in 1e9 operations a second; float32 if nothing else is said."""

    side: int
    onnx_gflops: float
    onnx_int8_gflops: float
    torch_gflops: float
    torch_bf16_gflops: float


class StepReport(Struct, frozen=True, kw_only=True):
    machine: Machine
    steps: int  # in each process
    rounds: int  # processes of each side
    products: ProductRates
    cases: list[CaseResult]


def run_step_bench(
    cases: Sequence[Case],
    *,
    steps: int = 5,
    rounds: int = 3,
    kernels: bool = False,
    product_side: int = PRODUCT_SIDE,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
) -> StepReport:
    """Measure all sides of every case in turn, `rounds` times, each in its own process on all cores.

    All cases are prepared first, so that a faulty case fails before anything is measured. With `kernels` there is one
    side more, onnx with the optional kernels. Raises FedvitError when these are not installed, and when a case cannot
    be prepared or run.
    """
    if kernels and find_library() is None:
        raise FedvitError(f"{EXTRA} is not installed, expected for --kernels: make kernels")
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
        home = Path(made)
        for case in cases:
            prepare_case(case, home / case.name, cache, progress, product_side)
        measured = [_measure(case, home / case.name, steps, rounds, kernels, product_side, progress) for case in cases]

    def best(side: str, precision: str) -> float:
        return max(float(run["product_gflops"][precision]) for runs in measured for run in runs[side])

    products = ProductRates(
        side=product_side,
        onnx_gflops=best("onnx", "fp32"),
        onnx_int8_gflops=best("onnx", "int8"),
        torch_gflops=best("torch", "fp32"),
        torch_bf16_gflops=best("torch_bf16", "bf16"),
    )
    sizes = installed_bytes(DEVICE_PACKAGES), installed_bytes(TORCH_PACKAGES)
    results = [_result(case, runs, products, *sizes) for case, runs in zip(cases, measured, strict=True)]
    return StepReport(machine=machine, steps=steps, rounds=rounds, products=products, cases=results)


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


Runs = dict[str, list[dict[str, Any]]]
"""The JSON objects that the processes of "onnx", "torch" and "torch_bf16" printed."""


def _measure(
    case: Case, folder: Path, steps: int, rounds: int, kernels: bool, product_side: int, progress: Progress
) -> Runs:
    threads = usable_cores()
    commands = {
        "onnx": ("bench.onnx_side", str(folder), str(steps), str(threads), "plain"),
        "torch": ("bench.torch_side", encode_case(case), "fp32", str(steps), str(threads), str(product_side)),
        "torch_bf16": ("bench.torch_side", encode_case(case), "bf16", str(steps), str(threads), str(product_side)),
    }
    if kernels:
        commands["onnx_kernels"] = ("bench.onnx_side", str(folder), str(steps), str(threads), "kernels")
    runs: Runs = {kind: [] for kind in commands}
    for number in range(rounds):
        for kind, (module, *arguments) in commands.items():
            run = json.loads(run_child(module, *arguments, what=f"{case.name}: {kind}"))
            runs[kind].append(run)
            progress(
                f"{case.name}: {kind} {number + 1}/{rounds}: {run['step_s']:.3f} s a step, "
                f"peak {run['peak_rss_bytes'] / MEGA:.0f} MB"
            )
    return runs


def _result(case: Case, runs: Runs, products: ProductRates, ours_bytes: int, torch_bytes: int) -> CaseResult:
    gflop = float(runs["onnx"][0]["gflop"])
    onnx = _side(runs["onnx"], ours_bytes, gflop / products.onnx_gflops)
    torch = _side(runs["torch"], torch_bytes, gflop / products.torch_gflops)
    torch_bf16 = _side(runs["torch_bf16"], torch_bytes, gflop / products.torch_bf16_gflops)
    kernels = _side(runs["onnx_kernels"], ours_bytes, gflop / products.onnx_gflops) if "onnx_kernels" in runs else None
    return CaseResult(
        name=case.name,
        compute=case.compute,
        batch_size=case.batch_size,
        gflop=gflop,
        onnx=onnx,
        torch=torch,
        torch_bf16=torch_bf16,
        ratio=_ratio(onnx, torch, torch_bf16),
        kernels=kernels,
        kernels_ratio=_ratio(kernels, torch, torch_bf16) if kernels else None,
    )


def _ratio(onnx: Side, torch: Side, torch_bf16: Side) -> Ratio:
    return Ratio(
        step=onnx.step_s / torch.step_s,
        step_bf16=onnx.step_s / torch_bf16.step_s,
        peak_rss=onnx.peak_rss_bytes / torch.peak_rss_bytes,
        imports=onnx.import_s / torch.import_s,
        installed=onnx.installed_bytes / torch.installed_bytes,
    )


def _side(runs: Sequence[dict[str, Any]], installed: int, floor_s: float) -> Side:
    times = tuple(float(run["step_s"]) for run in runs)
    step_s = median(times)
    return Side(
        step_s=step_s,
        step_s_runs=times,
        peak_rss_bytes=max(int(run["peak_rss_bytes"]) for run in runs),
        import_s=median(float(run["import_s"]) for run in runs),
        installed_bytes=installed,
        gemm_floor_s=floor_s,
        over_floor=step_s / floor_s,
    )


# --- for a terminal -----------------------------------------------------------------------------------


def step_report(report: StepReport) -> RenderableType:
    machine, products = report.machine, report.products
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    notes = (
        f"{machine.cpu} ({' '.join(machine.instructions)}), {machine.cores} cores, all in use; {versions}",
        f"medians of {report.rounds} processes of {report.steps} steps a side; GEMM: onnxruntime "
        f"{products.onnx_gflops:.0f}, int8 {products.onnx_int8_gflops:.0f}, torch {products.torch_gflops:.0f}, "
        f"bfloat16 {products.torch_bf16_gflops:.0f} GFLOP/s",
    )
    return Group(_table(report.cases), *(Text(note, style="dim") for note in notes))


def _table(results: Sequence[CaseResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("case", "side", "step s", "GEMM s", "x GEMM", "peak MB", "import", "disk MB"):
        table.add_column(heading, justify="left" if heading in ("case", "side") else "right", no_wrap=True)
    for result in results:
        table.add_row(result.name, f"onnx {result.compute}", *_cells(result.onnx))
        table.add_row(Text(f"  {result.gflop:.0f} GFLOP", style="dim"), "torch", *_cells(result.torch))
        table.add_row("", "torch bf16", *_cells(result.torch_bf16))
        _add_ratio(table, "", result.ratio)
        if result.kernels and result.kernels_ratio:
            table.add_row("", "onnx kernels", *_cells(result.kernels))
            _add_ratio(table, "of kernels", result.kernels_ratio)
    return table


def _add_ratio(table: Table, of: str, ratio: Ratio) -> None:
    shares = (ratio.step, None, None, ratio.peak_rss, ratio.imports, ratio.installed)
    cells = ["" if share is None else f"{share:.3f}" for share in shares]
    table.add_row(of, "ratio", *(Text(cell, style="bold") for cell in cells))
    table.add_row(of, "to bf16", Text(f"{ratio.step_bf16:.3f}", style="bold"), end_section=True)


def _cells(side: Side) -> tuple[str, ...]:
    return (
        f"{side.step_s:.3f}",
        f"{side.gemm_floor_s:.3f}",
        f"{side.over_floor:.2f}",
        f"{side.peak_rss_bytes / MEGA:.0f}",
        f"{side.import_s:.2f}",
        f"{side.installed_bytes / MEGA:.0f}",
    )
