"""The programs of `edge-client certify` are those that this version exports."""

from pathlib import Path

import pytest

from coordinator.compute.planning.trials import store_trials
from profiles.probes.speed import TRIALS


@pytest.mark.slow
def test_stored_programs_are_the_exported_ones(tmp_path: Path, graph_cache: Path) -> None:
    store_trials(tmp_path / "trials", graph_cache)
    stored, made = (
        {file.name: file.read_bytes() for file in folder.iterdir()} for folder in (TRIALS, tmp_path / "trials")
    )
    assert stored == made, "run `make methods`"
