"""The cost of training with kept features, derived by hand."""

from dataclasses import replace

import msgspec
import pytest
from onnx import TensorProto, helper

from fedvit.frozen_part import FrozenPart
from fedvit.onnx_cut import cut_model
from fedvit.onnx_model import read_model
from fedvit.program import Program, Train
from profiles.cost import GraphCost, NodeCost, Product
from profiles.kept_features import PricedCut
from profiles.prediction import ProgramCost
from profiles.program_cost import PricedProgram
from tests.unit.profiles.test_program_cost import GRAPHS, PHASE, program

FIRST = GraphCost((NodeCost("Gemm", Product("weights", 1, 40, 32, 90), 0, "block 0", "mlp", True),), 500, 80)
REST = GraphCost((NodeCost("Gemm", Product("weights", 1, 40, 32, 6), 0, "head", "head", True),), 100, 20)


def make_cut(*changing: str, views: int = 1) -> PricedCut:
    """Return a cut whose first part gives 6 numbers for each image."""
    shapes = {"x": (4, 6), "w": (6, 6), "a": (4, 6), "t": (6, 6), "y": (4, 6)}
    ports = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "t"], ["y"])]
    inputs = [ports[name] for name in ("x", "w", "t")]
    graph = helper.make_graph(nodes, "g", inputs, [ports["y"]], value_info=[ports["a"]])
    opsets = [helper.make_opsetid("", 20)]
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    cut = cut_model(read_model(content), "x", ["w"], "in")
    assert cut
    return PricedCut(FrozenPart(cut, views, ("w",), changing), FIRST, REST)


@pytest.mark.parametrize(("views", "passes", "first"), [(1, 1, 12.0), (1, 4, 3.0), (2, 4, 6.0), (4, 2, 12.0)])
def test_the_first_part_runs_once_for_each_view(views: int, passes: float, first: float) -> None:
    """12 runs of the second part. In later rounds the first one runs again only if its tensors have changed."""
    frozen, moving = make_cut(views=views), make_cut("w", views=views)
    assert frozen.count_feature_runs(12, passes, is_first_round=True) == first
    assert frozen.count_feature_runs(12, passes, is_first_round=False) == 0
    assert moving.count_feature_runs(12, passes, is_first_round=False) == first


def test_room_is_that_of_all_views_of_all_images() -> None:
    cut = make_cut(views=3)
    assert cut.part.numbers == 6
    assert cut.has_room(10, 10 * 3 * 4 * 6)
    assert not cut.has_room(10, 10 * 3 * 4 * 6 - 1)


def in_epochs(epochs: int) -> Train:
    return msgspec.structs.replace(PHASE, epochs=epochs)


def test_features_that_change_are_kept_for_two_epochs_of_each_view() -> None:
    moving, frozen = make_cut("w", views=2).part, make_cut(views=2).part
    assert [moving.is_worth_keeping(in_epochs(epochs)) for epochs in (1, 3, 4)] == [False, False, True]
    assert frozen.is_worth_keeping(in_epochs(1))


def cost_of(made: Program, cut: PricedCut, feature_bytes: int | None) -> ProgramCost:
    return PricedProgram(made, {}, GRAPHS, {"train": cut}).cost(images=20, test_images=6, feature_bytes=feature_bytes)


def test_a_round_costs_less_where_features_are_kept() -> None:
    """20 images in batches of 8 and runs of 4: 5 runs in each of 4 epochs; the first part has those of one epoch."""
    cost = cost_of(program(in_epochs(4)), make_cut(), 10**6)
    assert cost.flops_round == 20 * REST.flops + 5 * FIRST.flops
    assert cost.later_flops_round == 20 * REST.flops
    assert cost.later_step_work
    assert [work.count for work in cost.later_step_work.products] == [pytest.approx(20 / 12), 0.0]
    assert [work.count for work in cost.step_work.products] == [
        pytest.approx(20 / 12), pytest.approx(5 / 12)
    ]  # fmt: skip


@pytest.mark.parametrize("feature_bytes", [None, 20 * 4 * 6 - 1])
def test_a_device_without_room_computes_all_layers_in_each_epoch(feature_bytes: int | None) -> None:
    made = program(in_epochs(4))
    plain = PricedProgram(made, {}, GRAPHS).cost(images=20, test_images=6)
    assert cost_of(made, make_cut(), feature_bytes) == plain
    assert (plain.later_flops_round, plain.later_step_work) == (None, None)


def test_kernels_are_in_both_parts() -> None:
    cut = make_cut()
    small = replace(REST, nodes=REST.nodes[:0])
    cut = cut._replace(rest=replace(REST, with_kernels=small))
    priced = PricedProgram(program(in_epochs(4)), {}, GRAPHS, {"train": cut}).with_kernels
    cost = priced.cost(images=20, test_images=6, feature_bytes=10**6)
    assert cost.later_flops_round == 20 * REST.flops
    assert cost.later_step_work
    assert [work.count for work in cost.later_step_work.products] == [0.0]
