"""Exports each listed backbone with random weights, verifies its graphs against torch, and writes docs/backbones.md.

`make backbones`: the largest takes some minutes and 15 GB of memory.
"""

import pytest

from coordinator.compute.planning.batch import method_batch
from export.graphs import export_graphs
from fedvit.methods import make_method
from tests.backbones.table import NAMES, Row, build, choose_methods, describe, read_rows, store_rows


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_verified(name: str, rows: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Export raises ExportMismatch for a graph that differs from torch's step."""
    row: Row | None = None
    methods = choose_methods(build(name, is_empty=True))
    for method in methods:
        vit = build(name, method)
        made = make_method(method, {"batch_size": 2})
        graphs = export_graphs(made, vit, method_batch(made, vit), cache=tmp_path_factory.mktemp("graphs"))
        assert {"predict"} < graphs.keys()
        row = describe(vit)
    assert row is not None
    rows[name] = row.write(methods)


def test_the_page_lists_what_was_verified(rows: dict[str, str]) -> None:
    store_rows([rows[name] for name in NAMES])
    assert read_rows() == rows
