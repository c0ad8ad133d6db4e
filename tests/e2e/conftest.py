"""Fixtures of the end-to-end tests: data, a graph cache, the undisturbed run, and a stage for each test."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedvit.data.digits import read_digits
from fedvit.data.partition import partition
from fleet.partition import write_device_folders
from fleet.simulate import simulate
from tests.e2e.stage import CONFIG, DEVICES, Stage


@pytest.fixture(scope="session")
def cache(graph_cache: Path) -> Path:
    """Programs under test keep their graphs here, so that they are exported once for all tests."""
    return graph_cache.parent / "cache"


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three devices with 150 digits in all."""
    digits = read_digits(size=32)
    few = np.arange(150)
    samples = replace(digits, images=digits.images[few], labels=digits.labels[few])
    shares = partition("dirichlet", samples.labels, len(DEVICES), seed=3, alpha=1.0)
    folder = tmp_path_factory.mktemp("data") / "parts"
    write_device_folders(samples, shares, folder, test_share=0.2, seed=3)
    return folder


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, parts: Path, cache: Path) -> bytes:
    """The final tensors of a run to which nothing happened, in memory."""
    out = tmp_path_factory.mktemp("undisturbed")
    folders = [parts / name for name in DEVICES]
    outcome = simulate(folders, CONFIG, out=out, run="calm", graph_cache=cache / "fedvit" / "graphs")
    return (outcome.folder / "model.safetensors").read_bytes()


@pytest.fixture
def stage(tmp_path: Path, parts: Path, cache: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, parts, cache)
    yield stage
    stage.close()
