"""The operators of the optional kernels compute what numpy computes in float64."""

import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from scipy.special import erf

from fedvit.engine import CPU
from fedvit.kernels import DOMAIN
from tests.support.kernels import compiled, kernels_in

KINDS = ["", "plain_kernels", *(["avx2_kernels"] if platform.machine() == "x86_64" else [])]
"""The library's own choice, and its choice on lesser processors of this kind."""
TOLERANCE = 2e-6
"""Relative to a result's largest value: sums are in another order."""


@pytest.fixture(scope="module")
def packages(shared: Path) -> dict[str, Path]:
    """The package, compiled for each of KINDS: a folder for the path of modules."""
    return {kind: compiled(shared, kind) for kind in KINDS}


FIRST_TYPES = {"RoundRows": TensorProto.UINT8, "RoundWeights": TensorProto.INT8}
"""Types of the first outputs that are not floats."""


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


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_near(found: Any, wanted: Any, near: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max(initial=0) <= near * max(1.0, np.abs(wanted).max(initial=0))


def attention(qkv: Any, scale: float) -> tuple[Any, Any, Any, Any, Any]:
    """Return in float64: output, weights (B, H, N, N), queries, keys and values (B, H, N, W)."""
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
@pytest.mark.slow
def test_attention_and_its_gradient_of_any_shape(
    packages: dict[str, Path], kind: str, images: int, tokens: int, heads: int, width: int, size: float, seed: int
) -> None:
    """size 10: scores of hundreds, of which nearly all weights are 0."""
    scale = width**-0.5
    qkv, grad = size * draw(seed, images, tokens, 3, heads, width), draw(seed + 1, images, tokens, heads, width)
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
    grad = draw(0, 1, count)
    x = entered.astype(np.float64)
    slope = (1 + erf(x / np.sqrt(2))) / 2 + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    [found] = run_operator(packages[kind], "GeluGrad", 1, grad, entered)
    assert_near(found, grad * slope)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 20), min_size=1, max_size=2), width=st.integers(1, 150), seed=st.integers(0, 2**16)
)
def test_gradient_of_layer_norm_of_any_shape(
    packages: dict[str, Path], kind: str, shape: list[int], width: int, seed: int
) -> None:
    entered, grad, gamma = draw(seed, *shape, width), draw(seed + 1, *shape, width), draw(seed + 2, width)
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
    entered, gamma, beta = 3 + draw(seed, *shape, width), draw(seed + 1, width), draw(seed + 2, width)
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
    entered = draw(seed, rows, width)
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
    entered = draw(seed, rows, width) * 10.0 ** np.arange(-rows, 0)[:, None] * (np.arange(rows)[:, None] != 1)
    entered = np.maximum(np.abs(entered), 1e-20).astype(np.float32) * np.sign(entered).astype(np.float32)
    factors = [np.abs(draw(seed + 1, width)) + 0.1] if factored and operator == "RoundRows" else []
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
    entered, scales, added = draw(0, rows, width), draw(1, rows, 1), draw(2, width)
    [found] = run_operator(packages[kind], "ScaleRows", 1, entered, scales, *([added] if bias else []))
    assert_near(found, entered.astype(np.float64) * scales + (added if bias else 0))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), max_size=3), size=st.sampled_from([1e-6, 1.0, 1e3]), seed=st.integers(0, 2**16)
)
def test_update_of_adamw(packages: dict[str, Path], kind: str, shape: list[int], size: float, seed: int) -> None:
    """The third step of torch's formula, with the squares of gradients from 1e-12 to 1e6."""
    value, grad, mean = draw(seed, *shape), size * draw(seed + 1, *shape), size * draw(seed + 2, *shape)
    square = (size * draw(seed + 3, *shape)) ** 2
    lr, decay, beta1, beta2, eps = 0.1, 0.05, 0.9, 0.999, 1e-8
    correction = np.sqrt(1 - beta2**3)
    factors = (beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * decay, lr * correction / (1 - beta1**3), eps * correction)
    scalars = [np.array(factor, np.float32) for factor in factors]
    tensors = [np.asarray(tensor, np.float32) for tensor in (value, grad, mean, square)]
    exact_value, exact_grad, exact_mean, exact_square = (tensor.astype(np.float64) for tensor in tensors)
    next_mean = beta1 * exact_mean + (1 - beta1) * exact_grad
    next_square = beta2 * exact_square + (1 - beta2) * exact_grad**2
    change = lr * next_mean / (1 - beta1**3) / (np.sqrt(next_square) / correction + eps)
    found = run_operator(packages[kind], "AdamW", 3, *tensors, *scalars)
    assert_near(found[0], exact_value * (1 - lr * decay) - change)
    np.testing.assert_allclose(found[1], next_mean, rtol=1e-5, atol=1e-6 * size)
    np.testing.assert_allclose(found[2], next_square, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_stays_so(packages: dict[str, Path], kind: str) -> None:
    """A device finds a diverged training by it."""
    qkv = draw(0, 1, 20, 3, 1, 16)
    qkv[0, 3, 1, 0, 2] = np.nan
    assert np.isnan(run_operator(packages[kind], "Attention", 1, qkv, scale=0.25)[0]).all()
    entered = np.array([[np.nan] * 20], np.float32)
    assert np.isnan(run_operator(packages[kind], "GeluGrad", 1, np.ones((1, 20), np.float32), entered)[0]).all()
    ones = np.ones(20, np.float32)
    assert np.isnan(run_operator(packages[kind], "LayerNorm", 3, entered, ones, ones, epsilon=1e-6)[0]).all()
    assert np.isnan(run_operator(packages[kind], "ColumnSums", 1, entered)[0]).all()
    numbers = [np.array(0.5, np.float32)] * 7
    assert np.isnan(run_operator(packages[kind], "AdamW", 3, ones, entered[0], ones, ones, *numbers)).all()
    for odd in (np.nan, np.inf):  # wherever in its row, and in that row alone
        for place in (0, 19):
            rows = draw(1, 2, 20)
            rows[1, place] = odd
            scales = run_operator(packages[kind], "RoundRows", 2, rows)[1]
            assert np.isnan(scales).tolist() == [[False], [True]]


@pytest.mark.parametrize(
    ("kind", "outputs", "shapes"),
    [
        ("Attention", 1, [(2, 5, 4, 2, 8)]),
        ("AttentionGrad", 1, [(2, 5, 3, 2, 8), (2, 5, 2, 7)]),
        ("GeluGrad", 1, [(2, 3), (3, 2)]),
        ("LayerNormGrad", 3, [(2, 3), (2, 3), (2, 3), (2, 1), (3,)]),
        ("LayerNorm", 3, [(2, 3), (3,), (2,)]),
        ("ColumnSums", 1, [(2, 3, 4)]),
        ("RoundRows", 2, [(2, 3), (2,)]),
        ("ScaleRows", 1, [(2, 3), (3, 1)]),
        ("ScaleRows", 1, [(2, 3), (2, 1), (2,)]),
        ("AdamW", 3, [(2, 3), (2, 3), (2, 3), (3, 2), *[()] * 7]),
        ("AdamW", 3, [*[(2, 3)] * 4, *[()] * 6, (1,)]),
    ],
)
def test_other_shapes_are_refused(
    packages: dict[str, Path], kind: str, outputs: int, shapes: list[tuple[int, ...]]
) -> None:
    scale = {"scale": 1.0} if kind.startswith("Attention") else {"epsilon": 1e-6} if kind == "LayerNorm" else {}
    with pytest.raises(Exception, match=f"{kind}.*: expected"):  # onnxruntime's own
        run_operator(packages[""], kind, outputs, *(draw(0, *shape) for shape in shapes), **scale)
