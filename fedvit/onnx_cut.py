"""Cuts a graph in two: what follows from the samples and from tensors that do not change, and the rest.

The first graph's outputs, the features, can be kept and passed to the second one instead of the samples.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from fedvit.onnx_model import FLOAT, Model, Node, Port, make_node

LEAST_SHARE = 0.3
"""Least share of a graph's work that has to be in its first part."""
MOST_GROWTH = 2.0
"""Features may be so many times larger than the samples that they follow from."""
NEGLIGIBLE_WORK = 0.01
"""Share of the work that is given up for smaller features."""


class Cut(NamedTuple):
    """Both parts of a graph. The second one reads the features as inputs of the names in `inputs`."""

    features: Model
    rest: Model
    inputs: dict[str, str]  # input of the rest -> output of the first part
    share: float  # of the graph's work, that of the first part


def cut_model(model: Model, samples: str, fixed: Collection[str], prefix: str) -> Cut | None:
    """Cut a graph behind everything that follows from its input `samples` and from `fixed` inputs alone.

    Inputs of the second part are called `prefix` and a number. Returns None if the first part would have too little of
    the work, or if no place has small features of dtype float32. Raises BadPayload if the graph does not tell its
    shapes.
    """
    still = {*model.constants, *fixed, ""}
    of_samples = {samples}
    first: list[Node] = []
    for node in model.nodes:
        if still.issuperset(node.inputs):
            still.update(node.outputs)
        elif (still | of_samples).issuperset(node.inputs):
            of_samples.update(node.outputs)
            first.append(node)
    place = _choose_place(model, samples, first)
    if place is None:
        return None
    count, share = place
    last_read = _find_last_readers(model, first)
    features = [name for node in first[:count] for name in node.outputs if last_read.get(name, 0) > count]
    if any(model.dtype(name) != FLOAT for name in features):
        return None
    ports = {name: Port(FLOAT, model.shape(name)) for name in features}
    inputs = {f"{prefix}{number}": name for number, name in enumerate(features)}
    return Cut(_keep_needed(model, ports, {}), _keep_needed(model, model.outputs, inputs), inputs, share)


def _choose_place(model: Model, samples: str, first: list[Node]) -> tuple[int, float] | None:
    """Return after how many nodes of `first` to cut, and their share of the work.

    It is the place with the smallest features among those that have nearly the most work before them.
    """
    total = sum(count_work(model, node) for node in model.nodes)
    last_read = _find_last_readers(model, first)
    most = MOST_GROWTH * math.prod(model.shape(samples))
    places: list[tuple[float, int, int]] = []
    done, numbers = 0.0, 0
    ends = [0] * (len(first) + 1)  # numbers that nothing reads any more behind a node
    for count, node in enumerate(first, 1):
        done += count_work(model, node)
        for name in node.outputs:
            if (end := last_read.get(name, 0)) > count:
                size = math.prod(model.shape(name))
                numbers += size
                if end <= len(first):
                    ends[end] += size
        numbers -= ends[count]
        if numbers <= most:
            places.append((done / total, numbers, count))
    if not places or (best := max(places)[0]) < LEAST_SHARE:
        return None
    near = [place for place in places if place[0] >= best - NEGLIGIBLE_WORK]
    share, _, count = min(near, key=lambda place: (place[1], -place[0]))
    return count, share


def _find_last_readers(model: Model, first: list[Node]) -> dict[str, int]:
    """Return which node of `first`, counted from 1, is the last to read each value; a larger number if others do."""
    inside = {id(node): count for count, node in enumerate(first, 1)}
    readers = {name: inside.get(id(node), 0) or len(first) + 1 for node in first for name in node.inputs}
    others = [name for node in model.nodes if id(node) not in inside for name in node.inputs]
    return readers | dict.fromkeys([*others, *model.outputs], len(first) + 1)


def count_work(model: Model, node: Node) -> float:
    """Estimate the multiplications of an operator."""
    size = math.prod(model.find_shape(node.outputs[0]) or ())
    if "MatMul" in node.kind:
        return float(size * (model.find_shape(node.inputs[0]) or (1,))[-1])
    if node.kind == "Gemm":
        left = model.find_shape(node.inputs[0]) or (1, 1)
        return float(size * left[0 if node.integer("transA", 0) else 1])
    if "Conv" in node.kind:
        return float(size * math.prod((model.find_shape(node.inputs[1]) or (1,))[1:]))
    return float(size)


def _keep_needed(model: Model, outputs: Mapping[str, Port], given: Mapping[str, str]) -> Model:
    """Return the part of a graph that its outputs need. `given`: new inputs, and the values that they replace."""
    renamed = {value: name for name, value in given.items()}
    needed = set(outputs) - renamed.keys()
    nodes: list[Node] = []
    for node in reversed(model.nodes):
        if needed.isdisjoint(node.outputs):
            continue
        nodes.append(replace(node, inputs=tuple(renamed.get(name, name) for name in node.inputs)))
        needed.update(name for name in node.inputs if name not in renamed)
    nodes.reverse()
    nodes += [make_node("Identity", [renamed[name]], [name]) for name in outputs if name in renamed]
    made = {name for node in nodes for name in node.outputs}
    inputs = {name: port for name, port in model.inputs.items() if name in needed}
    inputs |= {name: Port(FLOAT, model.shape(value)) for name, value in given.items()}
    return replace(
        model,
        nodes=tuple(nodes),
        constants={name: content for name, content in model.constants.items() if name in needed},
        inputs=inputs,
        outputs=outputs,
        values={name: content for name, content in model.values.items() if name in made and name not in outputs},
    )
