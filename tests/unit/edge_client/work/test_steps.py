"""Graphs on fixed memory: what moves in place is what torch moves, and nothing else is written to.

The model is a line: three tensors, of which one is a scalar, and a loss with a term of the tensors alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value

import edge_client.work.packed_slots
import edge_client.work.steps
from edge_client.work.memory import Buffer, DeviceMemory
from edge_client.work.steps import ALIGNED_ELEMENTS, Bound, Graph, SummedSteps, WholeSteps
from export.trace import to_onnx, trace
from fedvit.errors import BadPayload
from fedvit.methods.optimizers import AdamW, MomentumSgd, Optimizer, Sgd
from fedvit.methods.step import PIECE, Step, update_step
from fedvit.program import Batch, GraphSpec, Program, Role, TensorGroup, TensorSpec, Train
from fedvit.tensors import Array, Tensors
from tests.support.codes import has_code

LR = 0.05
ROWS, RUN = 8, 3
SHAPES: dict[str, tuple[int, ...]] = {"a": (4, 3), "b": (3,), "s": ()}
RULES = [Sgd(weight_decay=0.1), MomentumSgd(weight_decay=0.1), AdamW(weight_decay=0.1)]

Inputs = Mapping[str, Tensor]

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def start_values() -> Tensors:
    draw = np.random.default_rng(0)
    return {name: np.asarray(draw.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def batch(real: list[int] | int = ROWS, *, seed: int = 0, length: int = 9) -> dict[str, Array]:
    """A batch of 8 in which these rows are samples, padded to whole runs; what is no sample is noise."""
    draw = np.random.default_rng(seed)
    weight = np.zeros(length, np.float32)
    weight[np.arange(real) if isinstance(real, int) else real] = 1
    return {
        "batch/patches": draw.normal(size=(length, 2, 4)).astype(np.float32),
        "batch/labels": draw.integers(0, 3, length),
        "batch/weight": weight,
    }


# --- the graphs ---------------------------------------------------------------------------------------


def loss_of(tensors: Inputs, inputs: Inputs) -> Tensor:
    """The mean over samples of a squared distance, and a spring that holds all tensors at 0."""
    out = (inputs["batch/patches"].mean(dim=1) @ tensors["a"] + tensors["b"]) * tensors["s"]
    wanted = (inputs["batch/labels"][:, None] == torch.arange(3)).to(out.dtype)
    weight = inputs["batch/weight"]
    far = ((out - wanted).square().sum(dim=1) * weight).sum() / weight.sum().clamp(min=1)
    return far + 0.05 * torch.stack([value.square().sum() for value in tensors.values()]).sum()


def gradient_step(inputs: Inputs) -> dict[str, Tensor]:
    updated = {name: inputs[f"tensor/{name}"] for name in SHAPES}
    grads, loss = grad_and_value(lambda at: loss_of(at, inputs) * inputs["batch/share"])(updated)
    outputs = {f"new/grad/{name}": inputs[f"grad/{name}"] + grads[name] for name in SHAPES}
    return {"metric/loss": loss, "collect/first": inputs["batch/patches"][:, 0, :2] * 1, **outputs}


def whole_step(rule: Optimizer) -> Step:
    def step(inputs: Inputs) -> dict[str, Tensor]:
        updated = {name: inputs[f"tensor/{name}"] for name in SHAPES}
        grads, loss = grad_and_value(lambda at: loss_of(at, inputs))(updated)
        outputs = {"metric/loss": loss, "collect/first": inputs["batch/patches"][:, 0, :2] * 1}
        for name, value in updated.items():
            slots = {slot: inputs[f"slot/{slot}/{name}"] for slot in rule.slots}
            value, slots = rule.update(value, grads[name], slots, inputs["hyper/lr"], inputs["hyper/step"])
            outputs |= {f"new/tensor/{name}": value, **{f"new/slot/{s}/{name}": kept for s, kept in slots.items()}}
        return outputs

    return step


def graph_of(step: Step, inputs: Inputs, *, any_length: int | None = None) -> Graph:
    content = to_onnx(trace(step, inputs, any_length=any_length))
    return Graph(onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]))


def scalars(*names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(1.0) for name in names}


def examples(rows: int) -> dict[str, Tensor]:
    fed = {name: torch.from_numpy(value) for name, value in batch(rows, length=rows).items()}
    return {**{f"tensor/{name}": torch.zeros(shape) for name, shape in SHAPES.items()}, **fed}


@pytest.fixture(scope="module")
def gradient() -> Graph:
    """Of 3 samples."""
    grads = {f"grad/{name}": torch.zeros(shape) for name, shape in SHAPES.items()}
    return graph_of(gradient_step, {**examples(RUN), **grads, **scalars("batch/share")})


@pytest.fixture(scope="module")
def update_of() -> Callable[[Optimizer], Graph]:
    """The graph of an optimizer; each is made once."""
    made: dict[Optimizer, Graph] = {}

    def update(rule: Optimizer) -> Graph:
        if rule not in made:
            vectors = {name: torch.zeros(PIECE) for name in ("value", "grad", *(f"slot/{s}" for s in rule.slots))}
            inputs = {**vectors, **scalars("hyper/lr", "hyper/step")}
            made[rule] = graph_of(update_step(rule), inputs, any_length=PIECE)
        return made[rule]

    return update


UpdateOf = Callable[[Optimizer], Graph]


def program(dtype: str = "float32", shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Program:
    return Program(
        method="made",
        model="line",
        classes=("0", "1", "2"),
        groups={"model": TensorGroup(Role.SHARED), "still": TensorGroup(Role.FROZEN)},
        tensors={name: TensorSpec(shape, dtype, "model") for name, shape in shapes.items()},
        graphs={name: GraphSpec(name, 1) for name in ("train", "update")},
        train=(),
        evaluate=None,  # type: ignore[arg-type]
        batch=Batch(
            image_size=16, patch_size=8, batch_size=ROWS, micro_batch=RUN, mean=(0.0,) * 3, std=(1.0,) * 3
        ),
    )  # fmt: skip


def phase_of(rule: Optimizer, clip_norm: float | None = None, slot_bits: Literal[8, 32] = 32) -> Train:
    settings = {"clip_norm": clip_norm, "slots": rule.slots, "slot_bits": slot_bits, "lr": LR}
    return Train(graph="train", update="update", groups=("model",), **settings)  # type: ignore[arg-type]


def make_steps(
    gradient: Graph,
    update: Graph,
    rule: Optimizer,
    clip_norm: float | None = None,
    slot_bits: Literal[8, 32] = 32,
) -> SummedSteps:
    values = start_values()
    for value in values.values():
        value.flags.writeable = False
    return SummedSteps(gradient, program(), phase_of(rule, clip_norm, slot_bits), values, values, {}, update=update)


def in_torch(
    rule: Optimizer, fed: list[dict[str, Array]], clip_norm: float | None = None
) -> tuple[Tensors, list[float]]:
    """Where backward() and torch.optim end on the samples alone, all of a batch at once; the loss of every step."""
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in start_values().items()}
    optimizer = rule.in_torch(list(leaves.values()), LR)
    losses = []
    for feeds in fed:
        real = feeds["batch/weight"] > 0
        optimizer.zero_grad()
        loss = loss_of(leaves, {name: torch.from_numpy(value[real]) for name, value in feeds.items()})
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: leaf.detach().numpy() for name, leaf in leaves.items()}, losses


def assert_moved_alike(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    start = start_values()
    assert got.keys() == want.keys()
    for name, value in want.items():
        far = np.abs(np.subtract(value, start[name])).max()
        assert far > 1e-3
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-4 * far, err_msg=name)


def bits(tensors: Mapping[str, Array]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors.items()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs have memory of their own, as a GPU has: an array is copied when it is bound, and not at each run."""
    read = Bound.read

    def read_copy(bound: Bound, name: str, place: Array | Buffer) -> None:
        read(bound, name, place if isinstance(place, Buffer) else np.array(place))

    monkeypatch.setattr(Bound, "read", read_copy)
    monkeypatch.setattr(edge_client.work.steps, "find_memory", lambda session: DeviceMemory("cpu"))


