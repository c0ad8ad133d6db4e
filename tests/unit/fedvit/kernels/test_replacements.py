"""Graphs with the optional kernels compute what they computed before, and a device trains without the kernels, too."""

import json
import logging
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from bench.cases import Case
from bench.onnx_side import START, make_noise_samples, start_values
from bench.prepare import prepare
from edge_client.work.runtime import Runtime, Seeds, Watch
from fedvit.blobs import BlobStore
from fedvit.engine import CPU, has_kernels, open_session
from fedvit.errors import BadPayload
from fedvit.kernels import DOMAIN, find_library, insert_kernels
from fedvit.models import SMALL
from fedvit.onnx_file import check_self_contained
from fedvit.program import Program, decode_program
from tests.support.codes import has_code
from tests.support.feeds import make_random_feeds
from tests.support.kernels import compiled, kernels_in
from tests.support.tiny import TINY_MODEL


@pytest.fixture
def installed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the library, as on a device with the extra."""
    library = kernels_in(compiled(shared))
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: library)
    return library


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the library, whatever this environment has."""
    monkeypatch.setattr("fedvit.kernels.PACKAGE", "fedvit_kernels_that_nobody_has")
    find_library.cache_clear()


CASES = {
    "fedtp": Case(
        name="fedtp",
        method="fedtp",
        options={"epochs": 1, "optimizer": "sgd", "lr": 0.01, "batch_size": 2},
        model=SMALL,
        model_options={**TINY_MODEL, "qkv_bias": False},
    ),
    "fedavg": Case(
        name="fedavg",
        method="fedavg",
        options={"epochs": 1, "optimizer": "adamw", "lr": 0.001, "batch_size": 2},
        model=SMALL,
        model_options=TINY_MODEL,
    ),
    "eftvit": Case(
        name="eftvit",
        method="eftvit",
        options={"batch_size": 2, "epochs": 1, "local_blocks": 1, "mask": 0.5},
        model=SMALL,
        model_options=TINY_MODEL,
    ),
}
INTEGERS = Case(
    name="integers",
    method="fedavg",
    options={"epochs": 1, "optimizer": "sgd", "lr": 0.01, "batch_size": 8, "compute": "int8"},
    model=SMALL,
    model_options={"image_size": 8, "patch_size": 4, "width": 128, "depth": 2, "heads": 4, "mlp_ratio": 2.0},
)
"""Narrower weights are multiplied as floats."""
REPLACED = {"Attention": 2, "AttentionGrad": 2, "GeluGrad": 3, "LayerNorm": 7, "LayerNormGrad": 7}
"""Operators in three blocks; the last block's attention has one query, and stays as it is."""
SUMS = {"fedtp": {"ColumnSums": 11}, "fedavg": {"ColumnSums": 15}, "eftvit": {"ColumnSums": 6}}
"""Sums for trained biases."""


