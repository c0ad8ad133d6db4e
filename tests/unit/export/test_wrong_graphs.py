"""Every single mistake that can be made in a real graph is refused: a node at a time is written wrongly."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import NodeProto, helper, numpy_helper
from torch import Tensor

from export.graphs import export_unverified
from export.trace import to_onnx, trace
from export.verify import reference_predict, reference_step, reference_update, verify, without_rounding
from fedvit.errors import ExportMismatch
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.step import Step, Update, example_inputs, predict_step, whole_step
from fedvit.models import SMALL, build_vit
from fedvit.precision import Compute
from fedvit.program import Batch
from tests.support.steps import whole

FLOAT, DOUBLE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE


class Right(NamedTuple):
    """A right graph, and what torch makes of its inputs, worked out once."""

    model: onnx.ModelProto
    inputs: Mapping[str, Tensor]
    reference: Step

    def verify(self, model: onnx.ModelProto) -> float:
        return verify(model.SerializeToString(), self.reference, self.inputs, "graph 'x'")


@pytest.fixture(scope="module")
def right() -> dict[str, Right]:
    options = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 1, "mlp_ratio": 1.0}
    vit = build_vit(SMALL, 3, seed=0, options=options)
    with torch.no_grad():
        for value in vit.parameters():
            value.mul_(5 if value.dim() == 2 else 1)  # as trained ones: a new model's attention looks everywhere alike
    method = FedAvg(batch_size=4, optimizer="adamw", weight_decay=0.1)
    batch = Batch(image_size=16, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3)
    [phase] = method.phases(vit)
    rule = method.optimizer_rule()

    def make_graph(graph: bytes, inputs: Mapping[str, Tensor], reference: Step) -> Right:
        exact = reference({name: v.double() if v.is_floating_point() else v for name, v in inputs.items()})
        return Right(onnx.load_from_string(graph), inputs, lambda _: exact)

    graphs = export_unverified(method, vit, batch)
    train, update, step, predict = (
        example_inputs(method, vit, batch, serves) for serves in (phase, Update(rule), whole(phase), None)
    )
    answers = predict_step(method, vit)
    return {
        "train": make_graph(graphs["train"], train, reference_step(method, vit, phase)),
        "update": make_graph(graphs["update"], update, reference_update(rule)),
        "step": make_graph(
            to_onnx(trace(whole_step(method, vit, whole(phase)), step)), step, reference_step(method, vit, whole(phase))
        ),
        "predict": make_graph(graphs["predict"], predict, lambda inputs: reference_predict(answers, inputs)),
    }


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[object, ...]]:
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    shapes = {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
    return shapes | {value.name: tuple(value.dims) for value in model.graph.initializer}


# --- one mistake in a node ----------------------------------------------------------------------------

Mistake = Callable[[onnx.ModelProto, NodeProto], None]


def flip(model: onnx.ModelProto, node: NodeProto) -> None:
    """b - a, b / a, b a."""
    node.input[0], node.input[1] = node.input[1], node.input[0]


def without(term: int) -> Mistake:
    def drop(model: onnx.ModelProto, node: NodeProto) -> None:
        kept = node.input[1 - term]
        node.CopyFrom(helper.make_node("Identity", [kept], [*node.output], name=node.name))

    return drop


def skip_node(model: onnx.ModelProto, node: NodeProto) -> None:
    node.CopyFrom(helper.make_node("Identity", [node.input[0]], [*node.output], name=node.name))


def as_another(kind: str) -> Mistake:
    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        node.op_type = kind

    return change


def with_attribute(name: str, value: float | str) -> Mistake:
    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def transpose(flag: str) -> Mistake:
    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        now = sum(attribute.i for attribute in node.attribute if attribute.name == flag)
        with_attribute(flag, 1 - now)(model, node)

    return change


def no_third(model: onnx.ModelProto, node: NodeProto) -> None:
    del node.input[2]


def scaled(model: onnx.ModelProto, node: NodeProto) -> None:
    """The first number among its operands, a hundredth too large."""
    numbers = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    for at, name in enumerate(node.input):
        if name in numbers and numbers[name].ndim == 0:
            wrong = np.asarray(numbers[name] * 1.01, numbers[name].dtype)
            model.graph.initializer.append(numpy_helper.from_array(wrong, "wrong"))
            node.input[at] = "wrong"
            return


def mistakes(model: onnx.ModelProto) -> Iterator[tuple[str, int, Mistake]]:
    """What can be written wrongly so that every shape stays right: what it is, at which node."""
    shapes = _shapes(model)
    numbers = {one.name for one in model.graph.initializer if not one.dims and one.data_type in (FLOAT, DOUBLE)}
    for at, node in enumerate(model.graph.node):
        named = f"{node.op_type} {node.output[0]}"
        given = [shapes.get(name, ()) for name in node.input]
        made = shapes.get(node.output[0], ())
        found: dict[str, Mistake] = {}
        match node.op_type:
            case "Sub" | "Div":
                found["flipped"] = flip
                found["another"] = as_another("Add" if node.op_type == "Sub" else "Mul")
            case "Add" | "Mul":
                found |= {f"without term {term}": without(term) for term in (0, 1) if given[1 - term] == made}
                found["another"] = as_another("Sub" if node.op_type == "Add" else "Div")
            case "MatMul" if given[0] == given[1]:
                found["flipped"] = flip
            case "Gemm":
                square = [
                    flag for flag, shape in zip(("transA", "transB"), given, strict=False) if len(set(shape)) == 1
                ]
                found |= {flag: transpose(flag) for flag in square}
                if len(node.input) == 3:
                    found["without bias"] = no_third
            case "ReduceSum" | "ReduceMean":
                found["another"] = as_another("ReduceMean" if node.op_type == "ReduceSum" else "ReduceSum")
            case "LayerNormalization":
                found["epsilon"] = with_attribute("epsilon", 1e-5)
                found["without bias"] = no_third
            case "Gelu":
                found["tanh"] = with_attribute("approximate", "tanh")
            case "Softmax" | "LogSoftmax":
                found["axis"] = with_attribute("axis", 0)
            case "Sqrt" | "Neg" | "Exp" | "Erf" | "Clip":
                found["skipped"] = skip_node
        if any(name in numbers for name in node.input):
            found["number"] = scaled
        for mistake, make in found.items():
            yield f"{named}: {mistake}", at, make


def is_refused(right: Right, wrong: onnx.ModelProto) -> bool:
    try:
        right.verify(wrong)
    except ExportMismatch:
        return True
    return False


@pytest.mark.parametrize("graph", [pytest.param("train", marks=pytest.mark.slow), "update", "predict"])
def test_every_mistake_in_a_node_is_refused(right: dict[str, Right], graph: str) -> None:
    """Operands that changed places, terms and factors left out, sums for means, wrong numbers and epsilons, matrices
    not transposed: hundreds of graphs."""
    made, unseen, tried = right[graph], [], 0
    assert made.verify(made.model) < 1e-6
    for mistake, at, make in mistakes(made.model):
        wrong = copy_model(made.model)
        make(wrong, wrong.graph.node[at])
        tried += 1
        if not is_refused(made, wrong):
            unseen.append(mistake)
    assert tried > 30
    # a divisor that a batch without samples would need: the example has some
    assert [mistake for mistake in unseen if not mistake.startswith("Clip ")] == []


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


# --- a wrong output -----------------------------------------------------------------------------------


def with_change(model: onnx.ModelProto, output: str, factor: float) -> onnx.ModelProto:
    """The graph, whose change of one output is so many times what it should be."""
    wrong, start = copy_model(model), output.removeprefix("new/")
    for node in wrong.graph.node:
        node.output[:] = ["right" if name == output else name for name in node.output]
        node.input[:] = ["right" if name == output else name for name in node.input]
    wrong.graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), "factor"))
    wrong.graph.node.extend(
        [
            helper.make_node("Sub", ["right", start], ["change"]),
            helper.make_node("Mul", ["change", "factor"], ["wrong change"]),
            helper.make_node("Add", [start, "wrong change"], [output]),
        ]
    )
    return wrong


@pytest.mark.parametrize("graph", ["train", "step"])
@pytest.mark.parametrize("factor", [1.01, *(pytest.param(factor, marks=pytest.mark.slow) for factor in (0.0, -1.0))])
def test_one_tensor_that_moves_a_little_too_far_is_refused(right: dict[str, Right], graph: str, factor: float) -> None:
    """Whichever of them, the smallest too: a hundredth too far, not at all, or backwards."""
    made = right[graph]
    outputs = [one.name for one in made.model.graph.output if one.name.startswith(("new/grad/", "new/tensor/"))]
    assert len(outputs) == 20
    assert [output for output in outputs if not is_refused(made, with_change(made.model, output, factor))] == []


def test_adamws_epsilon_shows_in_the_graph_of_an_update(right: dict[str, Right]) -> None:
    """Where squares are far above zero, as in the example of a whole step, nobody could tell one from the other."""
    seen = {}
    for graph in ("update", "step"):
        wrong = copy_model(right[graph].model)
        [epsilon] = [one for one in wrong.graph.initializer if _number(one) == np.float32(1e-8)]
        epsilon.CopyFrom(numpy_helper.from_array(np.array(2e-8, np.float32), epsilon.name))
        seen[graph] = is_refused(right[graph], wrong)
    assert seen == {"update": True, "step": False}


def _number(constant: onnx.TensorProto) -> object:
    value = numpy_helper.to_array(constant)
    return value.item() if value.ndim == 0 else None


# --- products of integers -----------------------------------------------------------------------------


def of_rounded_products(compute: Compute) -> Right:
    options = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "heads": 2, "mlp_ratio": 1.0}
    method = EFTViT(batch_size=4, local_blocks=1, mask=0.5, compute=compute)
    vit = build_vit(SMALL, 3, seed=0, options=options)
    batch = Batch(image_size=16, patch_size=8, batch_size=4, mean=(0.5,) * 3, std=(0.5,) * 3, mask_ratio=0.5)
    [phase] = method.phases(vit)
    graph = onnx.load_from_string(export_unverified(method, vit, batch)["train"])
    inputs = example_inputs(method, vit, batch, phase)
    assert all(value.abs().max() <= 64 for value in inputs.values() if value.dtype is torch.int8)
    exact = reference_step(method, vit, phase)(
        {name: v.double() if v.is_floating_point() else v for name, v in inputs.items()}
    )
    return Right(graph, inputs, lambda _: exact)


@pytest.fixture(scope="module")
def integers() -> Right:
    return of_rounded_products("int8")


def test_products_of_float16_change_gradients_by_thousandths() -> None:
    """Or not at all on a processor without them; without their rounding the graph is as near to torch as one of
    floats."""
    halves = of_rounded_products("fp16")
    assert halves.verify(halves.model) < 1e-2
    plain = without_rounding(halves.model.SerializeToString())
    assert plain is not None
    assert halves.verify(onnx.load_from_string(plain)) < 1e-5


def test_products_of_integers_change_gradients_by_percents(integers: Right) -> None:
    """And nothing but their rounding does: without it the graph is as near to torch as one of floats."""
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in integers.model.graph.node) == 10
    assert 1e-3 < integers.verify(integers.model) < 0.1
    plain = without_rounding(integers.model.SerializeToString())
    assert plain is not None
    assert not {"QuantizeLinear", "MatMulIntegerToFloat"} & {n.op_type for n in onnx.load_from_string(plain).graph.node}
    assert integers.verify(onnx.load_from_string(plain)) < 1e-5


@pytest.mark.slow
def test_every_mistake_in_a_graph_of_integers_is_refused(integers: Right) -> None:
    """Wrong numbers and terms of the kinds that floats can have, and those of integers: a scale that is not the one it
    was rounded with, another zero, rows in place of columns, one operand in place of another."""
    products = [at for at, node in enumerate(integers.model.graph.node) if node.op_type == "MatMulIntegerToFloat"]
    near = around(integers.model, products[0]) | around(integers.model, products[-1])  # forward, backward
    unseen, tried = [], 0
    for mistake, at, make in (*mistakes(integers.model), *integer_mistakes(integers.model)):
        if at not in near:
            continue
        wrong = copy_model(integers.model)
        make(wrong, wrong.graph.node[at])
        tried += 1
        if not is_refused(integers, wrong):
            unseen.append(mistake)
    assert tried > 25
    scales = {node.input[1] for node in integers.model.graph.node if node.op_type == "QuantizeLinear"}
    # a divisor that the example does not need, and what makes a scale: it changes how far numbers are rounded alone,
    # which is judged by its effect
    benign = ("Clip ", "Max ", "Neg ", *(f"Mul {name}:" for name in scales))
    assert [mistake for mistake in unseen if not mistake.startswith(benign)] == []


def around(model: onnx.ModelProto, product: int) -> set[int]:
    """A product, what rounds its factors, and what scales it and adds its bias."""
    nodes = [*model.graph.node]
    maker = {name: at for at, node in enumerate(nodes) for name in node.output}
    before = {"QuantizeLinear", "Mul", "Max", "Neg", "ReduceMax", "ReduceMin"}
    found, waiting = {product}, [*nodes[product].input]
    while waiting:
        at = maker.get(waiting.pop())
        if at is not None and nodes[at].op_type in before and at not in found:
            found.add(at)
            waiting += nodes[at].input
    read = {*nodes[product].output}
    for _ in range(2):
        after = {at for at, node in enumerate(nodes) if node.op_type in ("Mul", "Add") and read & {*node.input}}
        found |= after
        read = {name for at in after for name in nodes[at].output}
    return found


def integer_mistakes(model: onnx.ModelProto) -> Iterator[tuple[str, int, Mistake]]:
    shapes = _shapes(model)
    weights = [value.name for value in model.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.INT8]
    squares = [name for name in weights if len(set(shapes[name])) == 1]
    for at, node in enumerate(model.graph.node):
        named = f"{node.op_type} {node.output[0]}"
        if node.op_type == "QuantizeLinear":
            yield f"{named}: zero of the integers", at, with_zero(2, np.full(shapes[node.input[2]], 127, np.uint8))
            yield f"{named}: a hundred times the scale", at, with_scale(1, 100.0)
            yield f"{named}: half the scale", at, with_scale(1, 0.5)
        elif node.op_type == "MatMulIntegerToFloat":
            yield f"{named}: zero of the product", at, with_zero(4, np.array(127, np.uint8))
            yield f"{named}: a hundredth more", at, with_number(2, 1.01)
            yield f"{named}: other scales of the columns", at, with_number(3, 1.1)
            for other in squares:
                if shapes[other] == shapes[node.input[1]] and other not in node.input:
                    yield f"{named}: {other}", at, reading(1, other)


def with_zero(at: int, zero: np.ndarray[Any, Any]) -> Mistake:
    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(zero, "wrong"))
        node.input[at] = "wrong"

    return change


def with_number(at: int, number: float) -> Mistake:
    """In place of an operand, of its shape."""

    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        made = np.full(_shapes(model)[node.input[at]], number, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(made, "wrong"))
        node.input[at] = "wrong"

    return change


def with_scale(at: int, factor: float) -> Mistake:
    """An operand is so many times what it should be, for this reader alone."""

    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), "factor"))
        scaled = helper.make_node("Mul", [node.input[at], "factor"], ["wrong"])
        node.input[at] = "wrong"
        model.graph.node.insert([*model.graph.node].index(node), scaled)

    return change


def reading(at: int, name: str) -> Mistake:
    def change(model: onnx.ModelProto, node: NodeProto) -> None:
        node.input[at] = name

    return change


@pytest.mark.slow
def test_a_trained_weight_that_is_rounded_wrongly_is_refused() -> None:
    """One of its matrices has more rows than fit into a constant that is written out."""
    options = {"image_size": 8, "patch_size": 4, "width": 128, "depth": 1, "heads": 2, "mlp_ratio": 9.0}
    vit, method = build_vit(SMALL, 3, seed=0, options=options), FedAvg(batch_size=2, compute="int8")
    batch = Batch(image_size=8, patch_size=4, batch_size=2, mean=(0.5,) * 3, std=(0.5,) * 3)
    [phase] = method.phases(vit)
    inputs = example_inputs(method, vit, batch, phase)
    reference = reference_step(method, vit, phase)
    exact = reference({name: v.double() if v.is_floating_point() else v for name, v in inputs.items()})
    trained = Right(onnx.load_from_string(export_unverified(method, vit, batch)["train"]), inputs, lambda _: exact)
    assert 1e-3 < trained.verify(trained.model) < 0.1
    weights = [
        at
        for at, node in enumerate(trained.model.graph.node)
        if node.op_type == "QuantizeLinear" and node.input[0].startswith("tensor/")
    ]
    assert len(weights) == 3  # projection and MLP; the last block splits its weight of queries, keys and values
    unseen = []
    for at in weights:
        rows = _shapes(trained.model)[trained.model.graph.node[at].input[2]]
        for mistake in (with_zero(2, np.full(rows, 9, np.int8)), with_scale(1, 100.0), with_scale(1, 0.25)):
            wrong = copy_model(trained.model)
            mistake(wrong, wrong.graph.node[at])
            if not is_refused(trained, wrong):
                unseen.append(at)
    assert unseen == []


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.2, 0.0, -1.0])
def test_a_gradient_of_integers_of_another_length_or_direction_is_refused(integers: Right, factor: float) -> None:
    outputs = [one.name for one in integers.model.graph.output if one.name.startswith("new/grad/")]
    assert len(outputs) > 10
    assert [output for output in outputs if not is_refused(integers, with_change(integers.model, output, factor))] == []


def test_integers_too_coarse_for_a_cosine_of_099_are_refused(integers: Right) -> None:
    """Two steps to both sides of zero in place of 127, in every product: nothing is wrong with it but rounding."""
    wrong = copy_model(integers.model)
    for constant in wrong.graph.initializer:
        if _number(constant) == np.float32(1 / 127):
            constant.CopyFrom(numpy_helper.from_array(np.array(1 / 2, np.float32), constant.name))
    with pytest.raises(ExportMismatch):
        integers.verify(wrong)


# --- inputs that leave few digits ---------------------------------------------------------------------

TERMS, ROWS, WIDTH = 48, 6, 8


def sums(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Terms, and their sum, which cancels: two gradients of one kind."""
    terms = inputs["tensor/a"] * inputs["tensor/b"]
    return {"new/grad/terms": inputs["grad/terms"] + terms, "new/grad/sum": inputs["grad/sum"] + terms.sum()}


