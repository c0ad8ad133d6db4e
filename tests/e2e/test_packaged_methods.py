"""A method of an installed package trains in a real run: coordinator, worker process and devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.partition import DealSettings, deal
from tests.support.packages import NORMS, install
from tests.support.programs import WAIT_S, program
from tests.support.tiny import TINY_MODEL

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_method_of_a_package_trains(tmp_path: Path, cache: Path) -> None:
    install(tmp_path / "site", "acme-norms", {"norms_alone": "acme_norms:Norms"}, acme_norms=NORMS)
    deal("digits", "iid", 2, tmp_path / "parts", DealSettings(test_share=0.8))
    sizes = [word for name, size in TINY_MODEL.items() for word in ("--model-option", f"{name}={size}")]
    command = [
        *program("fleet.cli"), "run", "--virtual", "2", "--hosts", "1", "--method", "norms_alone", "--rounds", "2",
        "-o", "strength=2.0", "-o", "batch_size=32", *sizes, "--run", "one", "--json",
    ]  # fmt: skip
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["mean_accuracy"] is not None
    shown = subprocess.run(
        [*program("coordinator.cli"), "show", "one"], cwd=tmp_path, capture_output=True, text=True, check=True,
        timeout=WAIT_S,
    )  # fmt: skip
    assert "run one: norms_alone on vit_small_images, finished, 2 of 2 rounds" in shown.stdout


@pytest.mark.slow
def test_contracts_cover_a_method_of_a_package(tmp_path: Path, cache: Path) -> None:
    """The command of `make test-method`, with the tests of graphs and engines alone."""
    install(tmp_path / "site", "acme-norms", {"norms_alone": "acme_norms:Norms"}, acme_norms=NORMS)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache)}
    ended = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "tests"),
            "tests/contracts/test_methods.py", "-k",
            "norms_alone and (the_graph_trains or torch_engine or what_is_local or says_where)",
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1, ended.stdout  # its docstring names no source
    assert "test_a_method_says_where_it_comes_from[norms_alone]" in failed[0]
    assert "5 passed" in ended.stdout
