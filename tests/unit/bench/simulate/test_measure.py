"""The report: a side that is not run says why, and the table shows what the figures say."""

from io import StringIO

import msgspec
from rich.console import Console

from bench.machine import this_machine
from bench.simulate.measure import CaseResult, Side, SimulateReport, agree, simulate_report


def report(onnx: float, loop: float) -> SimulateReport:
    case = CaseResult(
        name="fedavg-4x64",
        rounds_before=6,
        onnx=Side(rounds_per_s=2.0, rounds_per_s_runs=(2.0,), peak_rss_bytes=900_000_000, accuracy=onnx),
        torch=Side(reason="not run: --sides onnx,loop"),
        loop=Side(rounds_per_s=4.0, rounds_per_s_runs=(4.0,), peak_rss_bytes=800_000_000, accuracy=loop, threads=1),
        accuracies_agree=agree([onnx, None, loop]),
    )
    return SimulateReport(
        machine=this_machine(), accelerator="cpu",
        precision="fp32", devices=20, cohort=10, images=1000, rounds=5, turns=1,
        accuracy_tolerance=0.05, cases=[case],
    )  # fmt: skip


def shown(of: SimulateReport) -> str:
    text = StringIO()
    Console(file=text, width=200).print(simulate_report(of))
    return text.getvalue()


def test_table_shows_each_side_beside_the_loop() -> None:
    rows = [line.split() for line in shown(report(0.31, 0.34)).splitlines()]
    assert ["fedavg-4x64", "onnx", "2.000", "0.50", "900", "0.310"] in rows
    assert ["torch", "-", "-", "-", "-"] in rows
    assert ["loop", "4.000", "1.00", "800", "0.340"] in rows


def test_table_has_reasons_and_agreement_of_accuracies() -> None:
    near, far = shown(report(0.31, 0.34)), shown(report(0.31, 0.41))
    assert "fedavg-4x64: torch: not run: --sides onnx,loop" in near
    assert "accuracies agree within 0.05: onnx 0.310, loop 0.340" in near
    assert "accuracies DISAGREE within 0.05: onnx 0.310, loop 0.410" in far


def test_json_has_none_and_the_reason_for_a_side_that_was_not_run() -> None:
    [case] = msgspec.json.decode(msgspec.json.encode(report(0.31, 0.34)))["cases"]
    torch = case["torch"]
    assert (torch["rounds_per_s"], torch["peak_rss_bytes"], torch["accuracy"]) == (None, None, None)
    assert torch["reason"] == "not run: --sides onnx,loop"