# --- updates ------------------------------------------------------------------------------------------


@each_rule
@pytest.mark.parametrize("length", [1, 17, 100_003])
def test_an_update_in_place_is_the_update_out_of_place(update_of: UpdateOf, rule: Optimizer, length: int) -> None:
    """Bit for bit over five steps, although the new values are written where the old ones are read, and so are the
    slots; also of a piece of a longer vector, of which the rest stays."""
    draw = np.random.default_rng(length)
    graph, bound = update_of(rule), Bound(update_of(rule))
    names = ["value", *(f"slot/{slot}" for slot in rule.slots)]
    held = {name: np.full(length + 32, 7, np.float32) for name in names}
    inside = slice(16, 16 + length)
    held["value"][inside] = draw.normal(size=length)
    for name in names[1:]:
        held[name][inside] = 0
    apart: dict[str, Any] = {name: held[name][inside].copy() for name in names}
    grad, step = np.zeros(length, np.float32), np.zeros((), np.float32)
    apart |= {"grad": grad, "hyper/lr": np.array(LR, np.float32), "hyper/step": step}
    for name, array in {**apart, **{name: held[name][inside] for name in names}}.items():
        bound.read(name, array)
    for name in names:
        bound.write(f"new/{name}", held[name][inside])
    for number in range(1, 6):
        grad[:] = draw.normal(size=length)
        step[()] = number
        bound.run()
        apart |= {name.removeprefix("new/"): value for name, value in graph.run(apart).items()}
        for name in names:
            assert held[name][inside].tobytes() == apart[name].tobytes()
            assert (held[name][:16] == 7).all()
            assert (held[name][16 + length :] == 7).all()
    assert np.isfinite(apart["value"]).all()


