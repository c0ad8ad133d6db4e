"""A graph for a fixed number of images becomes one for any number.

Graphs of a run are made for one batch size, which is written into them wherever values are reshaped or
repeated. The position of the batch is followed from the input through every node, and these axes are made variable.

A `BatchAxis` is (axis, inner): index i of that axis belongs to image (i // inner) % batch, so that an axis may
also hold the batch together with others, as after a reshape to (batch * tokens, width).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fedvit.errors import BadPayload
from fedvit.onnx_model import Model, Node, Shape, encode_constant, make_node, read_integers


class BatchAxis(NamedTuple):
    axis: int
    inner: int


@dataclass
class _Opened:
    """The graph so far, and the batch axes of its values."""

    model: Model
    batch: int
    length: str  # name of the tensor with the number of images
    places: dict[str, BatchAxis]
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, bytes] = field(default_factory=dict)

    def numbers(self, name: str) -> Shape:
        if name not in self.model.constants:
            raise BadPayload("FV2310", f"the graph calculates {name!r}, which should be a constant")
        return read_integers(self.model.constants[name])

    def constant(self, values: tuple[int, ...]) -> str:
        name = "shape." + "x".join(map(str, values))
        self.constants[name] = encode_constant(name, np.array(values, np.int64))
        return name


def open_batch(model: Model, source: str, batch: int, length: str) -> Model:
    """The graph for any number of images in its input `source`, which is made for `batch` of them.

    `length` names a tensor that will hold their number. Raises BadPayload when the batch cannot be followed.
    """
    opened = _Opened(model, batch, length, {source: BatchAxis(0, 1)})
    for entry in model.nodes:
        _RULES.get(entry.kind, _keep_axes)(opened, entry)
    constants = {**model.constants, **opened.constants}
    return replace(model, nodes=tuple(opened.nodes), constants=constants, values={})  # engines infer the new shapes


def _keep_axes(opened: _Opened, entry: Node) -> None:
    """Axes keep their position, counted from the last: elementwise and row-wise operators, and products."""
    opened.nodes.append(entry)
    for output in entry.outputs:
        found = set()
        shape = opened.model.shape(output)
        for name in entry.inputs:
            if place := opened.places.get(name):
                found.add(BatchAxis(place.axis + len(shape) - len(opened.model.shape(name)), place.inner))
        _settle(opened, entry, output, found)


def _reshape(opened: _Opened, entry: Node) -> None:
    source = entry.inputs[0]
    if (place := opened.places.get(source)) is None:
        opened.nodes.append(entry)
        return
    before, after = opened.model.shape(source), opened.model.shape(entry.outputs[0])
    step = place.inner * math.prod(before[place.axis + 1 :])  # values between one image and the next
    for axis in range(len(after)):
        behind = math.prod(after[axis + 1 :])
        if step % behind == 0 and behind * after[axis] % (step * opened.batch) == 0:
            wanted = opened.constant((*after[:axis], -1, *after[axis + 1 :]))
            opened.nodes.append(replace(entry, inputs=(source, wanted)))
            _settle(opened, entry, entry.outputs[0], {BatchAxis(axis, step // behind)})
            return
    raise _describe_failure(entry, f"reshapes {before} to {after}")


def _expand(opened: _Opened, entry: Node) -> None:
    """A value for all images is repeated for each: the first axis that grows to the batch."""
    source = entry.inputs[0]
    after = opened.model.shape(entry.outputs[0])
    before = (1,) * (len(after) - len(opened.model.shape(source))) + opened.model.shape(source)
    if source in opened.places:
        raise _describe_failure(entry, f"repeats {before} up to {after}")
    grown = [axis for axis, length in enumerate(after) if before[axis] == 1 and length == opened.batch]
    if not grown:
        opened.nodes.append(entry)
        return
    axis = grown[0]
    lengths = [after[:axis], after[axis + 1 :]]
    names = [opened.constant(part) for part in lengths if part]
    names.insert(1 if lengths[0] else 0, opened.length)
    target = f"{entry.outputs[0]}.shape"
    opened.nodes += [make_node("Concat", names, [target], axis=0), replace(entry, inputs=(source, target))]
    _settle(opened, entry, entry.outputs[0], {BatchAxis(axis, 1)})


def _transpose(opened: _Opened, entry: Node) -> None:
    opened.nodes.append(entry)
    if place := opened.places.get(entry.inputs[0]):
        axes = len(opened.model.shape(entry.inputs[0]))
        order = entry.integers("perm") or tuple(reversed(range(axes)))
        _settle(opened, entry, entry.outputs[0], {place._replace(axis=order.index(place.axis))})


def _gather(opened: _Opened, entry: Node) -> None:
    """The indexed axis is replaced by the axes of the indices."""
    opened.nodes.append(entry)
    source, chosen = entry.inputs
    taken = entry.integer("axis", 0) % len(opened.model.shape(source))
    found = set()
    if place := opened.places.get(chosen):
        found.add(place._replace(axis=place.axis + taken))
    if place := opened.places.get(source):
        if place.axis == taken:
            raise _describe_failure(entry, "chooses among the images")
        wider = len(opened.model.shape(chosen)) - 1
        found.add(place if place.axis < taken else place._replace(axis=place.axis + wider))
    _settle(opened, entry, entry.outputs[0], found)


def _reduce(opened: _Opened, entry: Node) -> None:
    opened.nodes.append(entry)
    source = entry.inputs[0]
    if (place := opened.places.get(source)) is None:
        return
    axes = len(opened.model.shape(source))
    gone = opened.numbers(entry.inputs[1]) if len(entry.inputs) > 1 else entry.integers("axes") or tuple(range(axes))
    gone = tuple(axis % axes for axis in gone)
    if place.axis in gone:
        raise _describe_failure(entry, "sums over the images")
    fewer = 0 if entry.integer("keepdims", 1) else sum(axis < place.axis for axis in gone)
    _settle(opened, entry, entry.outputs[0], {place._replace(axis=place.axis - fewer)})


def _gemm(opened: _Opened, entry: Node) -> None:
    opened.nodes.append(entry)
    found = set()
    for number, (name, flag) in enumerate(zip(entry.inputs, ("transA", "transB", ""), strict=False)):
        if (place := opened.places.get(name)) is None:
            continue
        axis = 1 - place.axis if flag and entry.integer(flag, 0) else place.axis
        if number < 2 and axis != number:
            raise _describe_failure(entry, "multiplies over the images")
        axes = len(opened.model.shape(name))
        found.add(place._replace(axis=axis + 2 - axes))
    _settle(opened, entry, entry.outputs[0], found)


def _settle(opened: _Opened, entry: Node, output: str, found: set[BatchAxis]) -> None:
    """Note the batch axis of an output, if it has one. Raises BadPayload if that is contradictory."""
    if not found:
        return
    if len(found) > 1:
        raise _describe_failure(entry, f"reads the images from {len(found)} axes")
    [place] = found
    shape = opened.model.shape(output)
    if not 0 <= place.axis < len(shape) or shape[place.axis] % (place.inner * opened.batch):
        raise _describe_failure(entry, f"has no axis of {opened.batch} images in {shape}")
    opened.places[output] = place


def _describe_failure(entry: Node, what: str) -> BadPayload:
    return BadPayload(
        "FV2310", f"the graph cannot be opened for any number of images: {entry.kind} {entry.outputs[0]!r} {what}"
    )


_RULES: dict[str, Callable[[_Opened, Node], None]] = {
    "Reshape": _reshape,
    "Expand": _expand,
    "Transpose": _transpose,
    "Gather": _gather,
    "Gemm": _gemm,
    "ReduceSum": _reduce,
    "ReduceMean": _reduce,
    "ReduceMax": _reduce,
}
