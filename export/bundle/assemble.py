"""A predict graph and its tensors -> one ONNX file that takes pictures and gives probabilities.

The file's input is `image` (batch, 3, S, S): normalised pictures, any number of them. Its outputs are
`logits` and `probabilities` (batch, classes), and `features` (batch, width) where a linear head reads them. Of a
regression `numbers` stand in place of probabilities.
"""

import enum
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from export.bundle.batch_axis import open_batch
from fedvit.errors import BadPayload
from fedvit.onnx_model import FLOAT, Model, Node, Parts, Port, encode_constant, make_node, rename_value, write_model
from fedvit.program import Batch
from fedvit.tensors import Array, Tensors

IMAGE, LOGITS, PROBABILITIES, FEATURES = "image", "logits", "probabilities", "features"
NUMBERS = "numbers"
"""Output of a regression, in place of probabilities."""
PATCHES = "batch/patches"
BATCH = "batch"
"""Name of the first dimension of input and outputs."""

WEIGHT = "tensor/"
_LARGEST_HALF = float(np.finfo(np.float16).max)
MOST_FEATURES = 4096
_LEAST = 1e-30
"""Lower bound of probabilities, so that zero has a logarithm."""


class Precision(enum.StrEnum):
    """The type of the weights in a file; calculations are float32, but of STATIC."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    STATIC = "int8_static"

    @property
    def file(self) -> str:
        return "model.onnx" if self is Precision.FP32 else f"model.{self}.onnx"

    @property
    def meaning(self) -> str:
        return {
            Precision.FP32: "float32, as trained",
            Precision.FP16: "float16 where a tensor has two or more axes, cast to float32 when the file is loaded",
            Precision.INT8: "int8 with one float32 scale for each output (weights of linear layers and of the patch "
            "embedding), made float32 again by DequantizeLinear",
            Precision.STATIC: "int8 products of weights (one scale for each output) and activations (scales measured "
            "on images); for onnxruntime alone",
        }[self]


USUAL = (Precision.FP32, Precision.FP16, Precision.INT8)
"""Files of a bundle for which none are named."""


class Assembled(NamedTuple):
    parts: Parts
    tensors: int  # how many the file holds
    converted: int  # of these, how many are not float32


def open_predict_graph(graph: Model, batch: Batch, *, probabilities: bool) -> Model:
    """The predict graph with `image` in place of patches, for any number of images; tensors are still inputs.

    `probabilities`: the graph's output `logits` holds probabilities, as with a vote of neighbours.
    """
    if PATCHES not in graph.inputs or LOGITS not in graph.outputs:
        raise BadPayload("FV2310", f"no predict graph: it needs input {PATCHES!r} and output {LOGITS!r}")
    answer = graph.shape(LOGITS)[1:]  # (classes,), (patches, classes) of a segmentation
    length = "image.count"
    opened = open_batch(graph, PATCHES, batch.answer_size, length)
    front, constants = _unfold(batch, length)
    if probabilities:
        opened = rename_value(opened, LOGITS, PROBABILITIES)
        constants["probabilities.least"] = encode_constant("probabilities.least", np.array(_LEAST, np.float32))
        back = [
            make_node("Clip", [PROBABILITIES, "probabilities.least"], ["probabilities.positive"]),
            make_node("Log", ["probabilities.positive"], [LOGITS]),
        ]
    else:
        back = _answer(batch, constants)
    inputs = {name: port for name, port in graph.inputs.items() if name != PATCHES}
    is_number = batch.labels is not None and batch.labels.task == "regression"
    outputs = {name: Port(FLOAT, (BATCH, *answer)) for name in (LOGITS, NUMBERS if is_number else PROBABILITIES)}
    if features := None if probabilities else find_features(graph, batch.answer_size):
        back.append(make_node("Identity", [features], [FEATURES]))
        outputs[FEATURES] = Port(FLOAT, (BATCH, graph.shape(features)[1]))
    side = batch.image_size
    return replace(
        opened,
        nodes=(*front, *opened.nodes, *back),
        constants={**opened.constants, **constants},
        inputs={IMAGE: Port(FLOAT, (BATCH, 3, side, side)), **inputs},
        outputs=outputs,
    )


def _answer(batch: Batch, constants: dict[str, bytes]) -> list[Node]:
    """Make an answer of logits, in the terms of the run's task."""
    form = batch.labels
    if form is None or form.labels_patches:
        return [make_node("Softmax", [LOGITS], [PROBABILITIES], axis=-1)]
    if form.task == "multi_label":
        return [make_node("Sigmoid", [LOGITS], [PROBABILITIES])]
    for name, value in (("numbers.half", form.half), ("numbers.middle", (form.low + form.high) / 2)):
        constants[name] = encode_constant(name, np.array(value, np.float32))
    return [
        make_node("Mul", [LOGITS, "numbers.half"], ["numbers.scaled"]),
        make_node("Add", ["numbers.scaled", "numbers.middle"], [NUMBERS]),
    ]


