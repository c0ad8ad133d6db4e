"""The optional kernels: they compute what the operators of ONNX in their place do, and a device trains without them."""

import json
import logging
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from scipy.special import erf

from bench.cases import Case
from bench.graph_side import random_feeds
from bench.onnx_side import START, noise_samples, start_values
from bench.prepare import prepare
from edge_client.work.runtime import Runtime, Seeds, Watch
from fedvit.blobs import BlobStore
from fedvit.engine import CPU, open_session
from fedvit.errors import BadPayload
from fedvit.kernels import DOMAIN, has_amx, library, rewritten
from fedvit.models import SMALL
from fedvit.onnx_file import check_self_contained
from fedvit.program import Program, decode_program
from tests.support.kernels import compiled, kernels_in
from tests.support.tiny import TINY_MODEL

KINDS = ["", "plain_kernels", *(["avx2_kernels"] if platform.machine() == "x86_64" else [])]
"""What the library chooses itself, and what it would on lesser processors of this kind."""
NEAR = 2e-6
"""Of a result's largest value: sums are in another order."""


@pytest.fixture(scope="module")
def packages(shared: Path) -> dict[str, Path]:
    """The package, compiled for each of KINDS: a folder for the path of modules."""
    return {kind: compiled(shared, kind) for kind in KINDS}


@pytest.fixture
def installed(packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As on a device with the extra."""
    place = kernels_in(packages[""])
    monkeypatch.setattr("fedvit.kernels.library", lambda: place)
    return place


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device without it, whatever this environment has."""
    monkeypatch.setattr("fedvit.kernels.PACKAGE", "fedvit_kernels_that_nobody_has")
    library.cache_clear()


# --- operators by themselves --------------------------------------------------------------------------


FIRST_TYPES = {"RoundRows": TensorProto.UINT8, "RoundWeights": TensorProto.INT8}
"""Of outputs that are not floats."""


def run_operator(where: Path, kind: str, outputs: int, *arrays: Any, **attributes: float) -> list[Any]:
    names = [f"x{number}" for number in range(len(arrays))]
    made = [f"y{number}" for number in range(outputs)]
    types = [FIRST_TYPES.get(kind, TensorProto.FLOAT), *[TensorProto.FLOAT] * outputs]
    node = helper.make_node(kind, names, made, domain=DOMAIN, **attributes)
    ends = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, arrays, strict=True)
    ]
    results = [helper.make_tensor_value_info(n, t, None) for n, t in zip(made, types, strict=False)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "g", ends, results), opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(kernels_in(where)))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CPU])
    found: list[Any] = session.run(None, dict(zip(names, arrays, strict=True)))
    return found


def drawn(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_near(found: Any, wanted: Any, near: float = NEAR) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= near * max(1.0, np.abs(wanted).max(initial=0))


def attention(qkv: Any, scale: float) -> tuple[Any, Any, Any, Any, Any]:
    """In float64: output, weights (B, H, N, N), queries, keys and values (B, H, N, W)."""
    q, k, v = np.moveaxis(qkv.astype(np.float64), 2, 0).transpose(0, 1, 3, 2, 4)
    scores = scale * q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3), weights, q, k, v


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    images=st.integers(1, 3),
    tokens=st.integers(1, 80),
    heads=st.integers(1, 4),
    width=st.integers(1, 70),
    size=st.sampled_from([0.1, 1.0, 10.0]),
    seed=st.integers(0, 2**16),
)
def test_attention_and_its_gradient_of_any_shape(
    packages: dict[str, Path], kind: str, images: int, tokens: int, heads: int, width: int, size: float, seed: int
) -> None:
    """size 10: scores of hundreds, of which nearly all weights are 0."""
    scale = width**-0.5
    qkv, grad = size * drawn(seed, images, tokens, 3, heads, width), drawn(seed + 1, images, tokens, heads, width)
    qkv = qkv.astype(np.float32)
    wanted, weights, q, k, v = attention(qkv, scale)
    near = 1e-5 * max(1.0, size**2)
    assert_near(run_operator(packages[kind], "Attention", 1, qkv, scale=scale)[0], wanted, near)
    left = grad.astype(np.float64).transpose(0, 2, 1, 3)
    along = left @ v.swapaxes(-1, -2)
    scores = weights * (along - (along * weights).sum(-1, keepdims=True))
    parts = (scale * scores @ k, scale * scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ left)
    right = np.stack([part.transpose(0, 2, 1, 3) for part in parts], axis=2)
    assert_near(run_operator(packages[kind], "AttentionGrad", 1, qkv, grad, scale=scale)[0], right, near)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 15, 16, 33, 20_000])
