"""The report of `bench simulate`: a side that is not run says why."""

from pathlib import Path

import msgspec
import pytest

from bench.simulate import measure
from bench.simulate.jobs import JOBS, Measured
from bench.simulate.measure import SimulateSettings, run_simulate_bench

FOLDERS = [Path(f"device-{number}") for number in range(20)]


def test_report_has_figures_of_sides_that_ran_and_reasons_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_child(module: str, *arguments: str, what: str) -> bytes:
        ended = [float(number) for number in range(1, int(arguments[1]) + 1)]
        return msgspec.json.encode(Measured(ended=ended, accuracy=0.3, peak_rss_bytes=9))

    monkeypatch.setattr(measure, "run_child", run_child)
    settings = SimulateSettings(
        images=1000, rounds=5, turns=1, accelerator="cpu", precision="fp32", sides=("onnx", "loop"), threads=(1,)
    )
    report = run_simulate_bench(JOBS[:1], FOLDERS, settings)
    [case] = report["cases"]
    assert (report["devices"], report["rounds"], case["name"], case["accuracies_agree"]) == (20, 5, JOBS[0].name, True)
    assert (case["onnx"]["rounds_per_s"], case["loop"]["threads"], case["loop"]["peak_rss_bytes"]) == (1.0, 1, 9)
    assert (case["torch"]["rounds_per_s"], case["torch"]["reason"]) == (None, "not run: --sides onnx,loop")
