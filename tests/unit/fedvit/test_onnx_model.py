"""Models that are written are models by the checker of onnx; what was read is all there again."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from fedvit.errors import BadPayload, ConfigError
from fedvit.onnx_model import FLOAT, MAX_BYTES, Port, make_node, read_integers, read_model, size_bytes, write_model
from tests.support.codes import has_code
from tests.support.tiny import Tiny


@pytest.fixture(scope="session")
def predict(tiny) -> bytes:  # type: ignore[no-untyped-def]
    made: Tiny = tiny("fedavg")
    return made.graphs["predict"].content


def test_a_model_read_and_written_is_the_same(predict: bytes) -> None:
    written = onnx.load_from_string(b"".join(write_model(read_model(predict), {}, {})))
    assert written == onnx.load_from_string(predict)


def test_what_is_read_is_what_onnx_reads(predict: bytes) -> None:
    read, wanted = read_model(predict), onnx.load_from_string(predict)
    assert [entry.kind for entry in read.nodes] == [entry.op_type for entry in wanted.graph.node]
    for entry, other in zip(read.nodes, wanted.graph.node, strict=True):
        assert (entry.inputs, entry.outputs) == (tuple(other.input), tuple(other.output))
        for attribute in other.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if isinstance(value, int):
                assert entry.integer(attribute.name, -99) == value
            elif isinstance(value, list):
                assert entry.integers(attribute.name) == tuple(value)
    assert entry.integers("no such attribute") is None
    for tensor in wanted.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT64:
            assert read_integers(read.constants[tensor.name]) == tuple(numpy_helper.to_array(tensor).ravel())
    shapes = {value.name: value for value in (*wanted.graph.value_info, *wanted.graph.input, *wanted.graph.output)}
    for name, value in shapes.items():
        assert read.shape(name) == tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_tensors_and_metadata_are_written(predict: bytes, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    parts = write_model(read_model(predict), {"tensor": array.T}, {"labels": "ä"})
    read = onnx.load_from_string(b"".join(parts))
    [tensor] = [entry for entry in read.graph.initializer if entry.name == "tensor"]
    assert numpy_helper.to_array(tensor).dtype == dtype
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), array.T)
    assert [(entry.key, entry.value) for entry in read.metadata_props] == [("labels", "ä")]
    assert size_bytes(parts) == len(b"".join(parts))


def test_nodes_and_ports_are_written(predict: bytes) -> None:
    model = read_model(predict)
    made = make_node("Transpose", ["logits"], ["turned"], perm=(1, 0))
    read = onnx.load_from_string(b"".join(write_model(model, {}, {})))
    ours = type(model)(
        nodes=(*model.nodes, made, make_node("Softmax", ["turned"], ["soft"], axis=-1)),
        constants=model.constants,
        inputs=model.inputs,
        outputs={"soft": Port(FLOAT, (10, "batch"))},
        values={},
        rest=model.rest,
        graph_rest=model.graph_rest,
    )
    read = onnx.load_from_string(b"".join(write_model(ours, {}, {})))
    [transpose, softmax] = read.graph.node[-2:]
    assert (transpose.op_type, [*transpose.attribute[0].ints], transpose.name) == ("Transpose", [1, 0], "turned")
    assert softmax.attribute[0].i == -1
    assert onnx.helper.printable_value_info(read.graph.output[0]) == "%soft[FLOAT, 10xbatch]"


def test_a_file_larger_than_protobuf_allows_is_refused(predict: bytes) -> None:
    """2^29 numbers of 4 bytes are 2 GiB, one byte more than the bound; they are never written to."""
    with pytest.raises(ConfigError, check=has_code("FV1906", str(MAX_BYTES))):
        write_model(read_model(predict), {"tensor": np.zeros(2**29, np.float32)}, {})


def test_a_tensor_without_place_is_refused(predict: bytes) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2310", "'w'")):
        write_model(read_model(predict), {"w": np.zeros(2)}, {})


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x0a"])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(BadPayload):
        read_model(content)
