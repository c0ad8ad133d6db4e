"""From a function of tensors to a graph with the same names."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from export.trace import IR_VERSION, OPSET, to_onnx, trace
from fedvit.methods.base import list_trained
from fedvit.methods.calculus import TorchCalculus
from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd
from fedvit.methods.step import (
    PIECE,
    Step,
    Update,
    example_inputs,
    first_step_inputs,
    steps_of,
    update_step,
    whole_step,
)
from tests.support.steps import Session, assert_names_of_the_contract, in_parts, run, whole

if TYPE_CHECKING:
    from tests.unit.export.conftest import Made

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = {"a": torch.randn(3, 4, generator=GENERATOR), "b": torch.randn(4, generator=GENERATOR)}

# --- the key ------------------------------------------------------------------------------------------


def plain(inputs: Any) -> dict[str, Tensor]:
    return {"y": inputs["a"] * 2 + inputs["b"]}


def same_in_other_words(inputs: Any) -> dict[str, Tensor]:
    doubled = torch.mul(inputs["a"], 2)
    result = torch.add(doubled, inputs["b"])
    return {"y": result}


def test_equal_functions_have_equal_keys() -> None:
    """Independent of their author and of the values of the inputs."""
    key = trace(plain, INPUTS).key
    assert trace(plain, INPUTS).key == key
    assert trace(same_in_other_words, INPUTS).key == key
    assert trace(plain, {name: value + 1 for name, value in INPUTS.items()}).key == key


def constant(value: float) -> Step:
    return lambda inputs: {"y": inputs["a"] * torch.tensor([value, 2.0, 3.0, 4.0])}


OTHERS: dict[str, tuple[Step, dict[str, Tensor]]] = {
    "another constant": (lambda i: {"y": i["a"] * 3 + i["b"]}, INPUTS),
    "a constant that differs in the 9th digit": (lambda i: {"y": i["a"] * 2.00000001 + i["b"]}, INPUTS),
    "another operator": (lambda i: {"y": i["a"] * 2 - i["b"]}, INPUTS),
    "another order": (lambda i: {"y": (i["a"] + i["b"]) * 2}, INPUTS),
    "another operand": (lambda i: {"y": i["b"] * 2 + i["a"]}, INPUTS),
    "one operator more": (lambda i: {"y": (i["a"] * 2 + i["b"]).relu()}, INPUTS),
    "another shape": (plain, {**INPUTS, "a": torch.zeros(5, 4)}),
    "another dtype": (plain, {**INPUTS, "a": INPUTS["a"].double()}),
    "another name of an input": (lambda i: {"y": i["c"] * 2 + i["b"]}, {"c": INPUTS["a"], "b": INPUTS["b"]}),
    "another order of inputs": (plain, {"b": INPUTS["b"], "a": INPUTS["a"]}),
    "another name of an output": (lambda i: {"z": i["a"] * 2 + i["b"]}, INPUTS),
    "one output more": (lambda i: {**plain(i), "z": i["a"]}, INPUTS),
    "a tensor that is a constant": (constant(1.0), INPUTS),
    "another value in that tensor": (constant(1.5), INPUTS),
}


def test_different_functions_have_different_keys() -> None:
    """Each differs from the plain one and from every other: a graph out of the cache must be the right one."""
    keys = {name: trace(step, inputs).key for name, (step, inputs) in OTHERS.items()}
    keys["plain"] = trace(plain, INPUTS).key
    assert len(set(keys.values())) == len(keys), keys


# --- the graph ----------------------------------------------------------------------------------------


def twice(inputs: Any) -> dict[str, Tensor]:
    doubled = inputs["a"] * 2
    return {"first": doubled, "again": doubled, "input": inputs["b"]}


def gradient(inputs: Any) -> dict[str, Tensor]:
    """Takes a gradient inside, as every training step does."""
    grads = torch.func.grad(lambda a: (torch.tanh(a) * inputs["b"]).sum())(inputs["a"])
    return {"grads": grads}


@pytest.mark.parametrize("step", [plain, twice, gradient, constant(1.5)])
def test_a_graph_computes_what_the_function_computes(step: Callable[[Any], dict[str, Tensor]]) -> None:
    """Also when an output is an input, or one value is two outputs."""
    traced = trace(step, INPUTS)
    got = run(to_onnx(traced), INPUTS)
    want = step(INPUTS)
    assert list(got) == list(want) == list(traced.outputs)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value.numpy(), rtol=1e-6, atol=1e-7, err_msg=name)


def test_traces_keep_unneeded_inputs_and_give_equal_bytes() -> None:
    # an input that is not needed stays: A device feeds by name what the Program describes
    model = onnx.load_from_string(to_onnx(trace(lambda inputs: {"y": inputs["b"] + 1}, INPUTS)))
    assert [value.name for value in model.graph.input] == ["a", "b"]
    # equal traces give equal bytes: A Program is known by the digest of its graphs: two servers must make the same
    assert to_onnx(trace(gradient, INPUTS)) == to_onnx(trace(gradient, INPUTS))


# --- optimizers ---------------------------------------------------------------------------------------


def in_torch(rule: Optimizer, value: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    value = value.clone().requires_grad_()
    optimizer = rule.in_torch([value], lr)
    for grad in grads:
        value.grad = grad.clone()
        optimizer.step()
    return value.detach()


@pytest.mark.parametrize("rule", [Sgd(weight_decay=0.1), MomentumSgd(weight_decay=0.1), AdamW(weight_decay=0.1)])
def test_an_update_with_gradients_of_zero(rule: Optimizer) -> None:
    """From empty slots, with gradients that are exactly zero, tiny and large: without its eps of
    1e-8 AdamW computes 0 / 0. The graph's first three steps equal torch.optim's."""
    grad = torch.tensor([0.0, 0.0, 1e-12, 1e-8, -1e-4, 1.0, -1e4, 0.0])
    value = torch.tensor([1.0, -2.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0])
    inputs = {
        "value": value,
        "grad": grad,
        "hyper/lr": torch.tensor(0.1),
        "hyper/step": torch.tensor(1.0),
        **{f"slot/{slot}": torch.zeros(8) for slot in rule.slots},
    }
    graph = to_onnx(trace(update_step(rule), inputs))
    grads = [grad, grad, grad.flip(0)]
    for number, gradient in enumerate(grads, start=1):
        outputs = run(graph, {**inputs, "grad": gradient, "hyper/step": torch.tensor(float(number))})
        inputs |= {name.removeprefix("new/"): torch.from_numpy(array) for name, array in outputs.items()}
        assert all(np.isfinite(array).all() for array in outputs.values())
        want = in_torch(rule, value, grads[:number], 0.1)
        np.testing.assert_allclose(outputs["new/value"], want.numpy(), rtol=2e-5, atol=1e-6)


# --- whole steps --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fedavg", "eftvit", "everything"])
def exported(request: pytest.FixtureRequest, tiny: Any, everything: "Made") -> Any:
    """A method, its model and batch, and its graphs; "everything" has every kind of them."""
    return everything if request.param == "everything" else tiny(request.param)


def test_a_methods_graphs_hold_no_weights(exported: Any) -> None:
    """Weights are inputs, and what is left are small numbers and shapes. No constant is as large as the model's
    smallest matrix (10 * 32 float32), let alone an activation: zeros for 32 samples of ViT-B would be 19 MB."""
    for name, graph in exported.graphs.items():
        model = onnx.load_from_string(graph.content)
        sizes = [numpy_helper.to_array(tensor).nbytes for tensor in model.graph.initializer]
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    sizes.append(numpy_helper.to_array(attribute.t).nbytes)
        assert max(sizes, default=0) < 10 * 32 * 4, name
        assert sum(sizes) < 10_000, name


def test_a_methods_graphs_have_the_names_of_the_contract(exported: Any) -> None:
    """In the file itself, and the shapes that a device feeds. An update takes any length, and names it once."""
    steps = steps_of(exported.method, exported.vit)
    assert set(exported.graphs) == set(steps)
    for name, graph in exported.graphs.items():
        model = onnx.load_from_string(graph.content)
        inputs = {
            value.name: tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
            for value in model.graph.input
        }
        example = example_inputs(exported.method, exported.vit, exported.batch, steps[name])
        any_length = "length" if isinstance(steps[name], Update) else PIECE
        assert inputs == {
            name: tuple(any_length if dim == PIECE else dim for dim in value.shape) for name, value in example.items()
        }
        outputs = {value.name for value in model.graph.output}
        assert_names_of_the_contract(exported.method, exported.vit, steps[name], set(inputs), outputs)


def test_a_methods_graphs_run_on_plain_onnxruntime(exported: Any) -> None:
    """Standard operators of one set only, no functions, no subgraphs' leftovers, and nothing of the server's paths."""
    for graph in exported.graphs.values():
        model = onnx.load_from_string(graph.content)
        assert model.ir_version == IR_VERSION
        assert [(entry.domain, entry.version) for entry in model.opset_import if entry.domain == ""] == [("", OPSET)]
        assert not model.functions
        assert {node.domain for node in model.graph.node} == {""}
        assert not any(node.op_type.startswith("Random") for node in model.graph.node)
        assert b".py" not in graph.content
        assert b"site-packages" not in graph.content


def test_the_first_step_of_a_whole_graph_is_torchs(tiny: Any) -> None:
    """EFTViT with AdamW from empty slots, one sample: positions of patches that were masked get no gradient. Half of
    the 8 rows are padding. All is finite, and equals eager torch with torch.optim."""
    method, vit, batch, graphs = tiny("eftvit")
    (phase,) = method.phases(vit)
    names = list_trained(method, vit, phase)
    inputs = first_step_inputs(example_inputs(method, vit, batch, whole(phase), seed=4))
    inputs["batch/kept"] = torch.tensor([1, 2, 3, 4]).expand(8, -1).contiguous()
    inputs["batch/weight"] = (torch.arange(8) < 4).float()
    train, update = (Session(graphs[name].content) for name in ("train", "update"))
    got = {name: value.numpy() for name, value in in_parts(phase, names, train, update, 8)(inputs).items()}
    want = whole_step(method, vit, phase, TorchCalculus)(inputs)
    assert got.keys() == want.keys()
    assert all(np.isfinite(value).all() for value in got.values())
    untouched = np.setdiff1d(np.arange(17), [0, 2, 3, 4, 5])
    assert not got["new/slot/exp_avg_sq/pos_embed"][0, untouched].any()
    decayed = inputs["tensor/pos_embed"][0, untouched] * (1 - 0.01 * method.weight_decay)
    np.testing.assert_allclose(got["new/tensor/pos_embed"][0, untouched], decayed.numpy(), rtol=1e-6)
    for name in ("metric/loss", "collect/features.2", "new/slot/exp_avg/pos_embed", "new/slot/exp_avg/head.weight"):
        wanted = want[name].detach().numpy()
        np.testing.assert_allclose(got[name], wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=name)
    # in a first step AdamW moves each element by lr whatever its gradient: compared where that is more than noise
    for name in names:
        steady = np.abs(want[f"new/slot/exp_avg/{name}"].numpy()) > 1e-6
        difference = np.abs(got[f"new/tensor/{name}"] - want[f"new/tensor/{name}"].numpy())
        assert difference[steady].max(initial=0) < 1e-3 * 0.01, name
        assert steady.any(), name


def test_a_trace_says_which_outputs_it_has() -> None:
    traced = trace(twice, INPUTS)
    assert traced.outputs == ("first", "again", "input")
    assert list(traced.inputs) == ["a", "b"]
    assert math.prod(traced.inputs["a"].shape) == 12
