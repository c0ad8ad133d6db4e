"""Tables of reports: one for the report's own figures, and one for each list of results."""

import json
import sys
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from bench.machine import describe_machine
from bench.reporting import list_measurements, make_tables, measure
from fedvit.terminal import GuardedStream


def render(report: dict[str, Any]) -> list[list[str]]:
    text = StringIO()
    Console(file=text, width=200).print(make_tables(report))
    return [line.split() for line in text.getvalue().splitlines() if line.strip()]


def test_units_follow_from_keys() -> None:
    keys = {"step_s": "s", "step_s_runs": "s", "images_per_s": "1/s", "peak_rss_bytes": "MB", "rounds": ""}
    keys |= {"ours_mb_s": "MB/s", "overhead_ms_per_device": "ms", "rss_slope_bytes_per_round": "MB", "gflop": "GFLOP"}
    assert {each.name: each.unit for each in list_measurements(dict.fromkeys(keys, 1))} == keys


def test_results_are_columns_and_figures_rows() -> None:
    sides = [{"name": name, "onnx": {"step_s": step_s, "peak_bytes": None}} for name, step_s in (("a", 0.25), ("b", 2))]
    lines = render({"machine": describe_machine(), "rounds": 3, "step_s_runs": [0.5, 1.5], "cases": sides})
    assert ["a", "b"] in lines
    assert ["onnx.step_s", "0.25", "2", "s"] in lines
    assert ["onnx.peak_bytes", "MB"] in lines, "nothing was measured"
    assert ["step_s_runs", "0.5", "1.5", "s"] in lines


def test_many_results_are_rows() -> None:
    operators = [{"op": f"op-{number}", "nodes": number, "ms": number / 10} for number in range(9)]
    lines = render({"cases": [{"name": "tiny", "operators": operators}]})
    assert ["nodes", "ms", "ms"] in lines
    assert ["op-7", "7", "0.7"] in lines


def test_json_is_printed_through_the_guard_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = StringIO()
    monkeypatch.setattr(sys, "stdout", GuardedStream(text))
    measure(lambda progress: {"rounds": 1}, as_json=True)
    assert json.loads(text.getvalue()) == {"rounds": 1}
