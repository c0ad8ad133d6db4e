"""`make test-method` covers a method of an installed package (tests/e2e/test_plugins.py has one train)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import NORMS, install
from tests.support.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


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
    assert "4 passed" in ended.stdout