def test_gradient_of_gelu(packages: dict[str, Path], kind: str, count: int) -> None:
    entered = np.linspace(-20, 20, count, dtype=np.float32).reshape(1, count)
    grad = drawn(0, 1, count)
    x = entered.astype(np.float64)
    slope = (1 + erf(x / np.sqrt(2))) / 2 + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    [found] = run_operator(packages[kind], "GeluGrad", 1, grad, entered)
    assert_near(found, grad * slope)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    width=st.integers(1, 150),
    seed=st.integers(0, 2**16),
)
def test_gradient_of_layer_norm_of_any_shape(
    packages: dict[str, Path], kind: str, shape: list[int], width: int, seed: int
) -> None:
    entered, grad, gamma = drawn(seed, *shape, width), drawn(seed + 1, *shape, width), drawn(seed + 2, width)
    mean = entered.mean(-1, keepdims=True)
    spread = 1 / np.sqrt(entered.var(-1, keepdims=True) + np.float32(1e-3))
    normal = (entered.astype(np.float64) - mean) * spread
    scaled = grad.astype(np.float64) * gamma
    along = (scaled * normal).mean(-1, keepdims=True)
    wanted = (scaled - scaled.mean(-1, keepdims=True) - normal * along) * spread
    rows = tuple(range(len(shape)))
    found = run_operator(packages[kind], "LayerNormGrad", 3, grad, entered, mean, spread, gamma)
    assert_near(found[0], wanted, 1e-5)
    assert_near(found[1], (grad * normal).sum(rows), 1e-5)
    assert_near(found[2], grad.astype(np.float64).sum(rows), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    width=st.integers(1, 150),
    epsilon=st.sampled_from([1e-6, 1e-2]),
    seed=st.integers(0, 2**16),
)
def test_layer_norm_of_any_shape(
    packages: dict[str, Path], kind: str, shape: list[int], width: int, epsilon: float, seed: int
) -> None:
    entered, gamma, beta = 3 + drawn(seed, *shape, width), drawn(seed + 1, width), drawn(seed + 2, width)
    exact = entered.astype(np.float64)
    mean = exact.mean(-1, keepdims=True)
    spread = 1 / np.sqrt(exact.var(-1, keepdims=True) + epsilon)
    found = run_operator(packages[kind], "LayerNorm", 3, entered, gamma, beta, epsilon=epsilon)
    # of one or few numbers a deviation may be so small that the mean's last bit is seen
    near = 1e-5 + 1e-6 * spread.max()
    assert_near(found[0], (exact - mean) * spread * gamma + beta, near)
    assert_near(found[1], mean)
    assert_near(found[2], spread, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 700), width=st.integers(1, 70), seed=st.integers(0, 2**16))
def test_sums_of_columns(packages: dict[str, Path], kind: str, rows: int, width: int, seed: int) -> None:
    entered = drawn(seed, rows, width)
    wanted = entered.astype(np.float64).sum(0, keepdims=True)
    assert_near(run_operator(packages[kind], "ColumnSums", 1, entered)[0], wanted, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("operator", "steps", "zero"), [("RoundRows", 127, 128), ("RoundWeights", 64, 0)])
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 60), width=st.integers(1, 150), factored=st.booleans(), seed=st.integers(0, 2**16))
def test_rows_become_integers_of_their_own_scale(
    packages: dict[str, Path],
    kind: str,
    operator: str,
    steps: int,
    zero: int,
    rows: int,
    width: int,
    factored: bool,
    seed: int,
) -> None:
    """Rows of gradients differ by orders of magnitude, and a row may be all zeros."""
    entered = drawn(seed, rows, width) * 10.0 ** np.arange(-rows, 0)[:, None] * (np.arange(rows)[:, None] != 1)
    entered = np.maximum(np.abs(entered), 1e-20).astype(np.float32) * np.sign(entered).astype(np.float32)
    factors = [np.abs(drawn(seed + 1, width)) + 0.1] if factored and operator == "RoundRows" else []
    rounded, scales = run_operator(packages[kind], operator, 2, entered, *factors)
    exact = entered.astype(np.float64) * (factors[0] if factors else 1)
    assert scales.shape == (rows, 1)
    np.testing.assert_allclose(scales, np.maximum(np.abs(exact).max(1, keepdims=True), 1e-30) / steps, rtol=1e-5)
    integers = rounded.astype(np.int64) - zero
    assert np.abs(integers).max() <= steps
    assert np.abs(integers - exact / scales).max() <= 0.5 + 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 16), (70, 333)])
