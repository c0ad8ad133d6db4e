"""`python -m bench graph`: the time of a case's graph by operator."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import Case
from bench.child import run_child
from bench.machine import describe_machine
from bench.reporting import Progress, Report
from bench.step import prepare_case


def run_graph_bench(
    cases: Sequence[Case],
    graph: str = "train",
    *,
    runs: int = 3,
    cache: Path | None = None,
    progress: Progress = lambda line: None,
) -> Report:
    """Profile one graph of each case, in its own process on all cores.

    Raises FedvitError when a case cannot be prepared, or has no graph of this name.
    """
    machine = describe_machine()
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
            prepare_case(case, Path(folder), cache, progress)
            progress(f"{case.name}: {runs} runs of graph {graph!r} under the profiler")
            arguments = (folder, graph, str(runs), str(machine.cores))
            figures = json.loads(run_child("bench.graph_side", *arguments, what=f"{case.name}: graph {graph!r}"))
        operators = sum_by_operator(figures.pop("nodes"), runs)
        nodes, gflop = (sum(each[key] or 0 for each in operators) for key in ("nodes", "gflop"))
        results.append({"name": case.name, "graph": graph, "nodes": nodes, "gflop": gflop, **figures})
        results[-1]["operators"] = operators
    return {"machine": machine, "runs": runs, "cases": results}


def sum_by_operator(nodes: Sequence[dict[str, Any]], runs: int) -> list[Report]:
    """Sum the profiler's events of `runs` runs by operator type, the costliest first.

    >>> events = [{"op": "Gemm", "us": 1000, "flops": 10**9}, {"op": "Add", "us": 3000, "flops": 0}]
    >>> [(cost["op"], cost["ms"], cost["share"], cost["gflops"]) for cost in sum_by_operator(events, runs=1)]
    [('Add', 3.0, 0.75, None), ('Gemm', 1.0, 0.25, 1000.0)]
    """
    by_type: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for node in nodes:
        by_type[node["op"]].append(node)
    total_us = sum(node["us"] for node in nodes) or 1
    costs: list[Report] = []
    for op, members in by_type.items():
        us, flops = sum(node["us"] for node in members), sum(node["flops"] for node in members)
        costs.append({
            "op": op, "nodes": len(members) // runs, "ms": us / runs / 1e3, "share": us / total_us,
            "gflop": flops / runs / 1e9 if flops else None, "gflops": flops / us / 1e3 if flops and us else None,
        })  # fmt: skip
    return sorted(costs, key=lambda cost: float(cost["ms"]), reverse=True)