@each_rule
def test_steps_are_torchs(gradient: Graph, update_of: UpdateOf, rule: Optimizer) -> None:
    """Six batches, two of them short, worked off 3 samples at a time: tensors and losses are those of torch on whole
    batches. What was handed in stays as it was."""
    steps = make_steps(gradient, update_of(rule), rule)
    fed = [batch(real, seed=seed) for seed, real in enumerate([8, 8, 5, 8, 1, 8])]
    losses = [steps.step(feeds, last=True).loss for feeds in fed]
    want, wanted = in_torch(rule, fed)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_moved_alike(steps.tensors, want)
    assert steps.count == 6
    assert steps.tensors["s"].shape == ()


@each_rule
def test_pieces_are_the_whole(
    gradient: Graph, update_of: UpdateOf, rule: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vector that is cut in pieces of 7, which no tensor's end respects, moves as it does in one piece: bit for
    bit."""
    one = make_steps(gradient, update_of(rule), rule)
    monkeypatch.setattr(edge_client.work.steps, "PIECE_ELEMENTS", 7)
    many = make_steps(gradient, update_of(rule), rule)
    fed = [batch(seed=seed) for seed in range(4)]
    assert [one.step(feeds, last=True).loss for feeds in fed] == [many.step(feeds, last=True).loss for feeds in fed]
    assert bits(many.tensors) == bits(one.tensors)
    assert_moved_alike(many.tensors, in_torch(rule, fed)[0])


@each_rule
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_steps_in_memory_of_a_gpu_are_those_of_the_host(
    gradient: Graph, update_of: UpdateOf, rule: Optimizer, clip_norm: float | None, request: pytest.FixtureRequest
) -> None:
    """Bit for bit, with gradients that are summed and with whole steps; 8-bit slots become whole numbers there."""
    fed, moved = [batch(real, seed=seed) for seed, real in enumerate([8, 5, 8])], []
    for slot_bits in (32, 8):
        steps = make_steps(gradient, update_of(rule), rule, clip_norm, slot_bits)
        losses = [steps.step(feeds, last=True).loss for feeds in fed]
        moved.append((losses, bits(steps.tensors)))
        request.getfixturevalue("gpu")
    assert moved[0] == moved[1]
    rows = [{name: value[:ROWS] for name, value in feeds.items()} for feeds in fed]
    there = whole(rule, start_values())
    on_gpu = [there.step(feeds, last=True).loss for feeds in rows], bits(there.tensors)
    want, losses = in_torch(rule, rows)
    np.testing.assert_allclose(on_gpu[0], losses, rtol=1e-5)
    assert_moved_alike(there.tensors, want)


def test_answers_with_values_that_a_gpu_holds(gradient: Graph, request: pytest.FixtureRequest) -> None:
    """They are those of the host, and of the values at the time when they were handed over."""
    rng = np.random.default_rng(0)
    shapes = {f"{kind}/{name}": shape for kind in ("tensor", "grad") for name, shape in SHAPES.items()}
    values = {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}
    feeds = [batch(RUN, seed=seed, length=RUN) | {"batch/share": np.ones((), np.float32)} for seed in range(2)]
    want = [gradient.run({**values, **each}) for each in feeds]
    request.getfixturevalue("gpu")
    answer = gradient.hold(values)
    for value in values.values():
        value[...] = 0
    for each, outputs in zip(feeds, want, strict=True):
        assert bits(answer(each)) == bits(outputs)
    with pytest.raises(BadPayload, check=has_code("FV2310", "'batch/share'")):
        gradient.hold(values)(batch(RUN, length=RUN))


@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: type(rule).__name__)
def test_memory_in_8_bits_moves_tensors_nearly_as_in_32(
    gradient: Graph, update_of: UpdateOf, rule: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of two blocks, and of all of them."""
    for module in (edge_client.work.steps, edge_client.work.packed_slots):
        monkeypatch.setattr(module, "BLOCK", 8)
    exact, one = (make_steps(gradient, update_of(rule), rule, slot_bits=bits) for bits in (32, 8))
    monkeypatch.setattr(edge_client.work.steps, "PIECE_ELEMENTS", 16)
    many = make_steps(gradient, update_of(rule), rule, slot_bits=8)
    for seed in range(40):
        for steps in (exact, one, many):
            steps.step(batch(seed=seed), last=True)
    assert bits(many.tensors) == bits(one.tensors) != bits(exact.tensors)
    start, end, near = (
        np.concatenate([np.ravel(value) for value in tensors.values()])
        for tensors in (start_values(), exact.tensors, one.tensors)
    )
    assert np.linalg.norm(near - end) < 0.05 * np.linalg.norm(end - start)


@each_rule
def test_gaps_between_tensors_are_harmless(gradient: Graph, update_of: UpdateOf, rule: Optimizer) -> None:
    """Each tensor begins at a cache line; what lies between them is 0 and stays 0, whatever an optimizer does to it,
    so that it has no part in a norm either."""
    steps = make_steps(gradient, update_of(rule), rule, clip_norm=0.5)
    for seed in range(3):
        steps.step(batch(seed=seed), last=True)
    tensors: dict[str, Any] = steps.tensors
    bases = {id(value.base): value.base for value in tensors.values()}
    [vector] = bases.values()
    begins = [(value.ctypes.data - vector.ctypes.data) // 4 for value in tensors.values()]
    assert begins == [0, ALIGNED_ELEMENTS, 2 * ALIGNED_ELEMENTS]
    within = np.zeros(len(vector), np.bool_)
    for first, value in zip(begins, tensors.values(), strict=True):
        within[first : first + value.size] = True
    assert within.sum() == 12 + 3 + 1
    assert not vector[~within].any()
    assert vector[within].all()


@pytest.mark.parametrize("clip_norm", [0.01, 0.5, 3.0, 1e9])
@each_rule
def test_clipping_is_torchs(gradient: Graph, update_of: UpdateOf, rule: Optimizer, clip_norm: float) -> None:
    """All tensors together, after all parts of a batch and before the update; a bound that is never reached changes
    no bit."""
    fed = [batch(real, seed=seed) for seed, real in enumerate([8, 5, 8, 8])]
    steps = make_steps(gradient, update_of(rule), rule, clip_norm)
    losses = [steps.step(feeds, last=True).loss for feeds in fed]
    want, wanted = in_torch(rule, fed, clip_norm)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    start = start_values()
    for name, value in want.items():
        far = np.abs(np.subtract(value, start[name])).max()
        np.testing.assert_allclose(steps.tensors[name], value, rtol=0, atol=1e-4 * far + 1e-6, err_msg=name)
    plain = make_steps(gradient, update_of(rule), rule)
    for feeds in fed:
        plain.step(feeds, last=True)
    assert (bits(plain.tensors) == bits(steps.tensors)) == (clip_norm == 1e9)


def test_a_gradient_of_zero_is_not_clipped(gradient: Graph, update_of: UpdateOf) -> None:
    """0 / 0 is nothing to scale with. Where all tensors are 0, the line has no slope in any of them."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    phase = phase_of(Sgd(), 0.5)
    steps = SummedSteps(gradient, program(), phase, zeros, zeros, {}, update=update_of(Sgd()))
    steps.step(batch(), last=True)
    assert all(not value.any() for value in steps.tensors.values())


# --- parts of a batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("real", "runs"),
    [
        ([*range(8)], 3),
        ([*range(5)], 2),
        ([*range(3)], 1),
        ([0], 1),
        ([7], 1),  # the rest could not be read
        ([0, 1, 6, 7], 2),  # nor could the whole part in the middle
    ],
)
def test_parts_without_a_sample_are_not_run(
    gradient: Graph, update_of: UpdateOf, real: list[int], runs: int
) -> None:  # fmt: skip
    """The loss is the mean over the samples, the step is theirs, and what is collected lies in their rows."""
    fed = batch(real)
    steps = make_steps(gradient, update_of(Sgd()), Sgd())
    stepped = steps.step(fed, last=True)
    assert stepped.runs == runs
    want, [loss] = in_torch(Sgd(), [fed])
    assert stepped.loss == pytest.approx(loss, rel=1e-5)
    assert_moved_alike(steps.tensors, want)
    collected = stepped.collected["collect/first"]
    assert (collected.shape, collected.dtype) == ((9, 2), np.float32)
    patches: Any = fed["batch/patches"]
    np.testing.assert_array_equal(collected[real], patches[real, 0, :2])


def test_what_was_collected_is_not_written_over(gradient: Graph, update_of: UpdateOf) -> None:
    steps = make_steps(gradient, update_of(Sgd()), Sgd())
    fed = [batch(seed=seed) for seed in range(3)]
    collected = [steps.step(feeds, last=True).collected["collect/first"] for feeds in fed]
    for values, feeds in zip(collected, fed, strict=True):
        patches: Any = feeds["batch/patches"]
        np.testing.assert_array_equal(values[:ROWS], patches[:ROWS, 0, :2])


def test_batches_may_lie_anywhere(gradient: Graph, update_of: UpdateOf) -> None:
    """Turned pictures and other views without an order of their own, and arrays that are gone after the step."""
    plain, turned = (make_steps(gradient, update_of(Sgd()), Sgd()) for _ in range(2))
    for seed in range(3):
        feeds: dict[str, Any] = batch(seed=seed)
        plain.step(feeds, last=True)
        views = {name: np.asfortranarray(value) if value.ndim > 1 else value for name, value in feeds.items()}
        turned.step({**views, "batch/labels": np.repeat(feeds["batch/labels"], 2)[::2]}, last=True)
        del views
    assert bits(plain.tensors) == bits(turned.tensors)


# --- whole steps --------------------------------------------------------------------------------------


def whole(rule: Optimizer, values: Tensors) -> WholeSteps:
    slots = {f"slot/{slot}/{name}": torch.zeros(shape) for slot in rule.slots for name, shape in SHAPES.items()}
    graph = graph_of(whole_step(rule), {**examples(ROWS), **slots, **scalars("hyper/lr", "hyper/step")})
    phase = Train(graph="train", groups=("model",), slots=rule.slots, lr=LR)
    return WholeSteps(graph, program(), phase, values, values, {})


@each_rule
def test_whole_steps_are_torchs(rule: Optimizer) -> None:
    """What a step gives is what the next one reads, after an odd and after an even number of steps. What was handed in
    stays as it was, and what is collected is all rows in their order."""
    values = start_values()
    for value in values.values():
        value.flags.writeable = False
    before, steps = bits(values), whole(rule, values)
    assert bits(steps.tensors) == before
    fed = [batch(real, seed=seed, length=ROWS) for seed, real in enumerate([8, 8, 5, 8, 1])]
    for number, feeds in enumerate(fed, start=1):
        stepped = steps.step(feeds, last=True)
        want, losses = in_torch(rule, fed[:number])
        assert stepped.loss == pytest.approx(losses[-1], rel=1e-5)
        assert (stepped.runs, steps.count) == (1, number)
        assert_moved_alike(steps.tensors, want)
        patches: Any = feeds["batch/patches"]
        np.testing.assert_array_equal(stepped.collected["collect/first"], patches[:, 0, :2])
    assert bits(values) == before


# --- what a graph is told -----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["host", "gpu"])
@pytest.mark.parametrize("kind", ["summed", "whole"])
def test_what_a_graph_may_read(update_of: UpdateOf, kind: str, memory: str, request: pytest.FixtureRequest) -> None:
    """Steps count from 1, `last` is as the caller says, the rate is the phase's, anchors are the round's start and not
    the phase's, and facts are as they are. The graph tells them in the digits of its loss, and moves nothing."""
    if memory == "gpu":
        request.getfixturevalue("gpu")
    parts = kind == "summed"
    inputs = examples(RUN if parts else ROWS) | scalars("hyper/lr", "hyper/step", "hyper/last")
    inputs |= {f"anchor/{name}": torch.zeros(shape) for name, shape in SHAPES.items()}
    inputs |= {f"grad/{name}": torch.zeros(shape) for name, shape in SHAPES.items() if parts}
    inputs["fact/class_counts"] = torch.zeros(3)

    def tell(inputs: Inputs) -> dict[str, Tensor]:
        said = 100 * inputs["hyper/step"] + 10 * inputs["hyper/last"] + inputs["hyper/lr"]
        apart = torch.stack([(inputs[f"tensor/{n}"] - inputs[f"anchor/{n}"]).mean() for n in SHAPES]).sum()
        said = said + 1000 * apart + 1e4 * inputs["fact/class_counts"][2]
        of = ("grad", "new/grad") if parts else ("tensor", "new/tensor")
        return {"metric/loss": said, **{f"{of[1]}/{name}": inputs[f"{of[0]}/{name}"] * 1 for name in SHAPES}}

    graph, start = graph_of(tell, inputs), start_values()
    values = {name: np.asarray(value + 1) for name, value in start.items()}
    facts = {"fact/class_counts": np.array([1, 2, 3], np.float32)}
    update = "update" if parts else None
    phase = Train(graph="train", update=update, groups=("model",), anchors=("model",), lr=LR / 2)
    given = (graph, program(), phase, values, start, facts)
    steps = SummedSteps(*given, update=update_of(Sgd())) if parts else WholeSteps(*given)
    feeds = batch([0], length=RUN if parts else ROWS)
    losses = [steps.step(feeds, last=number % 2 == 0).loss for number in (1, 2, 3, 4)]
    assert losses == pytest.approx([30_000 + 3_000 + 100 * n + 10 * (n % 2 == 0) + LR / 2 for n in (1, 2, 3, 4)])
    assert bits(steps.tensors) == bits(values)


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "is_"),
    [
        (np.zeros((3, 2, 4)), "float64 of shape [3, 2, 4]"),
        (np.zeros((3, 2, 4), np.float16), "float16 of shape [3, 2, 4]"),
        (np.zeros((4, 2, 4), np.float32), "float32 of shape [4, 2, 4]"),
        (np.zeros((3, 8), np.float32), "float32 of shape [3, 8]"),
        (np.zeros((), np.float32), "float32 of shape []"),
    ],
)
def test_another_shape_or_dtype_is_refused(gradient: Graph, array: Array, is_: str) -> None:
    """Before onnxruntime would read beyond its end; both sides are named."""
    with pytest.raises(BadPayload) as refused:
        Bound(gradient).read("batch/patches", array)
    wanted = "the graph expects 'batch/patches' as tensor(float) of shape [3, 2, 4]"
    assert str(refused.value) == f"{wanted}, got {is_}"