class Prepared:
    """A case's files, as on a device."""

    def __init__(self, folder: Path) -> None:
        start = json.loads((folder / START).read_text())
        self.blobs = BlobStore(folder)
        self.program: Program = decode_program(self.blobs.get(start["program"]))
        self.values = start_values(self.program, start["groups"], self.blobs)

    def graph(self, name: str) -> Path:
        return self.blobs.path(self.program.graphs[name].digest)

    def model(self, name: str = "train") -> onnx.ModelProto:
        return onnx.load(str(self.graph(name)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> dict[str, Prepared]:
    folder = tmp_path_factory.mktemp("prepared")
    for case in (*CASES.values(), INTEGERS):
        prepare(case, folder / case.name, 64, graph_cache)
    return {case.name: Prepared(folder / case.name) for case in (*CASES.values(), INTEGERS)}


def replace_nodes(content: bytes) -> onnx.ModelProto:
    changed = insert_kernels(content)
    assert changed is not None
    return onnx.load_from_string(changed)


def count_kernels(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("graph", ["train", "predict"])
@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_kernels_computes_the_same(prepared: dict[str, Prepared], name: str, graph: str) -> None:
    case = prepared[name]
    plain, fast = (open_session(case.graph(graph), 2, own_kernels=own) for own in (False, True))
    feeds = make_random_feeds(plain, case.program, case.values)
    for output, expected, result in zip(
        plain.get_outputs(), plain.run(None, feeds), fast.run(None, feeds), strict=True
    ):
        largest = np.abs(expected).max(initial=1e-6)
        assert np.abs(result - expected).max(initial=0) <= 1e-4 * largest, output.name


@pytest.mark.parametrize("name", CASES)
def test_the_exporter_writes_what_kernels_replace(prepared: dict[str, Prepared], name: str) -> None:
    assert count_kernels(replace_nodes(prepared[name].graph("train").read_bytes())) == REPLACED | SUMS[name]


@pytest.mark.usefixtures("installed")
def test_a_graph_of_integers_with_kernels_computes_nearly_the_same(prepared: dict[str, Prepared]) -> None:
    """Where a number lies in the middle of two integers, its last bit decides."""
    case = prepared["integers"]
    plain, fast = (open_session(case.graph("train"), 2, own_kernels=own) for own in (False, True))
    feeds = make_random_feeds(plain, case.program, case.values)
    for output, expected, result in zip(
        plain.get_outputs(), plain.run(None, feeds), fast.run(None, feeds), strict=True
    ):
        assert np.linalg.norm(result - expected) <= 0.02 * np.linalg.norm(expected), output.name


def test_roundings_around_products_of_integers_are_replaced(prepared: dict[str, Prepared]) -> None:
    """The forward pass has a bias, the backward pass scales of the weight's columns."""
    nodes = replace_nodes(prepared["integers"].graph("train").read_bytes()).graph.node
    kernels = Counter((node.op_type, len(node.input)) for node in nodes if node.domain == DOMAIN)
    others = {node.op_type for node in nodes if node.domain != DOMAIN}
    assert (kernels["RoundRows", 1], kernels["RoundRows", 2], kernels["RoundWeights", 1]) == (7, 7, 7)
    assert (kernels["ScaleRows", 3], kernels["ScaleRows", 2]) == (7, 7)
    assert "MatMulIntegerToFloat" in others
    assert not {"QuantizeLinear", "ReduceMax"} & others


@pytest.mark.usefixtures("installed")
def test_a_round_with_kernels_trains_the_same(prepared: dict[str, Prepared]) -> None:
    case = prepared["fedavg"]
    images = make_noise_samples(case.program, 6)
    results = []
    for own_kernels in (False, True):
        runtime = Runtime(2, own_kernels=own_kernels)
        for graph in case.program.graphs.values():
            runtime.open(graph.digest, case.blobs.path(graph.digest))
        watch = Watch(lambda done, total, loss: None, lambda: False)
        results.append(runtime.train(case.program, case.values, images, Seeds(0, 1, "device-0"), 1.0, watch))
    plain, fast = results
    assert fast.loss == pytest.approx(plain.loss, rel=1e-4)
    assert fast.tensors.keys() == plain.tensors.keys()
    for name, expected in plain.tensors.items():
        # AdamW's first steps have the rate's size, for any gradient
        assert np.abs(fast.tensors[name] - expected).mean() <= 3e-5, name


def test_nodes_that_something_else_reads_stay(prepared: dict[str, Prepared]) -> None:
    """The first block's weights of attention are an output, too."""
    model = prepared["fedavg"].model()
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax.output[0], TensorProto.FLOAT, None))
    kernels = count_kernels(replace_nodes(model.SerializeToString()))
    assert kernels == {**REPLACED, **SUMS["fedavg"], "Attention": 1, "AttentionGrad": 1}


def test_a_bias_for_rows_stays(prepared: dict[str, Prepared]) -> None:
    """A bias with as many numbers as the product is not a number for each column."""
    model = prepared["integers"].model()
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.value_info}
    rows = next(node for node in model.graph.node if node.op_type == "Gelu").input[0]
    added = next(node for node in model.graph.node if node.op_type == "Reshape" and rows in node.output).input[0]
    addition = next(node for node in model.graph.node if added in node.output)
    assert addition.op_type == "Add"
    lengths = [dim.dim_value for dim in shapes[added]]
    model.graph.input.append(helper.make_tensor_value_info("batch/more", TensorProto.FLOAT, lengths))
    addition.input[1] = "batch/more"
    nodes = replace_nodes(model.SerializeToString()).graph.node
    assert sum(node.op_type == "ScaleRows" and len(node.input) == 3 for node in nodes) == 6
    assert any(node.op_type == "Add" and "batch/more" in node.input for node in nodes)


