"""The information-flow check: what a Program and its graphs can send of a device's images, before anything runs.

Graphs are followed from inputs to outputs with the kinds of `edge_client.trust.kinds`. What is sent, and what a device
keeps for later rounds, may depend on images only as a sum over samples of features times labels, or times features of a
teacher from the server (a signal), or times features, as a loss, or as features behind a layer that is not linear,
where a phase declares `Collect`. A local tensor reaches what is sent only through the forward pass.
docs/decisions/0045-follow-images-through-graphs.md says what such a check cannot decide.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from edge_client.trust.kinds import FLOW, NOTHING, Kind, Samples, Shape, Value, refuse
from edge_client.trust.operators import GraphFlow
from fedvit.errors import BadPayload, NotAllowed
from fedvit.onnx_file import check_self_contained
from fedvit.onnx_model import Model, Node, read_model
from fedvit.program import Program, Role, Train
from fedvit.protobuf import fields

MAX_GRAPH_BYTES = 2 << 20
"""Size of a graph, which has no weights. That of a ViT-S has 0.2 MB and 1,700 nodes, that of an LSTM over 80 characters
0.5 MB and 5,500 nodes; a node takes about 70 us."""
MAX_NODES = 12_000
MAX_PARTS = 10 * MAX_NODES
MAX_DRAWS = 1 << 20
"""Random numbers that a phase may draw; methods draw as many as a model has blocks."""
MIN_IMAGES = 2
"""Fewest images behind an update that is sent."""
MAX_PASSES = 4
"""Steps that are followed until nothing changes: what a local tensor holds may differ in the first step of a phase."""
_GRAPH, _NODE, _OPSET = 7, 1, 8
_OPSETS = {("", 20), ("", 21), ("com.microsoft", 1)}

Graphs = Callable[[str], bytes]
"""Content of a graph by its digest."""

_ELEMENTWISE = frozenset({"Identity", "Add", "Sub", "Mul", "Div", "Sqrt", "Pow", "Cast", "Reciprocal", "Neg", "Clip"})
_UPDATED = Kind.PUBLIC | Kind.WEIGHT | Kind.UPDATE | Kind.SIGNAL | Kind.LABEL
_WHY = (
    (Kind.RAW, "copies or averages the device's images or text"),
    (Kind.LINEAR | Kind.FEATURE | Kind.TEACHER, "has features of single images, or their sum without a loss"),
    (Kind.PERSONAL | Kind.MARKED, "copies a local tensor or class counts"),
    (Kind.LABEL, "copies labels"),
)


@dataclass(frozen=True)
class PhaseFlow:
    """The fewest samples over which one step of a training phase sums what is sent; None if nothing of it is sent."""

    phase: Train
    rows: int | None


def check_flow(program: Program, graphs: Graphs, *, min_mask: float = 0.0) -> tuple[PhaseFlow, ...]:
    """Check every graph of a Program, and return what its training phases sum up.

    `min_mask`: least share of patches that must be left out of features, [0, 1). Raises NotAllowed in one line.
    """
    models: dict[str, Model] = {}
    for name in dict.fromkeys([*program.graphs_for("train"), *program.graphs_for("evaluate")]):
        with _name_graph(name):
            models[name] = _read(graphs(program.graphs[name].digest))
    flows = []
    for phase in program.train:
        if untrained := [group for group in phase.groups if not program.groups[group].role.is_trained_on_device]:
            raise NotAllowed(FLOW, f"a training phase moves group {untrained[0]!r}, which is not trained on devices")
        _check_limits(program, phase, min_mask)
        flows.append(PhaseFlow(phase, _check_phase(program, phase, models)))
    for phase in program.evaluate.adapt:  # nothing that it records is sent
        _check_limits(program, phase, 0.0)
        _check_phase(program, msgspec.structs.replace(phase, collect=None), models)
    _check_answers(program, models)
    return tuple(flows)


def check_images(program: Program, flows: tuple[PhaseFlow, ...], images: int, least: int = MIN_IMAGES) -> None:
    """Raise NotAllowed if an update rests on fewer than `least` of the device's training images."""
    for flow in flows:
        if flow.rows is None:
            continue
        phase = flow.phase
        batches = phase.epochs * -(-images // program.batch.batch_size)
        batches = batches if phase.steps is None else min(batches, phase.steps)
        if (used := min(images, batches * flow.rows)) < least:
            raise NotAllowed(
                FLOW, f"graph {phase.graph!r} makes an update of {used} training images, at least {least} must be in it"
            )


@contextmanager
def _name_graph(graph: str) -> Iterator[None]:
    try:
        yield
    except (NotAllowed, BadPayload) as error:
        raise NotAllowed(FLOW, f"graph {graph!r} is not allowed: {error}") from None


# --- reading ------------------------------------------------------------------------------------------


def _read(content: bytes) -> Model:
    """Read a graph that is small enough, with operators whose meaning is known here."""
    if len(content) > MAX_GRAPH_BYTES:
        raise refuse(f"it has {len(content)} bytes, at most {MAX_GRAPH_BYTES} may be")
    nodes = parts = 0
    for graph in (field for field in fields(content) if field.number == _GRAPH):
        for node in (field for field in fields(content, graph.begin, graph.end) if field.number == _NODE):
            nodes += 1
            for _ in fields(content, node.begin, node.end):
                parts += 1
                if nodes > MAX_NODES or parts > MAX_PARTS:
                    raise refuse(f"it has more than {MAX_NODES} nodes, or {MAX_PARTS} inputs and outputs of nodes")
    check_self_contained(content)
    model = read_model(content)
    for part in fields(model.rest):
        if part.number == _OPSET:
            opset = {field.number: field for field in fields(part.content)}
            domain, version = opset[1].text if 1 in opset else "", opset[2].value if 2 in opset else 0
            if (domain, version) not in _OPSETS:
                raise refuse(f"it has version {version} of the operators {domain[:60]!r}")
    if clash := model.constants.keys() & model.inputs.keys():
        raise refuse(f"constant {min(clash)[:60]!r} is an input, too")
    return model


def _follow(
    model: Model, inputs: Mapping[str, Value], *, linear: bool = True, first: bool = False, numbers: bool = False
) -> GraphFlow:
    """Follow a graph whose inputs must be among `inputs`, in these shapes.

    `numbers`: labels are those of a regression.
    """
    for name, port in model.inputs.items():
        if name not in inputs:
            raise refuse(f"it reads {name[:60]!r}, which a device does not give it")
        if port.shape != inputs[name].shape:
            raise refuse(f"its input {name[:60]!r} has shape {port.shape}, expected {inputs[name].shape}")
    flow = GraphFlow(model, {name: inputs[name] for name in model.inputs}, linear, first, numbers)
    flow.run()
    if missing := [name for name in model.outputs if name not in flow.values]:
        raise refuse(f"nothing makes its output {missing[0][:60]!r}")
    return flow


# --- training -----------------------------------------------------------------------------------------


def _learns_numbers(program: Program) -> bool:
    return program.batch.labels is not None and program.batch.labels.task == "regression"


def _check_limits(program: Program, phase: Train, min_mask: float) -> None:
    share = 0.0 if program.batch.text else program.batch.mask_ratio
    if phase.collect and share < min_mask:
        raise NotAllowed(
            FLOW, f"features {phase.collect.output!r} leave out {share:g} of the patches, at least {min_mask:g} must be"
        )
    if sum(draw.count for draw in phase.draws) > MAX_DRAWS:
        raise NotAllowed(FLOW, f"a phase draws more than {MAX_DRAWS} random numbers")


def _check_phase(program: Program, phase: Train, models: Mapping[str, Model]) -> int | None:
    """Check the graphs of a phase; return over how many samples a step sums what is sent."""
    local = {name for group in program.with_role(Role.LOCAL) for name in program.names(group)}
    trained = [name for group in phase.groups for name in program.names(group)]
    inputs = _list_inputs(program, phase, trained, local)
    rows = math.inf
    with _name_graph(phase.graph):
        model = models[phase.graph]
        _check_names(model, phase, trained)
        for step in range(1, MAX_PASSES):
            is_sum = phase.update is not None
            flow = _follow(model, inputs, linear=is_sum, first=step == 1, numbers=_learns_numbers(program))
            rows = min(rows, _check_outputs(flow, program, phase, trained, local))
            if not flow.asks_for_first_step:
                break
            # from the second step on, a local tensor may hold nothing of earlier rounds any more
            later = {f"tensor/{name}": flow.values[f"new/tensor/{name}"].kinds for name in trained if name in local}
            if step > 1 and all(inputs[name].kinds == kinds for name, kinds in later.items()):
                break
            inputs |= {name: replace(inputs[name], kinds=kinds) for name, kinds in later.items()}
        else:
            raise refuse("its local tensors change with every step")
    if phase.update:
        with _name_graph(phase.update):
            _check_update(models[phase.update], phase)
    if not any(program.groups[group].role.is_sent_back for group in phase.groups):
        return None
    size = program.batch.batch_size
    return size if rows >= (program.batch.run_size if phase.update else size) else int(rows)


def _list_inputs(program: Program, phase: Train, trained: list[str], local: set[str]) -> dict[str, Value]:
    """Return the inputs that a device provides in a phase (`edge_client.work.steps`)."""

    def find_kind(name: str) -> Kind:
        return Kind.PERSONAL if name in local else Kind.WEIGHT

    assigned = set(program.with_role(Role.ASSIGNED))
    inputs = {
        f"tensor/{name}": Value(
            spec.shape,
            find_kind(name) | (Kind.UPDATE if name in trained else NOTHING),
            is_from_server=spec.group in assigned,
        )
        for name, spec in program.tensors.items()
    }
    inputs |= {
        f"anchor/{name}": Value(program.tensors[name].shape, find_kind(name), is_from_server=name not in local)
        for group in phase.anchors
        for name in program.names(group)
    }
    for name in trained:
        value = Value(program.tensors[name].shape, find_kind(name) | Kind.UPDATE)
        if phase.update:
            inputs[f"grad/{name}"] = value
        inputs |= {f"slot/{slot}/{name}": value for slot in phase.slots}
    scalars = ("hyper/lr", "hyper/step", "hyper/last", *(("batch/share",) if phase.update else ()))
    inputs |= {name: Value((), Kind.PUBLIC) for name in scalars}
    inputs |= {f"draw/{draw.name}": Value((draw.count,), Kind.PUBLIC) for draw in phase.draws}
    inputs["fact/class_counts"] = Value((len(program.classes),), Kind.PERSONAL)
    batch = program.batch
    return inputs | _list_samples(program, batch.run_size if phase.update else batch.batch_size)


def _list_samples(program: Program, count: int) -> dict[str, Value]:
    """Return the inputs that describe the samples of a batch."""
    batch, samples = program.batch, Samples(0, 1, count, 1)
    label, _ = batch.describe_label(len(program.classes))
    inputs = {
        "batch/labels": Value((count, *label), Kind.LABEL, samples),
        "batch/weight": Value((count,), Kind.PUBLIC, samples, is_from_server=True),
    }
    if batch.text:
        return inputs | {"batch/tokens": Value((count, *label), Kind.RAW, samples, is_from_server=True)}
    kept = batch.kept_patches
    inputs["batch/patches"] = Value((count, kept, batch.patch_values), Kind.RAW, samples, is_from_server=True)
    inputs["batch/seeds"] = Value((count,), Kind.PUBLIC, samples, is_from_server=True)
    inputs["batch/kept"] = Value((count, kept), Kind.PUBLIC, samples, is_from_server=True)
    return inputs


def _check_names(model: Model, phase: Train, trained: list[str]) -> None:
    """Refuse a graph that has not the outputs of its phase; other values that it collects are never read."""
    expected = {"metric/loss"}
    for name in trained:
        expected |= {f"new/grad/{name}"} if phase.update else {f"new/tensor/{name}"}
        expected |= set() if phase.update else {f"new/slot/{slot}/{name}" for slot in phase.slots}
    if phase.collect:
        expected.add(f"collect/{phase.collect.output}")
    outputs = {name for name in model.outputs if not name.startswith("collect/")} | (expected & model.outputs.keys())
    if outputs != expected:
        raise refuse(f"its outputs and those of the phase differ in {min(outputs ^ expected)[:60]!r}")
    if not phase.update:
        return
    makers = {output: node for node in model.nodes for output in node.outputs}
    seen = set[str]()
    for name in trained:
        if not _is_summand(f"grad/{name}", f"new/grad/{name}", makers, seen):
            raise refuse(f"output 'new/grad/{name[:60]}' is not added to the gradient of the samples before")


def _is_summand(name: str, total: str, makers: Mapping[str, Node], seen: set[str]) -> bool:
    """Return whether a value is one of the summands of another.

    Parts that other sums have, which are in `seen`, are not looked at again: the time grows with the graph alone.
    """
    waiting = [total]
    while waiting:
        one = waiting.pop()
        if one == name:
            return True
        if (maker := makers.get(one)) is None or one in seen:
            continue
        seen.add(one)
        if maker.kind in ("Add", "Identity"):
            waiting += maker.inputs
        elif maker.kind == "Gemm":
            waiting += maker.inputs[2:]
    return False


def _check_outputs(flow: GraphFlow, program: Program, phase: Train, trained: list[str], local: set[str]) -> float:
    """Check what leaves a graph, and return over how many samples what is sent is summed."""
    rows = math.inf
    shapes: dict[str, tuple[Shape, bool]] = {"metric/loss": ((), False)}
    for name in trained:
        kinds = ["grad/"] if phase.update else ["tensor/", *(f"slot/{slot}/" for slot in phase.slots)]
        shapes |= {f"new/{kind}{name}": (program.tensors[name].shape, name in local) for kind in kinds}
    for name, (shape, is_local) in shapes.items():
        value = flow.values[name]
        _check_update_value(name, value, shape, _UPDATED | (Kind.PERSONAL | Kind.MARKED if is_local else NOTHING))
        if not is_local:
            rows = min(rows, value.samples.count if value.samples else value.rows)
    if phase.collect:
        name = f"collect/{phase.collect.output}"
        value, count = flow.values[name], _count_samples(program, phase)
        is_of_samples = value.samples == Samples(0, 1, count, 1) or (
            value.samples and value.samples.count == count == 1
        )
        if value.shape != (count, *phase.collect.shape) or not is_of_samples:
            raise refuse(f"output {name[:60]!r} has shape {value.shape}, expected one value for each sample")
        allowed = Kind.PUBLIC | Kind.WEIGHT | Kind.UPDATE | Kind.PERSONAL | Kind.LINEAR | Kind.FEATURE
        if value.kinds & ~allowed or not value.kinds & Kind.FEATURE:
            raise refuse(f"output {name[:60]!r} is not made of images behind at least one block of layers")
    return rows


def _count_samples(program: Program, phase: Train) -> int:
    return program.batch.run_size if phase.update else program.batch.batch_size


def _check_update_value(name: str, value: Value, shape: Shape, allowed: Kind) -> None:
    if value.shape != shape:
        raise refuse(f"output {name[:60]!r} has shape {value.shape}, expected {shape}")
    for kinds, why in _WHY:
        if value.kinds & kinds & ~allowed:
            raise refuse(f"output {name[:60]!r} {why}")
    if value.kinds & Kind.LABEL and not value.kinds & (Kind.UPDATE | Kind.SIGNAL):
        raise refuse(f"output {name[:60]!r} {_WHY[-1][1]}")
    if value.samples and value.samples.count > 1:
        raise refuse(f"output {name[:60]!r} is not summed over the samples of a batch")


def _check_update(model: Model, phase: Train) -> None:
    """Refuse an update that is not elementwise: it runs on pieces of all trained tensors, local ones beside others."""
    vectors = {"value", "grad", *(f"slot/{slot}" for slot in phase.slots)}
    if extra := model.inputs.keys() - vectors - {"hyper/lr", "hyper/step", "hyper/last"}:
        raise refuse(f"it reads {min(extra)[:60]!r}, which a device does not give it")
    if (outputs := {"new/value", *(f"new/slot/{slot}" for slot in phase.slots)}) != model.outputs.keys():
        raise refuse(f"its outputs and those of the phase differ in {min(outputs ^ model.outputs.keys())[:60]!r}")
    for node in model.nodes:
        if node.operator not in _ELEMENTWISE:
            raise refuse(f"operator {node.operator[:60]!r} is not elementwise")
        for name in node.inputs:
            if name in model.constants and math.prod(model.shape(name)) != 1:
                raise refuse(f"constant {name[:60]!r} has more than one number")
    if any(port.shape != () for name, port in model.inputs.items() if name not in vectors):
        raise refuse("a rate has more than one number")


def find_sample_shapes(program: Program, phase: Train, model: Model) -> dict[str, Shape]:
    """Return the shapes of a phase's values that have a row for each sample, which follows from that sample alone."""
    local = {name for group in program.with_role(Role.LOCAL) for name in program.names(group)}
    trained = [name for group in phase.groups for name in program.names(group)]
    inputs = _list_inputs(program, phase, trained, local)
    flow = _follow(model, inputs, linear=phase.update is not None, numbers=_learns_numbers(program))
    count = _count_samples(program, phase)
    return {
        name: value.shape
        for name, value in flow.values.items()
        if value.shape[:1] == (count,) and value.samples and (value.samples == Samples(0, 1, count, 1) or count == 1)
    }


# --- answers ------------------------------------------------------------------------------------------


def _check_answers(program: Program, models: Mapping[str, Model]) -> None:
    """Check the graphs of an evaluation. Only counts of right answers are sent, and features stay on the device."""
    evaluate, size = program.evaluate, program.batch.answer_size
    inputs = {f"tensor/{name}": Value(spec.shape, Kind.WEIGHT) for name, spec in program.tensors.items()}
    batch = program.batch
    if batch.text:
        inputs["batch/tokens"] = Value((size, batch.text.context), Kind.RAW)
    else:
        inputs["batch/patches"] = Value((size, batch.patches, batch.patch_values), Kind.RAW)
    if gather := evaluate.gather:
        with _name_graph(gather.graph):
            output = f"collect/{gather.output}"
            flow = _follow(models[gather.graph], inputs)
            if output not in flow.values or flow.values[output].shape != (size, *gather.shape):
                raise refuse(f"it has no output {output[:60]!r} of shape {(size, *gather.shape)}")
        inputs |= {
            f"gathered/{gather.output}": Value((gather.capacity, *gather.shape), flow.values[output].kinds),
            "gathered/labels": Value((gather.capacity,), Kind.LABEL),
            "gathered/weight": Value((gather.capacity,), Kind.PUBLIC),
        }
    with _name_graph(evaluate.graph):
        flow = _follow(models[evaluate.graph], inputs)
        if flow.model.outputs.keys() != {"logits"}:
            raise refuse("it must have the output 'logits', and no other")
        if flow.values["logits"].kinds & Kind.RAW:
            raise refuse("output 'logits' copies the device's images or text")