def test_rows_times_their_scales(packages: dict[str, Path], kind: str, bias: bool, rows: int, width: int) -> None:
    entered, scales, added = drawn(0, rows, width), drawn(1, rows, 1), drawn(2, width)
    [found] = run_operator(packages[kind], "ScaleRows", 1, entered, scales, *([added] if bias else []))
    assert_near(found, entered.astype(np.float64) * scales + (added if bias else 0))


def in_bfloat16(numbers: Any) -> Any:
    return torch.from_numpy(numbers).bfloat16().double().numpy()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 100),
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    summed=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gradient_of_a_weight_in_bfloat16(
    packages: dict[str, Path], kind: str, rows: int, height: int, width: int, summed: bool, seed: int
) -> None:
    """Factors are rounded to bfloat16 as torch does it; sums are of floats, and begin with those that are given."""
    left, right, before = drawn(seed, rows, height), drawn(seed + 1, rows, width), drawn(seed + 2, height, width)
    found = run_operator(packages[kind], "WeightGrad", 1, left, right, *([before] if summed else []))[0]
    assert_near(found, in_bfloat16(left).T @ in_bfloat16(right) + (before if summed else 0), 1e-5)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(32, 130),
    inner=st.integers(1, 6),
    columns=st.integers(1, 18),
    turned=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products_of_integers_with_amx(
    packages: dict[str, Path], rows: int, inner: int, columns: int, turned: bool, biased: bool, seed: int
) -> None:
    """Exact but for the rounding of scales; other processors say what they have not."""
    rng = np.random.default_rng(seed)
    rounded = rng.integers(1, 256, (rows, 64 * inner), np.uint8)
    weight = rng.integers(-64, 65, (64 * inner, 32 * columns), np.int8)
    scales, own = drawn(seed, rows, 1), drawn(seed + 1, 32 * columns)
    bias = [drawn(seed + 2, 32 * columns)] if biased else []
    lies = np.ascontiguousarray(weight.T) if turned else weight
    given = (rounded, scales, lies, own, *bias)
    if not has_amx(kernels_in(packages[""])):
        with pytest.raises(Exception, match="this processor has no AMX"):  # onnxruntime's own
            run_operator(packages[""], "IntegerProduct", 1, *given, turned=float(turned))
        return
    whole = (rounded.astype(np.int64) - 128) @ weight.astype(np.int64)
    wanted = whole * own.astype(np.float64) * scales + (bias[0] if bias else 0)
    assert_near(run_operator(packages[""], "IntegerProduct", 1, *given, turned=float(turned))[0], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_so(packages: dict[str, Path], kind: str) -> None:
    """A device finds a diverged training by it."""
    qkv = drawn(0, 1, 20, 3, 1, 16)
    qkv[0, 3, 1, 0, 2] = np.nan
    assert np.isnan(run_operator(packages[kind], "Attention", 1, qkv, scale=0.25)[0]).all()
    entered = np.array([[np.nan] * 20], np.float32)
    assert np.isnan(run_operator(packages[kind], "GeluGrad", 1, np.ones((1, 20), np.float32), entered)[0]).all()
    ones = np.ones(20, np.float32)
    assert np.isnan(run_operator(packages[kind], "LayerNorm", 3, entered, ones, ones, epsilon=1e-6)[0]).all()
    assert np.isnan(run_operator(packages[kind], "ColumnSums", 1, entered)[0]).all()
    assert np.isnan(run_operator(packages[kind], "WeightGrad", 1, entered, ones[None, :])[0]).all()
    for odd in (np.nan, np.inf):  # wherever in its row, and in that row alone
        for place in (0, 19):
            rows = drawn(1, 2, 20)
            rows[1, place] = odd
            scales = run_operator(packages[kind], "RoundRows", 2, rows)[1]
            assert np.isnan(scales).tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("kind", "outputs", "shapes", "said"),
    [
        ("Attention", 1, [(2, 5, 4, 2, 8)], r"expected \(images, tokens, 3, heads, width\)"),
        ("AttentionGrad", 1, [(2, 5, 3, 2, 8), (2, 5, 2, 7)], r"a gradient of \(images, tokens, heads, width\)"),
        ("GeluGrad", 1, [(2, 3), (3, 2)], "two tensors of one shape"),
        ("LayerNormGrad", 3, [(2, 3), (2, 3), (2, 3), (2, 1), (3,)], "rows, their means and deviations"),
        ("LayerNorm", 3, [(2, 3), (3,), (2,)], "a factor and an offset for each column"),
        ("ColumnSums", 1, [(2, 3, 4)], "expected rows"),
        ("RoundRows", 2, [(2, 3), (2,)], "at most a factor for each column"),
        ("ScaleRows", 1, [(2, 3), (3, 1)], "a scale for each of them"),
        ("ScaleRows", 1, [(2, 3), (2, 1), (2,)], "at most a bias for each column"),
        ("WeightGrad", 1, [(4, 3), (5, 3)], "two matrices with as many rows"),
        ("WeightGrad", 1, [(4, 3), (4, 5), (5, 3)], "at most a sum of their columns' products"),
    ],
)
def test_other_shapes_are_refused(
    packages: dict[str, Path], kind: str, outputs: int, shapes: list[tuple[int, ...]], said: str
) -> None:
    scale = {"scale": 1.0} if kind.startswith("Attention") else {"epsilon": 1e-6} if kind == "LayerNorm" else {}
    with pytest.raises(Exception, match=said):  # onnxruntime's own
        run_operator(packages[""], kind, outputs, *(drawn(0, *shape) for shape in shapes), **scale)