def find_features(graph: Model, images: int) -> str | None:
    """Find the value (images, width) that a linear head reads; None if the logits come from something else."""
    makers = {output: node for node in graph.nodes for output in node.outputs}
    name = LOGITS
    while node := makers.get(name):
        inner = [value for value in node.inputs if value in makers]
        if node.kind in ("MatMul", "Gemm"):
            shape = graph.find_shape(node.inputs[0]) if node.inputs[0] in makers else None
            is_wide = shape is not None and len(shape) == 2 and shape[0] == images and shape[1] <= MOST_FEATURES
            return node.inputs[0] if is_wide else None
        if node.kind not in ("Add", "Identity") or len(inner) != 1:
            return None
        [name] = inner
    return None


def _unfold(batch: Batch, length: str) -> tuple[list[Node], dict[str, bytes]]:
    """`fedvit.data.images.unfold` as nodes, for pictures whose colours come first."""
    side, patch = batch.image_size, batch.patch_size
    grid = side // patch
    whole = grid * patch
    constants: dict[str, bytes] = {}

    def numbers(name: str, *values: int) -> str:
        constants[name] = encode_constant(name, np.array(values, np.int64))
        return name

    nodes = [make_node("Shape", [IMAGE], [length], start=0, end=1)]
    pixels = IMAGE
    if whole < side:  # pixels at the right and bottom that fill no patch
        pixels = "image.whole"
        bounds = [numbers("image.first", 0, 0), numbers("image.end", whole, whole), numbers("image.axes", 2, 3)]
        nodes.append(make_node("Slice", [IMAGE, *bounds], [pixels]))
    split = numbers("image.split", -1, 3, grid, patch, grid, patch)
    rows = numbers("image.rows", -1, batch.patches, batch.patch_values)
    nodes += [
        make_node("Reshape", [pixels, split], ["image.grid"]),
        make_node("Transpose", ["image.grid"], ["image.patches"], perm=(0, 2, 4, 1, 3, 5)),
        make_node("Reshape", ["image.patches", rows], [PATCHES]),
    ]
    return nodes, constants


def assemble(model: Model, values: Mapping[str, Array], precision: Precision, metadata: Mapping[str, str]) -> Assembled:
    """The file of an opened predict graph whose inputs but the image have the given values.

    Raises BadPayload when one of them is missing, ConfigError when the file would be too large.
    """
    used = {name for entry in model.nodes for name in entry.inputs}
    wanted = [name for name in model.inputs if name != IMAGE and name in used]
    if missing := [name for name in wanted if name not in values]:
        raise BadPayload("FV2310", f"the predict graph reads {missing[0]!r}, which has no value")
    held: Tensors = {}
    front: list[Node] = []
    for name in wanted:
        value = values[name]
        if precision is Precision.FP16 and _fits_half(name, value):
            held[f"{name}.fp16"] = value.astype(np.float16)
            front.append(make_node("Cast", [f"{name}.fp16"], [name], to=FLOAT))
        elif precision is Precision.INT8 and _is_weight(name, value):
            scale, rounded = quantise(value)
            held |= {f"{name}.int8": rounded, f"{name}.scale": scale}
            front.append(make_node("DequantizeLinear", [f"{name}.int8", f"{name}.scale"], [name], axis=0))
        else:
            held[name] = value
    constants = {name: content for name, content in model.constants.items() if name in used}
    closed = replace(model, nodes=(*front, *model.nodes), constants=constants, inputs={IMAGE: model.inputs[IMAGE]})
    converted = sum(value.dtype in (np.float16, np.int8) and value.ndim > 1 for value in held.values())
    return Assembled(write_model(closed, held, metadata), len(wanted), converted)


def quantise(weight: Array) -> tuple[Array, Array]:
    """(scale, rounded): `scale * rounded` is the weight to half a scale; one scale for each index of the first axis.

    >>> quantise(np.float32([[1.0, -2.54], [0.0, 0.0]]))[1].tolist()
    [[50, -127], [0, 0]]
    """
    rows = weight.reshape(len(weight), -1)
    scale = (np.abs(rows).max(axis=1) / 127).astype(np.float32)
    scale[scale == 0] = 1
    rounded = np.rint(rows / scale[:, None]).clip(-127, 127).astype(np.int8)
    return scale, rounded.reshape(weight.shape)


def _fits_half(name: str, value: Array) -> bool:
    return _is_matrix(name, value) and bool(np.abs(value).max(initial=0) <= _LARGEST_HALF)


def _is_weight(name: str, value: Array) -> bool:
    """Linear layers have two axes, the patch embedding four; the first is that of the outputs."""
    return _is_matrix(name, value) and value.ndim in (2, 4) and len(value) > 1


def _is_matrix(name: str, value: Array) -> bool:
    return name.startswith(WEIGHT) and value.dtype == np.float32 and value.ndim >= 2