def test_an_output_is_not_written_beyond_its_end(gradient: Graph) -> None:
    with pytest.raises(BadPayload, check=has_code("FV2310", "'new/grad/a'")):
        Bound(gradient).write("new/grad/a", np.zeros((3, 4), np.float32))
    with pytest.raises(BadPayload, check=has_code("FV2310", "'metric/loss'")):
        Bound(gradient).write("metric/loss", np.zeros(()))


def test_what_a_graph_does_not_read_is_left_out(gradient: Graph) -> None:
    Bound(gradient).read("fact/class_counts", np.zeros(3))


def lacking(name: str) -> tuple[Program, Tensors]:
    """The program and its values without a tensor that its graph reads."""
    values = {key: value for key, value in start_values().items() if key != name}
    return program(shapes={key: value.shape for key, value in values.items()}), values


def test_an_input_that_nobody_provides_is_named(gradient: Graph, update_of: UpdateOf) -> None:
    """Before anything runs: of the graph that adds gradients up, of a whole step, and of the update."""
    without, values = lacking("b")
    with pytest.raises(BadPayload, check=has_code("FV2310", "'tensor/b'")):
        SummedSteps(gradient, without, phase_of(Sgd()), values, values, {}, update=update_of(Sgd()))
    graph = graph_of(whole_step(Sgd()), {**examples(ROWS), **scalars("hyper/lr", "hyper/step")})
    with pytest.raises(BadPayload, check=has_code("FV2310", "'tensor/b'")):
        WholeSteps(graph, without, Train(graph="train", groups=("model",), lr=LR), values, values, {})
    values = start_values()
    with pytest.raises(BadPayload, check=has_code("FV2310", "'slot/momentum_buffer'")):
        SummedSteps(
            gradient, program(), phase_of(Sgd()), values, values, {}, update=update_of(MomentumSgd())
        )  # fmt: skip


def test_a_batch_of_another_size_is_refused(gradient: Graph, update_of: UpdateOf) -> None:
    """8 rows are two runs of 3 and a rest."""
    steps = make_steps(gradient, update_of(Sgd()), Sgd())
    with pytest.raises(BadPayload, check=has_code("FV2310", "'batch/patches'")):
        steps.step(batch(length=ROWS), last=True)


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.float64])
def test_only_float32_is_trained(gradient: Graph, update_of: UpdateOf, dtype: Any) -> None:
    values = start_values() | {"b": np.zeros(3, dtype)}
    with pytest.raises(BadPayload) as refused:
        SummedSteps(gradient, program(), phase_of(Sgd()), values, values, {}, update=update_of(Sgd()))
    assert str(refused.value) == f"tensor 'b' is {np.dtype(dtype)}; training supports float32 only"


def test_error_of_onnxruntime_is_reported(update_of: UpdateOf) -> None:
    """An input that nobody bound."""
    bound = Bound(update_of(Sgd()))
    bound.read("value", np.zeros(3, np.float32))
    with pytest.raises(BadPayload, check=has_code("FV1418")):
        bound.run()
