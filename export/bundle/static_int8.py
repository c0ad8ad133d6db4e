"""Products of int8 weights and int8 activations, whose scales are measured on images before the file is written.

An activation has one scale and one zero for all its values, a weight one scale for each output. onnxruntime has the
product as an operator of its own, so that other runtimes cannot read the file. Attention, norms and the head stay
float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from export.bundle.assemble import IMAGE, LOGITS, quantise
from fedvit.data.images import Floats
from fedvit.onnx_model import FLOAT, Model, Node, Port, make_node
from fedvit.tensors import Array, Tensors

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

CALIBRATION_IMAGES = 64
"""Images whose activations give the scales."""
DOMAIN = "com.microsoft"
_LEVELS = 255


class Scale(NamedTuple):
    """The numbers that an activation's 256 levels stand for: (level - zero) * scale."""

    scale: np.float32
    zero: np.uint8

    @classmethod
    def of(cls, lowest: float, highest: float) -> "Scale":
        """Cover a range, and zero.

        >>> int(Scale.of(-1.0, 1.55).zero)
        100
        """
        lowest, highest = min(lowest, 0.0), max(highest, 0.0)
        scale = np.float32((highest - lowest) / _LEVELS or 1.0)
        return cls(scale, np.uint8(round(-lowest / float(scale))))


class Quantised(NamedTuple):
    model: Model
    values: Tensors  # of its new inputs
    products: int


def find_scales(session: "InferenceSession", pictures: Iterator[Floats], names: list[str]) -> dict[str, Scale]:
    """Measure activations on pictures; `session` has them as outputs, see `show_activations`."""
    lowest, highest, seen = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0
    for images in pictures:
        for name, value in zip(names, session.run(names, {IMAGE: images}), strict=True):
            lowest[name] = min(lowest[name], float(value.min()))
            highest[name] = max(highest[name], float(value.max()))
        seen += len(images)
        if seen >= CALIBRATION_IMAGES:
            break
    return {name: Scale.of(lowest[name], highest[name]) for name in names}


def list_activations(model: Model, values: Mapping[str, Array]) -> list[str]:
    """Return the inputs of the products that are quantised."""
    return list(dict.fromkeys(entry.inputs[0] for entry in model.nodes if _is_product(model, entry, values)))


def show_activations(model: Model, names: list[str]) -> Model:
    """Return the model with more outputs."""
    return replace(model, outputs={**model.outputs, **{name: Port(FLOAT, None) for name in names}})


def quantise_products(model: Model, values: Mapping[str, Array], scales: Mapping[str, Scale]) -> Quantised:
    """Replace the products of weights; all other values stay inputs of the model."""
    nodes: list[Node] = []
    made: Tensors = {}
    products = 0
    for entry in model.nodes:
        if not _is_product(model, entry, values):
            nodes.append(entry)
            continue
        activation, weight, *bias = entry.inputs
        given, output, own = f"{activation}.scale", entry.outputs[0], f"{weight}.int8"
        if given not in made:
            made |= {given: np.array(scales[activation].scale), f"{activation}.zero": np.array(scales[activation].zero)}
            nodes.append(make_node("QuantizeLinear", [activation, given, f"{activation}.zero"], [f"{activation}.int8"]))
        scale, rounded = quantise(values[weight])
        made |= {own: np.ascontiguousarray(rounded.T), f"{own}.scale": scale}
        made[f"{own}.zero"] = np.zeros(len(scale), np.int8)
        inputs = [f"{activation}.int8", own, given, f"{own}.scale", f"{activation}.zero", f"{own}.zero", *bias]
        nodes.append(make_node("MatMulIntegerToFloat", inputs, [output], domain=DOMAIN))
        products += 1
    ports = {name: Port(FLOAT, value.shape) for name, value in made.items()}
    quantised = replace(model, nodes=tuple(nodes), inputs={**model.inputs, **ports})
    return Quantised(quantised.with_operators_of(DOMAIN) if products else quantised, made, products)


def _is_product(model: Model, entry: Node, values: Mapping[str, Array]) -> bool:
    """Return whether a node is x W^T + b for a trained matrix W, and not the head."""
    if entry.kind != "Gemm" or entry.integer("transB", 0) != 1 or entry.integer("transA", 0):
        return False
    weight = values.get(entry.inputs[1])
    return weight is not None and weight.ndim == 2 and weight.dtype == np.float32 and LOGITS not in entry.outputs