# --- graphs -------------------------------------------------------------------------------------------

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
"""Of three blocks; the last one's attention has one query, and stays as it is."""
PRODUCTS = 4
"""Of integers in INTEGERS, in each direction: the others have 8 rows."""
SUMS = {"fedtp": {"ColumnSums": 11}, "fedavg": {"ColumnSums": 15}, "eftvit": {"ColumnSums": 6}}
"""For biases that are trained."""


class Prepared:
    """A case's files, as on a device."""

    def __init__(self, folder: Path) -> None:
        start = json.loads((folder / START).read_text())
        self.blobs = BlobStore(folder)
        self.program: Program = decode_program(self.blobs.get(start["program"]))
        self.values = start_values(self.program, start["groups"], self.blobs)

    def graph(self, name: str) -> Path:
        return self.blobs.path(self.program.graphs[name].digest)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, graph_cache: Path) -> dict[str, Prepared]:
    folder = tmp_path_factory.mktemp("prepared")
    for case in (*CASES.values(), INTEGERS):
        prepare(case, folder / case.name, 64, graph_cache)
    return {case.name: Prepared(folder / case.name) for case in (*CASES.values(), INTEGERS)}


def operators(model: bytes) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_from_string(model).graph.node if node.domain == DOMAIN)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_kernels_computes_the_same(prepared: dict[str, Prepared], installed: Path, name: str) -> None:
    of = prepared[name]
    for graph in ("train", "predict"):
        path = of.graph(graph)
        plain = open_session(path, 2, own_kernels=False)
        ours = open_session(path, 2)
        feeds = random_feeds(plain, of.program, of.values)
        for output, wanted, found in zip(
            plain.get_outputs(), plain.run(None, feeds), ours.run(None, feeds), strict=True
        ):
            largest = np.abs(wanted).max(initial=1e-6)
            assert np.abs(found - wanted).max(initial=0) <= 1e-4 * largest, output.name
    made = rewritten(of.graph("train").read_bytes())
    assert made is not None
    assert operators(made) == REPLACED | SUMS[name]
    assert rewritten(of.graph("train").read_bytes(), amx=True) == made  # products of floats stay as exact


def test_a_graph_of_integers_with_kernels_computes_nearly_the_same(
    prepared: dict[str, Prepared], installed: Path
) -> None:
    """Where a number lies in the middle of two integers, its last bit decides; bfloat16 has 8 bits."""
    of = prepared["integers"]
    path = of.graph("train")
    plain, ours = open_session(path, 2, own_kernels=False), open_session(path, 2)
    feeds = random_feeds(plain, of.program, of.values)
    for output, wanted, found in zip(plain.get_outputs(), plain.run(None, feeds), ours.run(None, feeds), strict=True):
        assert np.linalg.norm(found - wanted) <= 0.02 * np.linalg.norm(wanted), output.name


