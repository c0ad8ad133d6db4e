"""Figures of a stopped benchmark are there when the same command is given again, and for the same settings only."""

from pathlib import Path

import pytest

from bench.kept_figures import KeptFigures
from fedvit.errors import ConfigError
from tests.support.codes import has_code


def test_a_part_is_measured_once(tmp_path: Path) -> None:
    file, measured = tmp_path / "figures.json", list[str]()

    def measure(part: str) -> dict[str, float]:
        measured.append(part)
        return {"accuracy": 0.1 + len(measured)}

    for parts in (["0 analytic"], ["0 analytic", "0 central"], ["0 central"]):
        kept = KeptFigures(file, {"images": 600})
        figures = [kept.measure(part, lambda part=part: measure(part)) for part in parts]
    assert measured == ["0 analytic", "0 central"]
    assert figures == [{"accuracy": 2.1}]
    with pytest.raises(ConfigError, check=has_code("FV0002", "other settings")):
        KeptFigures(file, {"images": 700})
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, check=has_code("FV0002", "figures.json")):
        KeptFigures(file, {"images": 600})


def test_without_a_file_figures_are_in_memory_only(tmp_path: Path) -> None:
    kept = KeptFigures(None, {})
    assert kept.measure("a", lambda: {"x": 1.0}) == kept.measure("a", dict) == {"x": 1.0}
    assert not list(tmp_path.iterdir())