def test_operators_with_fewer_inputs_stay(installed: Path) -> None:
    """ONNX allows forms that the exporter does not write: a product without zero points, a sum of all axes."""
    nodes = [
        helper.make_node("MatMulIntegerToFloat", ["u", "w", "one", "own"], ["p"], domain="com.microsoft"),
        helper.make_node("Mul", ["p", "s"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled"], ["y"], keepdims=1),
    ]
    sizes = {"u": (TensorProto.UINT8, [64, 64]), "w": (TensorProto.INT8, [64, 32]), "s": (TensorProto.FLOAT, [64, 1])}
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in sizes.items()]
    scales = [onnx.numpy_helper.from_array(np.ones(n, np.float32), name) for name, n in (("one", ()), ("own", 32))]
    between = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 32]) for name in ("p", "scaled")]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])]
    graph = helper.make_graph(nodes, "g", inputs, result, scales, value_info=between)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = replace_nodes(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    assert count_kernels(model) == {"ScaleRows": 1}
    rng = np.random.default_rng(0)
    feeds = {
        "u": rng.integers(0, 256, (64, 64), np.uint8),
        "w": rng.integers(-64, 65, (64, 32), np.int8),
        "s": rng.standard_normal((64, 1)).astype(np.float32),
    }
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(installed))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    expected = ((feeds["u"].astype(float) @ feeds["w"].astype(float)) * feeds["s"]).sum()
    assert session.run(None, feeds)[0] == pytest.approx(expected, rel=1e-4)


def test_patterns_with_other_numbers_stay(prepared: dict[str, Prepared]) -> None:
    """GELU's gradient has another factor than the root of a half."""
    model = prepared["fedavg"].model()
    for constant in model.graph.initializer:
        array = onnx.numpy_helper.to_array(constant)
        if array.size == 1 and np.isclose(array, np.sqrt(0.5)):
            constant.CopyFrom(onnx.numpy_helper.from_array(array * np.float32(1.01), constant.name))
    assert "GeluGrad" not in count_kernels(replace_nodes(model.SerializeToString()))


def test_a_graph_without_patterns_is_not_changed(prepared: dict[str, Prepared]) -> None:
    assert insert_kernels(prepared["fedtp"].graph("update").read_bytes()) is None


