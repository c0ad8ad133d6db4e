"""`python -m bench graph`: the time of a case's graph by operator."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.cases import Case
from bench.child import run_child
from bench.machine import Machine, this_machine
from bench.step import MEGA, prepare_case

SHOWN = 25


class OperatorCost(Struct, frozen=True, kw_only=True):
    """All nodes of one type in one run of the graph."""

    op: str
    nodes: int
    ms: float
    share: float  # of the time of all nodes
    gflop: float | None  # of matrix products; None for other types
    gflops: float | None  # 1e9 operations a second


class GraphResult(Struct, frozen=True, kw_only=True):
    name: str
    graph: str
    nodes: int
    run_s: float  # median, under the profiler
    load_s: float  # onnxruntime reads, optimises and plans the graph
    graph_bytes: int
    peak_rss_bytes: int
    gflop: float
    operators: list[OperatorCost]  # the costliest first


class GraphReport(Struct, frozen=True, kw_only=True):
    machine: Machine
    runs: int
    cases: list[GraphResult]


def run_graph_bench(
    cases: Sequence[Case],
    graph: str = "train",
    *,
    runs: int = 3,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> GraphReport:
    """Profile one graph of each case, in its own process on all cores.

    Raises FedvitError when a case cannot be prepared, or has no graph of this name.
    """
    machine = this_machine()
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as made:
            prepare_case(case, Path(made), cache, progress)
            progress(f"{case.name}: {runs} runs of graph {graph!r} under the profiler")
            arguments = (made, graph, str(runs), str(machine.cores))
            measured = json.loads(run_child("bench.graph_side", *arguments, what=f"{case.name}: graph {graph!r}"))
        results.append(_result(case, graph, measured, runs))
    return GraphReport(machine=machine, runs=runs, cases=results)


def _result(case: Case, graph: str, measured: dict[str, Any], runs: int) -> GraphResult:
    operators = by_operator(measured.pop("nodes"), runs)
    return GraphResult(
        name=case.name,
        graph=graph,
        nodes=sum(cost.nodes for cost in operators),
        gflop=sum(cost.gflop or 0.0 for cost in operators),
        operators=operators,
        **measured,
    )


def by_operator(nodes: Sequence[dict[str, Any]], runs: int) -> list[OperatorCost]:
    """Sum the events of `runs` runs by operator type, the costliest first.

    >>> events = [{"op": "Gemm", "us": 1000, "flops": 10**9}, {"op": "Add", "us": 3000, "flops": 0}]
    >>> [(cost.op, cost.ms, cost.share, cost.gflops) for cost in by_operator(events, runs=1)]
    [('Add', 3.0, 0.75, None), ('Gemm', 1.0, 0.25, 1000.0)]
    """
    by_type: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes:
        by_type[node["op"]].append(node)
    whole_us = sum(node["us"] for node in nodes) or 1
    costs = []
    for op, members in by_type.items():
        us, flops = sum(node["us"] for node in members), sum(node["flops"] for node in members)
        costs.append(
            OperatorCost(
                op=op,
                nodes=len(members) // runs,
                ms=us / runs / 1e3,
                share=us / whole_us,
                gflop=flops / runs / 1e9 if flops else None,
                gflops=flops / us / 1e3 if flops and us else None,
            )
        )
    return sorted(costs, key=lambda cost: cost.ms, reverse=True)


# --- for a terminal -----------------------------------------------------------------------------------


def graph_report(report: GraphReport) -> RenderableType:
    parts: list[RenderableType] = []
    for result in report.cases:
        parts += [Text(f"{result.name}: {result.graph}", style="bold"), _table(result.operators)]
        figures = (
            f"{result.nodes} nodes, {result.gflop:.1f} GFLOP in {result.run_s:.3f} s a run under the profiler; "
            f"{result.graph_bytes / MEGA:.1f} MB of graph loaded in {result.load_s:.2f} s; "
            f"peak {result.peak_rss_bytes / MEGA:.0f} MB"
        )
        parts += [Text(figures, style="dim"), Text()]
    return Group(*parts)


def _table(costs: Sequence[OperatorCost]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for heading in ("operator", "nodes", "ms", "share", "GFLOP", "GFLOP/s"):
        table.add_column(heading, justify="left" if heading == "operator" else "right", no_wrap=True)
    for cost in costs[:SHOWN]:
        rates = ("" if number is None else f"{number:.1f}" for number in (cost.gflop, cost.gflops))
        table.add_row(cost.op, str(cost.nodes), f"{cost.ms:.1f}", f"{cost.share:.1%}", *rates)
    return table
