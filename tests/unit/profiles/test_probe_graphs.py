"""The graphs that a device measures its speed with: as they are written, as they compute, and what they measure."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.special import erf

from fedvit.engine import open_session
from fedvit.resources import DeviceProfile, ProductKind, Speed
from fedvit.wire.messages import MAX_MESSAGE_BYTES, Hello, decode, encode
from profiles import probe_graphs
from profiles.predict import ProductModel
from profiles.prediction import ProductWork
from profiles.probe_graphs import FOLDER, main
from profiles.probes import speed
from profiles.probes.speed import PRODUCTS, measure_speed

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def run(name: str, feeds: dict[str, Any]) -> Any:
    """What onnxruntime makes of the file that is shipped."""
    [result] = open_session(FOLDER / f"{name}.onnx", 1).run(None, feeds)
    return result


def test_the_files_are_those_that_are_written_here() -> None:
    """After a change: python -m profiles.probe_graphs"""
    assert {file.stem: file.read_bytes() for file in FOLDER.iterdir()} == probe_graphs.GRAPHS


def test_they_are_written_anew_byte_by_byte(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_graphs, "FOLDER", tmp_path / "graphs")
    main()
    assert {file.name for file in (tmp_path / "graphs").iterdir()} == {f"{name}.onnx" for name in probe_graphs.GRAPHS}
    for file in (tmp_path / "graphs").iterdir():
        assert file.read_bytes() == (FOLDER / file.name).read_bytes()


def test_both_sides_know_how_long_the_chain_is() -> None:
    """The device has no onnx to count with: adding 1 so often to nothing gives the number of operators."""
    one = np.ones(1, np.float32)
    assert run("chain", {"x": np.zeros(1, np.float32), "b": one}) == speed.CHAIN == probe_graphs.CHAIN


# --- products -----------------------------------------------------------------------------------------

BY_NUMPY: dict[ProductKind, Callable[[dict[str, Any]], Any]] = {
    "weights": lambda fed: fed["a"] @ fed["b"].T + fed["c"],
    "gradient": lambda fed: fed["a"].T @ fed["b"] + fed["c"],
    "attention": lambda fed: fed["a"] @ fed["b"],
    "integers": lambda fed: fed["a"].astype(np.float32) @ fed["b"].astype(np.float32) * fed["s"] * fed["t"],
    "halves": lambda fed: fed["a"].astype(np.float32) @ fed["b"].astype(np.float32),
}


@pytest.mark.parametrize(("kind", "batch", "rows", "inner", "columns"), PRODUCTS)
def test_every_product_that_is_measured(kind: ProductKind, batch: int, rows: int, inner: int, columns: int) -> None:
    """It is the product that its sizes say, and it is right."""
    fed = speed._operands(kind, batch, rows, inner, columns, RNG)
    result = run(kind, fed)
    assert result.shape == ((rows, columns) if kind != "attention" else (batch, rows, columns))
    assert fed["a"].size == batch * rows * inner
    assert fed["b"].size == batch * inner * columns
    expected = BY_NUMPY[kind](fed)
    digits = 1e-2 if kind == "halves" else 1e-5  # some processors add up in float16
    np.testing.assert_allclose(result, expected, rtol=1e-7, atol=digits * float(np.abs(expected).max()))


def test_every_kind_is_measured() -> None:
    assert {kind for kind, *_ in PRODUCTS} == set(BY_NUMPY)


# --- passes -------------------------------------------------------------------------------------------

X, OTHER, SCALE, BIAS = floats(6, 4, 32), floats(6, 4, 32), floats(32), floats(32)


def softmax(x: Any) -> Any:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * SCALE + BIAS


QUANTIZED = {
    "x": RNG.integers(-127, 128, (5, 8), np.int8),
    "s": RNG.random(5, np.float32),
    "z": np.array([0, 1, -2, 3, 0], np.int8),
}
PASSES: dict[str, tuple[dict[str, Any], Any]] = {
    "Add": ({"x": X, "b": OTHER}, X + OTHER),
    "Transpose": ({"x": X}, X.transpose(1, 0, 2)),
    "Softmax": ({"x": X}, softmax(X)),
    "LayerNormalization": ({"x": X, "s": SCALE, "b": BIAS}, norm(X)),
    "Erf": ({"x": X}, erf(X)),
    "Exp": ({"x": X}, np.exp(X)),
    "Gelu": ({"x": X}, X / 2 * (1 + erf(X / np.sqrt(2)))),
    "ReduceMean": ({"x": X}, X.mean(axis=2, keepdims=True)),
    "Concat": ({"x": X, "b": OTHER}, np.concatenate([X, OTHER], axis=1)),
    "DequantizeLinear": (
        QUANTIZED,
        (QUANTIZED["x"].astype(np.float32) - QUANTIZED["z"][:, None]) * QUANTIZED["s"][:, None],
    ),
}


@pytest.mark.parametrize("op", PASSES)
def test_every_operator_that_is_measured(op: str) -> None:
    fed, expected = PASSES[op]
    result = run(op, fed)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


# --- measured -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Speed:
    """This machine with one thread, for some seconds, in a process of its own."""
    return measure_speed(1)


def test_every_rate_is_measured(measured: Speed) -> None:
    """Of every product and operator above, since they run here; all are above zero."""
    assert measured.threads == 1
    sizes = [(rate.kind, rate.batch, rate.rows, rate.inner, rate.columns) for rate in measured.products]
    assert sizes == list(PRODUCTS)
    assert set(measured.bytes_per_s) == set(PASSES)
    assert {"chain", "step", *BY_NUMPY, *PASSES} == set(probe_graphs.GRAPHS)
    rates = [rate.flops_per_s for rate in measured.products] + list(measured.bytes_per_s.values())
    assert all(np.isfinite(rate) and rate > 0 for rate in rates)
    assert measured.node_s > 0
    assert measured.load_per_core is not None


def test_a_measured_speed_travels(measured: Speed) -> None:
    """In the message with which a device joins, to the last digit."""
    profile = DeviceProfile(host="pi", machine="aarch64", cores=4, threads=1, speed=measured)
    hello = Hello("8f14e45fceea167a", "0.1.0", profile, ("cat", "dog"), 120, 30)
    raw = encode(hello)
    assert len(raw) < MAX_MESSAGE_BYTES
    assert decode(raw) == hello


def test_a_measured_speed_gives_seconds(measured: Speed) -> None:
    model = ProductModel(measured.products)
    for size in PRODUCTS:
        assert 0 < model.seconds(ProductWork(*size, 1.0)) < 60