def norms(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Normalised rows, and gradients through them."""

    def loss(values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.nn.functional.layer_norm(values["rows"], (WIDTH,), values["weight"], values["bias"], 1e-6)
        return (rows * inputs["batch/patches"]).sum(), rows

    values = {name: inputs[f"tensor/{name}"] for name in ("rows", "weight", "bias")}
    grads, rows = torch.func.grad(loss, has_aux=True)(values)
    return {"logits": rows} | {f"new/grad/{name}": inputs[f"grad/{name}"] + grad for name, grad in grads.items()}


def cancelling(seed: int, size: float, left: float) -> dict[str, Tensor]:
    """Terms up to 10^size, of which 10^left remains in the sum."""
    draw = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(TERMS, generator=draw) for _ in range(2))
    b[-1] = (10**left - (a * b)[:-1].double().sum()) / a[-1]
    start = {"grad/terms": torch.randn(TERMS, generator=draw), "grad/sum": torch.tensor(1.0)}
    return {"tensor/a": a, "tensor/b": b * 10**size} | {name: value * 10**size for name, value in start.items()}


def constant_rows(seed: int, size: float, left: float) -> dict[str, Tensor]:
    """Rows around 10^size whose elements differ by 10^left of it; the first by nothing, the last by much."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    differ = normal(ROWS, WIDTH) * 10**left
    differ[0], differ[-1] = 0, normal(WIDTH)
    values = {"rows": 10**size * (1 + differ), "weight": 1 + 0.1 * normal(WIDTH), "bias": normal(WIDTH)}
    grads = {f"grad/{name}": 100 * (1 + normal(*value.shape).abs()) for name, value in values.items()}
    return {f"tensor/{name}": value for name, value in values.items()} | grads | {"batch/patches": normal(ROWS, WIDTH)}


HARD = {"sums": (sums, cancelling, st.floats(-15, 15), 15.0), "norms": (norms, constant_rows, st.floats(-3, 1), 0.0)}
"""Step, inputs, sizes, and the largest size at which mistakes can be told: the gradient of a constant row is multiplied
by 1 / sqrt(epsilon) = 1000, and its rounding hides the ever smaller gradients of larger rows."""


@pytest.fixture(scope="module")
def hard() -> dict[str, onnx.ModelProto]:
    return {
        name: onnx.load_from_string(to_onnx(trace(step, make(0, 0.0, 0.0)))) for name, (step, make, *_) in HARD.items()
    }


@pytest.mark.parametrize("name", HARD)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**31), left=st.floats(-8, 0))
def test_where_few_digits_are_left_right_graphs_pass_and_wrong_ones_do_not(
    hard: dict[str, onnx.ModelProto], name: str, data: st.DataObject, seed: int, left: float
) -> None:
    """What cancels to less than 1e-4 of its terms is too little to be judged, and does no harm."""
    step, make, sizes, told_up_to = HARD[name]
    size = data.draw(sizes)
    right = Right(hard[name], make(seed, size, left), step)
    assert not is_refused(right, right.model)
    made = Right(hard[name], make(seed, min(size, told_up_to), max(left, -4)), step)
    wrong = copy_model(made.model)
    mistake, at, change = data.draw(st.sampled_from([*mistakes(wrong)]))
    change(wrong, wrong.graph.node[at])
    assert is_refused(made, wrong), mistake
