"""Programs and graphs that a hostile coordinator could make of honest ones, from a seeded random generator."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec
import numpy as np

from fedvit.blobs import digest_of
from fedvit.onnx_model import Model, Node, encode_constant, make_node, read_model, write_model
from fedvit.program import GraphSpec, Program, Role, Train

FLOAT, INT64 = 1, 7
Shape = tuple[int, ...]
Graphs = Mapping[str, bytes]


@dataclass(frozen=True)
class Mutant:
    """A Program with its graphs by name, and what was done to it."""

    what: str
    program: Program
    graphs: Graphs

    def read(self, digest: str) -> bytes:
        return next(self.graphs[name] for name, spec in self.program.graphs.items() if spec.digest == digest)


class GraphEditor:
    """A graph with nodes added at its end, and other makers of its outputs."""

    def __init__(self, content: bytes) -> None:
        self.model: Model = read_model(content)
        self._nodes = list(self.model.nodes)
        self._constants = dict(self.model.constants)
        self._outputs = dict(self.model.outputs)
        self._made = 0

    def content(self) -> bytes:
        model = replace(
            self.model, nodes=tuple(self._nodes), constants=self._constants, outputs=self._outputs, values={}
        )
        return b"".join(write_model(model, {}, {}))

    def clear(self) -> None:
        """Remove all nodes, constants and inputs."""
        self.model = replace(self.model, inputs={})
        self._nodes, self._constants = [], {}

    def shape(self, name: str) -> Shape:
        return self.model.shape(name)

    def constant(self, values: object, dtype: type = np.float32) -> str:
        self._made += 1
        name = f"mutant.constant.{self._made}"
        self._constants[name] = encode_constant(name, np.asarray(values, dtype))
        return name

    def add(self, kind: str, *inputs: str, **attributes: int | Sequence[int]) -> str:
        self._made += 1
        name = f"mutant.{self._made}"
        self._nodes.append(make_node(kind, inputs, [name], **attributes))
        return name

    def take_output(self, name: str) -> str:
        """Free an output's name, and return the name of what it was."""
        before = f"{name}.before"
        for place, node in enumerate(self._nodes):
            inputs, outputs = (
                tuple(before if one == name else one for one in names) for names in (node.inputs, node.outputs)
            )
            self._nodes[place] = Node(node.kind, inputs, outputs, node.rest)
        return before

    def give_output(self, name: str, value: str) -> None:
        self._nodes.append(make_node("Identity", [value], [name]))

    def insert(self, kind: str, inputs: Sequence[str], output: str, *, first: bool = False) -> None:
        """Add a node that makes `output`, at the end or before all others."""
        self._nodes.insert(0 if first else len(self._nodes), make_node(kind, inputs, [output]))

    def read_instead(self, name: str, other: str) -> None:
        """Let every node but the first read another value."""
        for place, node in enumerate(self._nodes[1:], start=1):
            for number, read in enumerate(node.inputs):
                if read == name:
                    self.rewire(place, number, other)
                    node = self._nodes[place]

    def rewire(self, place: int, number: int, value: str) -> None:
        node = self._nodes[place]
        inputs = (*node.inputs[:number], value, *node.inputs[number + 1 :])
        self._nodes[place] = Node(node.kind, inputs, node.outputs, node.rest)

    def copy_to(self, source: str, before: Shape, after: Shape, random: Random) -> str:
        """Return the numbers of a value, in the order in which they lie or drawn, in another shape."""
        size, wanted = int(np.prod(before)), int(np.prod(after))
        flat = self.add("Reshape", source, self.constant([size], np.int64))
        if size < wanted:
            times = -(-wanted // size)
            flat, size = self.add("Concat", *([flat] * times), axis=0), size * times
        if size > wanted or random.random() < 0.3:
            if random.random() < 0.5:
                places = [random.randrange(size) for _ in range(wanted)]
                flat = self.add("Gather", flat, self.constant(places, np.int64), axis=0)
            else:
                first = random.randrange(size - wanted + 1)
                bounds = [self.constant([number], np.int64) for number in (first, first + wanted, 0, 1)]
                flat = self.add("Slice", flat, *bounds)
        return self.add("Reshape", flat, self.constant(list(after), np.int64))


def mutate(random: Random, program: Program, graphs: Graphs) -> Mutant:
    """Return the Program with one thing changed."""
    while True:
        name, change = random.choice(CHANGES)
        mutant = change(random, program, graphs)
        if mutant:
            return replace(mutant, what=f"{name}: {mutant.what}")


Change = Callable[[Random, Program, Graphs], Mutant | None]


def _with_graph(program: Program, graphs: Graphs, name: str, content: bytes, what: str) -> Mutant:
    spec = GraphSpec(digest_of(content), program.graphs[name].flops)
    changed = msgspec.structs.replace(program, graphs={**program.graphs, name: spec})
    return Mutant(what, changed, {**graphs, name: content})


def _with_phase(program: Program, graphs: Graphs, place: int, phase: Train, what: str) -> Mutant:
    phases = (*program.train[:place], phase, *program.train[place + 1 :])
    return Mutant(what, msgspec.structs.replace(program, train=phases), graphs)


# --- what is copied -----------------------------------------------------------------------------------


def _sources(program: Program, editor: GraphEditor, random: Random) -> tuple[str, Shape]:
    """Return something of the device's data, as a float value of the graph."""
    inputs = editor.model.inputs
    private = [name for name in ("batch/patches", "batch/tokens", "batch/labels") if name in inputs]
    local = {f"tensor/{name}" for group in program.with_role(Role.LOCAL) for name in program.names(group)}
    private += [random.choice(sorted(local & inputs.keys()))] if local & inputs.keys() else []
    private += ["batch/patches"] * 3 * ("batch/patches" in inputs)
    private += ["fact/class_counts"] * ("fact/class_counts" in inputs)
    if random.random() < 0.25:  # of single samples
        floats = [name for name in _list_inner(editor) if editor.shape(name)[:1] == editor.shape("batch/labels")]
        private = [random.choice(floats)] if floats else private
    source = random.choice(private)
    shape = editor.shape(source)
    if inputs.get(source) and inputs[source].dtype == INT64:
        source = editor.add("Cast", source, to=FLOAT)
    return source, shape


def _list_inner(editor: GraphEditor) -> list[str]:
    """Float values between the nodes, with known shapes."""
    kinds = ("Add", "Mul", "Sub", "Gemm", "MatMul", "LayerNormalization", "Softmax", "Gelu", "Div", "Tanh", "Conv")
    made = [node.outputs[0] for node in editor.model.nodes if node.kind in kinds]
    return [name for name in made if name not in editor.model.outputs and editor.model.find_shape(name)]


def _disguise(editor: GraphEditor, source: str, shape: Shape, random: Random) -> tuple[str, Shape, str]:
    """Change the copy's numbers a little, as a careless or a cunning hand would."""
    match random.randrange(9):
        case 0:
            return editor.add("Mul", source, editor.constant(random.choice((0.5, -1.0, 10.0)))), shape, "scaled"
        case 1 if len(shape) > 1:
            axes = editor.constant([0], np.int64)
            return editor.add("ReduceMean", source, axes, keepdims=0), shape[1:], "averaged"
        case 2 if len(shape) > 1:
            axes = editor.constant([len(shape) - 1], np.int64)
            return editor.add("ReduceSum", source, axes, keepdims=0), shape[:-1], "summed over its last axis"
        case 3:
            return editor.add("Tanh", source), shape, "behind tanh"
        case 4:
            loss = editor.add("Identity", editor.take_output("metric/loss"))
            editor.give_output("metric/loss", loss)
            return editor.add("Mul", source, loss), shape, "times the loss"
        case 5 if len(shape) > 1 and shape[-1] < 300:
            unit = editor.constant(np.eye(shape[-1]))
            return editor.add("MatMul", source, unit), shape, "times the identity"
        case 6 if len(shape) > 1:
            order = list(range(len(shape)))
            random.shuffle(order)
            return editor.add("Transpose", source, perm=order), tuple(shape[axis] for axis in order), "turned"
        case 7:
            gates = [name for name in _list_inner(editor) if editor.shape(name) == shape]
            if gates:
                gate = editor.add("Sigmoid", random.choice(gates))
                return editor.add("Mul", source, gate), shape, "through a gate"
    return source, shape, "as it is"


# --- changes of graphs --------------------------------------------------------------------------------


def _train_graph(random: Random, program: Program, graphs: Graphs) -> tuple[Train, GraphEditor]:
    phase = random.choice(program.train)
    return phase, GraphEditor(graphs[phase.graph])


def _list_sent_outputs(program: Program, phase: Train) -> list[str]:
    kind = "grad" if phase.update else "tensor"
    return [
        f"new/{kind}/{name}"
        for group in phase.groups
        if program.groups[group].role.is_sent_back
        for name in program.names(group)
    ]


def _copy_into_update(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    phase, editor = _train_graph(random, program, graphs)
    if not (outputs := _list_sent_outputs(program, phase)):
        return None
    output = random.choice(outputs)
    source, shape = _sources(program, editor, random)
    source, shape, how = _disguise(editor, source, shape, random)
    copy = editor.copy_to(source, shape, editor.shape(output), random)
    before = editor.take_output(output)
    if random.random() < 0.5:
        editor.give_output(output, editor.add("Add", before, copy))
    elif phase.update and random.random() < 0.8:
        grad = output.removeprefix("new/")
        editor.insert("Add", (grad, copy), output)
    else:
        editor.give_output(output, copy)
    return _with_graph(program, graphs, phase.graph, editor.content(), f"{source} {how} in {output}")


def _copy_into_loss(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    phase, editor = _train_graph(random, program, graphs)
    source, shape = _sources(program, editor, random)
    copy = editor.copy_to(source, shape, (), random)
    before = editor.take_output("metric/loss")
    editor.give_output("metric/loss", copy if random.random() < 0.5 else editor.add("Add", before, copy))
    return _with_graph(program, graphs, phase.graph, editor.content(), f"{source} in the loss")


def _copy_into_collect(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    collecting = [phase for phase in program.train if phase.collect]
    if not collecting:
        return None
    phase = random.choice(collecting)
    assert phase.collect
    editor, output = GraphEditor(graphs[phase.graph]), f"collect/{phase.collect.output}"
    source, shape = "batch/patches", editor.shape("batch/patches")
    wanted = editor.shape(output)
    size = int(np.prod(shape[1:]))
    flat = editor.add("Reshape", source, editor.constant([shape[0], size], np.int64))
    width = int(np.prod(wanted[1:]))
    flat = editor.add("Concat", *([flat] * -(-width // size)), axis=1) if size < width else flat
    bounds = [editor.constant([number], np.int64) for number in (0, width, 1, 1)]
    copy = editor.add("Reshape", editor.add("Slice", flat, *bounds), editor.constant(list(wanted), np.int64))
    before = editor.take_output(output)
    if random.random() < 0.4:
        copy = editor.add("Add", before, editor.add("Mul", copy, editor.constant(10.0)))
    editor.give_output(output, copy)
    return _with_graph(program, graphs, phase.graph, editor.content(), f"patches in {output}")


def _choose_sample(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    """Give all samples but one no weight, by a constant."""
    phase, editor = _train_graph(random, program, graphs)
    count = editor.shape("batch/weight")[0]
    if count < 2:
        return None
    chosen = np.zeros(count)
    chosen[random.randrange(count)] = 1
    editor.insert("Mul", ("batch/weight", editor.constant(chosen)), "mutant.weight", first=True)
    editor.read_instead("batch/weight", "mutant.weight")
    return _with_graph(program, graphs, phase.graph, editor.content(), "one sample has weight")


def _forget_gradient(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    """Let an update rest on the last samples of a batch alone."""
    phase, editor = _train_graph(random, program, graphs)
    outputs = _list_sent_outputs(program, phase)
    if not phase.update or not outputs:
        return None
    output = random.choice(outputs)
    before = editor.take_output(output)
    editor.give_output(output, editor.add("Sub", before, output.removeprefix("new/")))
    return _with_graph(program, graphs, phase.graph, editor.content(), f"{output} without the samples before")


def _rewire(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    """Let a node read another value of the same shape that is made before it."""
    phase, editor = _train_graph(random, program, graphs)
    nodes = editor.model.nodes
    place = random.randrange(len(nodes))
    known = [name for name, port in editor.model.inputs.items() if port.dtype == FLOAT]
    inner = set(_list_inner(editor))
    known += [name for node in nodes[:place] for name in node.outputs if name in inner]
    number = random.randrange(len(nodes[place].inputs)) if nodes[place].inputs else 0
    if not nodes[place].inputs or nodes[place].inputs[number] not in known:
        return None
    shape = editor.shape(nodes[place].inputs[number])
    others = [name for name in known if editor.shape(name) == shape and name != nodes[place].inputs[number]]
    if not others:
        return None
    other = random.choice(others)
    editor.rewire(place, number, other)
    return _with_graph(program, graphs, phase.graph, editor.content(), f"{nodes[place].outputs[0]} reads {other}")


def _swap_outputs(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    """Exchange two outputs of the same shape, perhaps one of a local tensor with one that is sent."""
    phase, editor = _train_graph(random, program, graphs)
    outputs = sorted(name for name in editor.model.outputs if name.startswith("new/"))
    one = random.choice(outputs)
    others = [name for name in outputs if editor.shape(name) == editor.shape(one) and name != one]
    if not others:
        return None
    other = random.choice(others)
    before = editor.take_output(one), editor.take_output(other)
    editor.give_output(one, before[1])
    editor.give_output(other, before[0])
    return _with_graph(program, graphs, phase.graph, editor.content(), f"{one} and {other} swapped")


def _copy_in_update_graph(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    """Move numbers between tensors in the update, which runs on all of them as one vector."""
    phase = random.choice(program.train)
    if not phase.update:
        return None
    editor = GraphEditor(graphs[phase.update])
    before = editor.take_output("new/value")
    order = editor.add("Neg", before)
    axes = editor.constant([0], np.int64)
    total = editor.add("ReduceSum", order, axes, keepdims=1)
    editor.give_output("new/value", editor.add("Add", before, total))
    return _with_graph(program, graphs, phase.update, editor.content(), "a sum over all tensors in each")


# --- changes of Programs ------------------------------------------------------------------------------


def _swap_roles(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    groups = sorted(program.groups)
    group = random.choice(groups)
    role = random.choice([role for role in Role if role is not program.groups[group].role])
    changed = msgspec.structs.replace(program.groups[group], role=role)
    return Mutant(
        f"{group} becomes {role}", msgspec.structs.replace(program, groups={**program.groups, group: changed}), graphs
    )


def _lower_mask(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    if not program.batch.mask_ratio:
        return None
    batch = msgspec.structs.replace(program.batch, mask_ratio=0.0)
    return Mutant("no mask", msgspec.structs.replace(program, batch=batch), graphs)


def _one_image(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    batch = msgspec.structs.replace(program.batch, batch_size=1, micro_batch=1)
    phases = tuple(msgspec.structs.replace(phase, steps=1) for phase in program.train)
    return Mutant("one image", msgspec.structs.replace(program, batch=batch, train=phases), graphs)


def _collect_other(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    for place, phase in enumerate(program.train):
        if phase.collect:
            output = random.choice(["patches", "logits", phase.graph])
            changed = msgspec.structs.replace(phase, collect=msgspec.structs.replace(phase.collect, output=output))
            return _with_phase(program, graphs, place, changed, f"collects {output}")
    return None


def _train_more(random: Random, program: Program, graphs: Graphs) -> Mutant | None:
    place = random.randrange(len(program.train))
    phase = program.train[place]
    others = sorted(program.groups.keys() - set(phase.groups))
    if not others:
        return None
    group = random.choice(others)
    changed = msgspec.structs.replace(phase, groups=(*phase.groups, group))
    return _with_phase(program, graphs, place, changed, f"moves {group}, too")


CHANGES: tuple[tuple[str, Change], ...] = (
    *[("a copy in an update", _copy_into_update)] * 8,
    *[("a copy in the loss", _copy_into_loss)] * 2,
    *[("a copy in features", _copy_into_collect)] * 3,
    *[("another input", _rewire)] * 8,
    *[("outputs swapped", _swap_outputs)] * 2,
    ("one sample chosen", _choose_sample),
    ("gradients forgotten", _forget_gradient),
    ("another update", _copy_in_update_graph),
    ("another role", _swap_roles),
    ("a lower mask", _lower_mask),
    ("one image", _one_image),
    ("other features", _collect_other),
    ("more groups", _train_more),
)


def mutants(seed: int, count: int, program: Program, graphs: Graphs) -> Iterator[Mutant]:
    """Yield `count` mutants of a Program."""
    random = Random(seed)
    for _ in range(count):
        yield mutate(random, program, graphs)
