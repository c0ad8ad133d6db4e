"""The list of graphs that devices know without a publisher: anybody can make it again from the source."""

import json
import os
import sys

import pytest

from coordinator.compute.planning.own_graphs import COMMON, list_cases, make_digests
from fedvit.known_graphs import read_own_graphs
from fedvit.models import SMALL
from tests.support.children import run_child


@pytest.mark.parametrize("method", COMMON)
def test_export_from_source_gives_the_listed_graphs(method: str) -> None:
    """This also holds on processors of other makers; if a method or the export was changed: make own-graphs."""
    assert set(make_digests((method, SMALL, 10))) <= read_own_graphs()


@pytest.mark.slow
def test_digests_do_not_depend_on_the_processor() -> None:
    """torch computes without the instructions that it would choose on this processor."""
    cases = [("eftvit", SMALL, 5), ("fedtp", SMALL, 5)]
    code = (
        "import json, sys; from coordinator.compute.planning.own_graphs import make_digests; "
        "print(json.dumps([make_digests(tuple(case)) for case in json.loads(sys.argv[1])]))"
    )
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"}
    done = run_child([sys.executable, "-c", code, json.dumps(cases)], env=plain)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [make_digests(case) for case in cases]


def test_cases_are_different_and_of_all_papers() -> None:
    cases = list(list_cases())
    assert len(cases) == len(set(cases))
    assert {
        (method, SMALL, classes) for method in ("eftvit", "fedperfix", "fedtp", "pfedpg") for classes in (2, 7)
    } <= set(cases)