def replaced(model: bytes, *, amx: bool) -> tuple[Counter[tuple[str, int]], set[str]]:
    """How many operators of ours with how many inputs, and the kinds of the others."""
    made = rewritten(model, amx=amx)
    assert made is not None
    nodes = onnx.load_from_string(made).graph.node
    ours = Counter((node.op_type, len(node.input)) for node in nodes if node.domain == DOMAIN)
    return ours, {node.op_type for node in nodes if node.domain != DOMAIN}


def test_what_surrounds_products_of_integers_is_replaced(prepared: dict[str, Prepared]) -> None:
    """Forward with the bias, backward with scales of the weight's columns."""
    ours, others = replaced(prepared["integers"].graph("train").read_bytes(), amx=False)
    assert (ours["RoundRows", 1], ours["RoundRows", 2]) == (7, 7)
    assert (ours["ScaleRows", 3], ours["ScaleRows", 2]) == (7, 7)
    assert ours["RoundWeights", 1] == 7
    assert "MatMulIntegerToFloat" in others
    assert not {"QuantizeLinear", "ReduceMax"} & others


def test_with_amx_products_of_integers_and_gradients_of_weights_are_replaced(prepared: dict[str, Prepared]) -> None:
    """Products of fewer rows than a tile has stay the engine's: here those of the class token alone."""
    ours, others = replaced(prepared["integers"].graph("train").read_bytes(), amx=True)
    assert (ours["IntegerProduct", 5], ours["IntegerProduct", 4]) == (PRODUCTS, PRODUCTS)
    assert (ours["ScaleRows", 3], ours["ScaleRows", 2]) == (7 - PRODUCTS, 7 - PRODUCTS)
    assert ours["WeightGrad", 3] + ours["WeightGrad", 2] == 10
    assert "MatMulIntegerToFloat" in others


def test_a_round_with_kernels_trains_the_same(prepared: dict[str, Prepared], installed: Path) -> None:
    of = prepared["fedavg"]
    images = noise_samples(of.program, 6)
    trained = []
    for own_kernels in (False, True):
        runtime = Runtime(2, own_kernels=own_kernels)
        for graph in of.program.graphs.values():
            runtime.open(graph.digest, of.blobs.path(graph.digest))
        watch = Watch(lambda done, total, loss: None, lambda: False)
        trained.append(runtime.train(of.program, of.values, images, Seeds(0, 1, "device-0"), 1.0, watch))
    plain, ours = trained
    assert ours.loss == pytest.approx(plain.loss, rel=1e-4)
    assert ours.tensors.keys() == plain.tensors.keys()
    for name, wanted in plain.tensors.items():
        # AdamW's first steps are of the rate's size, whatever the gradient's
        assert np.abs(ours.tensors[name] - wanted).mean() <= 3e-5, name


def test_what_something_else_reads_is_not_replaced(prepared: dict[str, Prepared]) -> None:
    """The first block's weights of attention are an output, too."""
    model = onnx.load(str(prepared["fedavg"].graph("train")))
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax.output[0], TensorProto.FLOAT, None))
    made = rewritten(model.SerializeToString())
    assert made is not None
    assert operators(made) == {**REPLACED, **SUMS["fedavg"], "Attention": 1, "AttentionGrad": 1}


def test_a_bias_of_rows_is_added_as_before(prepared: dict[str, Prepared]) -> None:
    """Not one number for each column, but as many as the product has."""
    model = onnx.load(str(prepared["integers"].graph("train")))
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.value_info}
    rows = next(node for node in model.graph.node if node.op_type == "Gelu").input[0]
    added = next(node for node in model.graph.node if node.op_type == "Reshape" and rows in node.output).input[0]
    addition = next(node for node in model.graph.node if added in node.output)
    assert addition.op_type == "Add"
    lengths = [dim.dim_value for dim in shapes[added]]
    model.graph.input.append(helper.make_tensor_value_info("batch/more", TensorProto.FLOAT, lengths))
    addition.input[1] = "batch/more"
    made = rewritten(model.SerializeToString())
    assert made is not None
    assert sum(n.op_type == "ScaleRows" and len(n.input) == 3 for n in onnx.load_from_string(made).graph.node) == 6
    assert any(node.op_type == "Add" and "batch/more" in node.input for node in onnx.load_from_string(made).graph.node)


