"""`python -m bench graph`: onnxruntime's profile, added up by operator."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest

from bench import graph
from bench.cases import Case
from bench.child import run_child
from bench.graph import run_graph_bench, sum_by_operator
from bench.graph_side import count_product_flops, list_integer_limits, list_node_events, make_random_feeds
from bench.onnx_side import START, start_values
from bench.prepare import prepare
from fedvit.blobs import BlobStore
from fedvit.errors import FedvitError
from fedvit.models import SMALL
from fedvit.program import Draw, Program, decode_program
from tests.support.codes import has_code
from tests.support.tiny import TINY_MODEL

CASE = Case(
    name="tiny",
    method="eftvit",
    options={"batch_size": 2, "epochs": 1, "local_blocks": 1, "mask": 0.5},
    model=SMALL,
    model_options=TINY_MODEL,
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(CASE, folder, 64, graph_cache)
    return folder


def read_program(prepared: Path) -> Program:
    digest = json.loads((prepared / START).read_text())["program"]
    return decode_program(BlobStore(prepared).get(digest))


def test_every_input_is_fed_within_its_range(prepared: Path) -> None:
    """Half of 16 patches are kept, 10 classes, 2 samples."""
    start = json.loads((prepared / START).read_text())
    blobs = BlobStore(prepared)
    program = read_program(prepared)
    session = onnxruntime.InferenceSession(str(blobs.path(program.graphs["train"].digest)))
    feeds = make_random_feeds(session, program, start_values(program, start["groups"], blobs))
    assert feeds.keys() == {node.name for node in session.get_inputs()}
    assert feeds["batch/kept"].shape == (2, 8)
    assert set(feeds["batch/kept"].ravel()) <= set(range(16))
    assert set(feeds["batch/labels"]) <= set(range(10))
    assert feeds["batch/weight"].tolist() == [1, 1]
    assert all((value >= 0).all() for name, value in feeds.items() if name.startswith("slot/"))
    loss = session.run(["metric/loss"], feeds)[0]
    assert np.isfinite(loss)


def test_numbers_that_are_drawn_stay_in_their_range(prepared: Path) -> None:
    program = read_program(prepared)
    depth = Draw(name="depth", low=1, high=5, count=3)
    (phase,) = program.train
    drawing = msgspec.structs.replace(program, train=(msgspec.structs.replace(phase, draws=(depth,)),))
    assert list_integer_limits(drawing) == {**list_integer_limits(program), "draw/depth": (1, 5)}


def test_the_report_of_a_tiny_case(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use_prepared(case: Case, folder: Path, *_: object) -> None:
        for file in prepared.rglob("*"):
            if file.is_file():
                place = folder / file.relative_to(prepared)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(file.read_bytes())

    monkeypatch.setattr(graph, "prepare_case", use_prepared)
    report = json.loads(msgspec.json.encode(run_graph_bench([CASE], runs=2)))
    (case,) = report["cases"]
    assert (case["name"], case["graph"], report["runs"]) == ("tiny", "train", 2)
    assert min(case[key] for key in ("run_s", "load_s", "graph_bytes", "peak_rss_bytes", "gflop")) > 0
    operators = {cost["op"]: cost for cost in case["operators"]}
    assert case["nodes"] == sum(cost["nodes"] for cost in operators.values())
    assert sum(cost["share"] for cost in operators.values()) == pytest.approx(1)
    assert any(cost["gflop"] for cost in operators.values())
    assert case["gflop"] == pytest.approx(read_program(prepared).graphs["train"].flops / 1e9)


def test_graph_that_does_not_exist_is_reported(prepared: Path) -> None:
    with pytest.raises(FedvitError, check=has_code("FV1218")):
        run_child("bench.graph_side", str(prepared), "nope", "1", "1", what="tiny")


def test_products_are_counted_whichever_way_they_are_transposed() -> None:
    """(4 heads of) 6 x 3 times 3 x 5: 2 * 6 * 5 * 3 = 180 operations a head."""
    for left in ([6, 3], [3, 6]):
        args = {"op_name": "Gemm", "input_type_shape": [{"float": left}], "output_type_shape": [{"float": [6, 5]}]}
        assert count_product_flops(args) == 180
    heads = {"input_type_shape": [{"float": [4, 3, 6]}], "output_type_shape": [{"float": [4, 6, 5]}]}
    assert count_product_flops({"op_name": "FusedMatMul", **heads}) == 4 * 180
    vector = {"input_type_shape": [{"float": [3]}], "output_type_shape": [{"float": [5]}]}
    assert count_product_flops({"op_name": "MatMul", **vector}) == 2 * 3 * 5


def test_the_first_run_and_what_is_no_node_are_not_counted() -> None:
    def event(at: int, op: str, us: int, name: str = "n_kernel_time", cat: str = "Node") -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": at, "dur": us, "args": {"op_name": op}}

    profile = [
        event(30, "Add", 4), event(10, "Add", 900), event(11, "Mul", 900), event(31, "Mul", 8), event(20, "Add", 2),
        event(21, "Mul", 6), event(5, "", 1, cat="Session"), event(6, "Add", 1, name="n_fence_before"),
    ]  # fmt: skip
    costs = sum_by_operator(list_node_events(profile, runs=3), runs=2)
    assert [(cost["op"], cost["nodes"], cost["ms"]) for cost in costs] == [("Mul", 1, 0.007), ("Add", 1, 0.003)]
