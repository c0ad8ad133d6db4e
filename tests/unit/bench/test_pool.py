"""What a pool of devices costs a simulation, beside those that a round asks."""

from pathlib import Path

import pytest

from bench.pool import run_pool_bench


def test_pool_is_measured_in_processes_of_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    lines: list[str] = []
    report = run_pool_bench(devices=5, cohort=2, rounds=3, engine="onnx", progress=lines.append)
    assert (report.small.devices, report.large.devices, report.cohort) == (2, 5, 2)
    assert all(len(side.rounds_s) == 2 and side.round_s > 0 for side in (report.small, report.large))
    grown = report.large.round_s - report.small.round_s
    assert report.overhead_ms_per_device == pytest.approx(1000 * grown / 3)
    assert len(lines) == 4
