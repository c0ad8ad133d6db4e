"""How far a file may be from the original."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.bundle.assemble import IMAGE, LOGITS, PROBABILITIES, Precision
from export.bundle.measure import RANDOM_PICTURES, check_parity, open_session
from fedvit.data.images import Floats
from fedvit.errors import ExportMismatch


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    """A file that answers with the mean of each colour."""
    shapes = {IMAGE: ["n", 3, 2, 2], LOGITS: ["n", 3], PROBABILITIES: ["n", 3]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    nodes = [helper.make_node("ReduceMean", [IMAGE, "axes"], [name], keepdims=0) for name in (LOGITS, PROBABILITIES)]
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    graph = helper.make_graph(nodes, "means", [values[IMAGE]], [values[LOGITS], values[PROBABILITIES]], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return open_session(model.SerializeToString(), 1)


@pytest.fixture
def images() -> Floats:
    return np.random.default_rng(0).random((RANDOM_PICTURES, 3, 2, 2), dtype=np.float32)


@pytest.mark.parametrize(("pictures", "agrees"), [(0, True), (4, True), (5, False), (64, False)])
def test_where_neighbours_vote_a_few_pictures_may_have_asked_another(
    session: onnxruntime.InferenceSession, images: Floats, pictures: int, agrees: bool
) -> None:
    """Four of 64, the first among them, which is answered by itself as well; by how much does not matter."""
    want = images.mean(axis=(2, 3))
    want[:pictures] += 0.05
    if agrees:
        assert check_parity(session, Precision.FP32, images, want, voted=True).difference < 1e-6
    else:
        with pytest.raises(ExportMismatch):
            check_parity(session, Precision.FP32, images, want, voted=True)


def test_of_logits_no_picture_may_differ(session: onnxruntime.InferenceSession, images: Floats) -> None:
    want = images.mean(axis=(2, 3))
    assert check_parity(session, Precision.FP32, images, want, voted=False).difference < 1e-6
    want[7] += 0.05
    with pytest.raises(ExportMismatch):
        check_parity(session, Precision.FP32, images, want, voted=False)


@pytest.mark.parametrize("voted", [True, False])
def test_nan_is_a_difference_in_any_picture(session: onnxruntime.InferenceSession, images: Floats, voted: bool) -> None:
    want = images.mean(axis=(2, 3))
    images[7, 0, 0, 0] = np.nan
    with pytest.raises(ExportMismatch):
        check_parity(session, Precision.FP32, images, want, voted=voted)