def test_operators_with_fewer_inputs_stay(installed: Path) -> None:
    """As ONNX allows it, but export does not write it: a product without zero points, a sum of all axes."""
    nodes = [
        helper.make_node("MatMulIntegerToFloat", ["u", "w", "one", "own"], ["p"], domain="com.microsoft"),
        helper.make_node("Mul", ["p", "s"], ["scaled"]),
        helper.make_node("ReduceSum", ["scaled"], ["y"], keepdims=1),
    ]
    sizes = {"u": (TensorProto.UINT8, [64, 64]), "w": (TensorProto.INT8, [64, 32]), "s": (TensorProto.FLOAT, [64, 1])}
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in sizes.items()]
    scales = [onnx.numpy_helper.from_array(np.ones(n, np.float32), name) for name, n in (("one", ()), ("own", 32))]
    between = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 32]) for name in ("p", "scaled")]
    result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1])]
    graph = helper.make_graph(nodes, "g", given, result, scales, value_info=between)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    made = rewritten(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString(), amx=True)
    assert made is not None
    assert operators(made) == {"ScaleRows": 1}
    rng = np.random.default_rng(0)
    feeds = {
        "u": rng.integers(0, 256, (64, 64), np.uint8),
        "w": rng.integers(-64, 65, (64, 32), np.int8),
        "s": drawn(0, 64, 1),
    }
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(installed))
    [found] = onnxruntime.InferenceSession(made, options, providers=[CPU]).run(None, feeds)
    wanted = ((feeds["u"].astype(float) @ feeds["w"].astype(float)) * feeds["s"]).sum()
    assert found == pytest.approx(wanted, rel=1e-4)


def test_other_numbers_are_not_replaced(prepared: dict[str, Prepared]) -> None:
    """Another factor than the root of a half in GELU's gradient."""
    model = onnx.load(str(prepared["fedavg"].graph("train")))
    for constant in model.graph.initializer:
        array = onnx.numpy_helper.to_array(constant)
        if array.size == 1 and np.isclose(array, np.sqrt(0.5)):
            constant.CopyFrom(onnx.numpy_helper.from_array(array * np.float32(1.01), constant.name))
    made = rewritten(model.SerializeToString())
    assert made is not None
    assert "GeluGrad" not in operators(made)


def test_a_graph_without_such_nodes_stays_as_it_is(prepared: dict[str, Prepared]) -> None:
    assert rewritten(prepared["fedavg"].graph("update").read_bytes()) is None


@pytest.mark.usefixtures("missing")
def test_a_device_without_the_library_opens_graphs_as_they_are(prepared: dict[str, Prepared]) -> None:
    of = prepared["fedtp"]
    assert library() is None
    plain, ours = (open_session(of.graph("train"), 1, own_kernels=own) for own in (False, True))
    feeds = random_feeds(plain, of.program, of.values)
    for wanted, found in zip(plain.run(None, feeds), ours.run(None, feeds), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_library_that_cannot_be_loaded_is_left_out_with_a_warning(
    prepared: dict[str, Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "libfedvit_kernels.so"
    broken.write_text("of another processor")
    monkeypatch.setattr("fedvit.kernels.library", lambda: broken)
    with caplog.at_level(logging.WARNING):
        open_session(prepared["fedtp"].graph("train"), 1)
        open_session(prepared["fedtp"].graph("predict"), 1)
    warned = [record for record in caplog.records if "kernels cannot be loaded" in record.message]
    assert len(warned) == 1
    assert warned[0].__dict__["path"] == str(broken)


def test_a_graph_that_was_sent_may_not_have_them(
    prepared: dict[str, Prepared], installed: Path, tmp_path: Path
) -> None:
    """Also where they are installed: what a device was sent is then the same everywhere."""
    made = rewritten(prepared["fedtp"].graph("train").read_bytes())
    assert made is not None
    file = tmp_path / "graph.onnx"
    file.write_bytes(made)
    for source in (made, file):
        with pytest.raises(
            BadPayload, match=r"operator 'fedvit\.kernels\.\w+' of fedvit\[kernels\], expected operators"
        ):
            check_self_contained(source)
    with pytest.raises(BadPayload, match=r"fedvit\[kernels\]"):
        open_session(file, 1)