@pytest.mark.usefixtures("installed")
def test_an_update_of_adamw_is_one_operator(prepared: dict[str, Prepared]) -> None:
    """It writes over what it reads, as a device lets it."""
    model = replace_nodes(prepared["fedavg"].graph("update").read_bytes())
    assert count_kernels(model) == {"AdamW": 1}
    vectors = ("value", "grad", "slot/exp_avg", "slot/exp_avg_sq")
    rng = np.random.default_rng(0)
    results = []
    start = {name: np.abs(rng.standard_normal(20_001)).astype(np.float32) for name in vectors}
    for own in (False, True):
        session = open_session(prepared["fedavg"].graph("update"), 2, own_kernels=own)
        places = {name: array.copy() for name, array in start.items()}
        for step in (1, 2):
            binding = session.io_binding()
            for name, place in places.items():
                binding.bind_input(name, "cpu", 0, np.float32, place.shape, place.ctypes.data)
                if name != "grad":
                    binding.bind_output(f"new/{name}", "cpu", 0, np.float32, place.shape, place.ctypes.data)
            scalars = {"hyper/lr": np.array(0.1, np.float32), "hyper/step": np.array(step, np.float32)}
            for name, number in scalars.items():
                binding.bind_cpu_input(name, number)
            session.run_with_iobinding(binding)
        results.append(places)
    for name, expected in results[0].items():
        np.testing.assert_allclose(results[1][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("read", ["grown mean", "factor of a vector"])
def test_an_update_that_differs_from_adamw_stays(prepared: dict[str, Prepared], read: str) -> None:
    model = prepared["fedavg"].model("update")
    if read == "grown mean":  # by another node than those of the update
        model.graph.node.append(helper.make_node("Neg", ["new/slot/exp_avg"], ["turned"]))
        model.graph.output.append(helper.make_tensor_value_info("turned", TensorProto.FLOAT, None))
    else:
        [factor] = [node for node in model.graph.node if node.input[0] == "value"]
        model.graph.input.append(helper.make_tensor_value_info("factors", TensorProto.FLOAT, ["length"]))
        factor.input[1] = "factors"
    assert insert_kernels(model.SerializeToString()) is None


@pytest.mark.usefixtures("installed")
def test_kernels_that_load_are_there() -> None:
    assert has_kernels()


@pytest.mark.usefixtures("missing")
def test_a_device_without_the_library_trains_as_before(prepared: dict[str, Prepared]) -> None:
    case = prepared["fedtp"]
    assert find_library() is None
    assert not has_kernels()
    plain, same = (open_session(case.graph("train"), 1, own_kernels=own) for own in (False, True))
    feeds = make_random_feeds(plain, case.program, case.values)
    for expected, result in zip(plain.run(None, feeds), same.run(None, feeds), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_library_that_does_not_load_causes_one_warning(
    prepared: dict[str, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libfedvit_kernels.so"
    broken.write_text("a library for another processor")
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: broken)
    with caplog.at_level(logging.WARNING):
        open_session(prepared["fedtp"].graph("train"), 1)
        open_session(prepared["fedtp"].graph("predict"), 1)
        assert not has_kernels()
    assert [record.__dict__.get("path") for record in caplog.records].count(str(broken)) == 1


def test_a_library_of_an_older_version_causes_one_warning(
    installed: Path, prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lacks an operator that this version would insert."""

    def insert(content: bytes) -> bytes:
        model = onnx.load_from_string(insert_kernels(content) or content)
        for node in model.graph.node:
            node.op_type += "OfTomorrow" * (node.domain == DOMAIN)
        changed: bytes = model.SerializeToString()
        return changed

    monkeypatch.setattr("fedvit.kernels.insert_kernels", insert)
    with caplog.at_level(logging.WARNING):
        session = open_session(prepared["fedtp"].graph("train"), 1)
    [warning] = [record.__dict__ for record in caplog.records if record.__dict__.get("path") == str(installed)]
    assert "OfTomorrow" in warning["error"]
    case = prepared["fedtp"]
    feeds = make_random_feeds(session, case.program, case.values)
    plain = open_session(case.graph("train"), 1, own_kernels=False)
    for expected, result in zip(plain.run(None, feeds), session.run(None, feeds), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_graph_that_arrives_with_kernels_is_refused(prepared: dict[str, Prepared], tmp_path: Path) -> None:
    content = insert_kernels(prepared["fedtp"].graph("train").read_bytes())
    assert content is not None
    file = tmp_path / "graph.onnx"
    file.write_bytes(content)
    for source in (content, file):
        with pytest.raises(BadPayload, check=has_code("FV2306")):
            check_self_contained(source)
    with pytest.raises(BadPayload, check=has_code("FV2306", "fedvit.kernels")):
        open_session(file, 1)
