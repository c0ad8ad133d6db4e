"""A graph is accepted when it consists of what our graphs have, and of nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from fedvit.errors import BadPayload
from fedvit.onnx_file import check_self_contained
from fedvit.protobuf import bytes_field, number_field
from tests.support.codes import has_code

PROBES = sorted((Path(__file__).parents[3] / "profiles/probes/graphs").glob("*.onnx"))
ELSEWHERE = "a tensor lies in another file"


def honest() -> ModelProto:
    """y = x + w, with the weight inside of the graph."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "y")]
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], raw_data=bytes(16))
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    made: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made


def test_graphs_of_ours_are_accepted() -> None:
    assert len(PROBES) == 17
    for source in (honest().SerializeToString(), *PROBES):
        check_self_contained(source)


def elsewhere() -> TensorProto:
    tensor = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="beside.bin")
    return tensor


def inner() -> GraphProto:
    return GraphProto(name="inner", initializer=[elsewhere()])


def with_attribute(model: ModelProto, **content: object) -> None:
    model.graph.node[0].attribute.append(AttributeProto(name="a", **content))


def with_node(model: ModelProto, operator: str, domain: str) -> None:
    made: NodeProto = helper.make_node(operator, ["x"], ["z"], domain=domain, ep_cache_context="beside.bin")
    model.graph.node.append(made)


REFUSED: dict[str, tuple[Callable[[ModelProto], object], str]] = {
    "a weight": (lambda model: model.graph.initializer.append(elsewhere()), ELSEWHERE),
    "a constant": (lambda model: with_attribute(model, t=elsewhere()), ELSEWHERE),
    "a location without a name": (
        lambda model: setattr(model.graph.initializer[0], "data_location", TensorProto.EXTERNAL),
        ELSEWHERE,
    ),
    "a list of tensors": (
        lambda model: with_attribute(model, tensors=[elsewhere()]),
        "field 10 of message 'attribute'",
    ),
    "a graph in a node": (lambda model: with_attribute(model, g=inner()), "field 6 of message 'attribute'"),
    "graphs in a node": (lambda model: with_attribute(model, graphs=[inner()]), "field 11 of message 'attribute'"),
    "a sparse tensor": (
        lambda model: model.graph.sparse_initializer.add().values.CopyFrom(elsewhere()),
        "field 15 of message 'graph'",
    ),
    "a function": (lambda model: model.functions.add().node.add(), "field 25 of message 'model'"),
    "training": (lambda model: model.training_info.add().algorithm.CopyFrom(inner()), "field 20 of message 'model'"),
    "a compiled graph": (lambda model: with_node(model, "EPContext", "com.microsoft"), "com.microsoft.EPContext"),
    "one of ONNX's own": (lambda model: with_node(model, "EPContext", ""), "operator 'EPContext'"),
    "one of another set": (lambda model: with_node(model, "EPContext", "x"), "x.EPContext"),
    "an operator of onnxruntime's": (lambda model: with_node(model, "Snpe", "com.microsoft"), "com.microsoft.Snpe"),
    "session options": (lambda model: model.metadata_props.add(key="ort_config", value="{}"), "ort_config"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_name_a_file_is_refused(what: str) -> None:
    change, words = REFUSED[what]
    model = honest()
    change(model)
    with pytest.raises(BadPayload, check=has_code("FV2306", words)):
        check_self_contained(model.SerializeToString())


HONEST = honest().SerializeToString()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        number_field(1, 8),
        HONEST + bytes_field(99, "x"),
        HONEST + bytes_field(7, b""),  # readers merge them
        number_field(7, 1),
        bytes_field(1, "x") + HONEST,
        bytes_field(2, "  ORTM") + HONEST,
        HONEST[:-1],
    ],
)
def test_a_file_in_another_form_is_refused(raw: bytes) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2306")):
        check_self_contained(raw)


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.onnx").write_bytes(HONEST[:-1])
    with pytest.raises(BadPayload):
        check_self_contained(tmp_path / "some.onnx")
