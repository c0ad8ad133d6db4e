"""Verifies that an exported graph computes the same as torch, before it reaches a device.

The reference is independent of the trace: eager autograd and the optimizers of torch.optim, in float64. A right graph
differs from it by rounding alone. How much that is depends on the processor, on the model and its weights, and on the
tensor: a sum that nearly cancels keeps few right digits, in torch as on a device. So the graph's own
sensitivity is measured by changing each input by one rounding. `verify` states the rule.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from fedvit.errors import ExportMismatch
from fedvit.methods import step as steps
from fedvit.methods.base import Method
from fedvit.methods.calculus import TorchCalculus
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.step import Step, first_step_inputs, train_step, update_step
from fedvit.models.vit import PatchViT
from fedvit.program import Train

ROUNDING = 2.0**-23
"""One rounding, relative to what is rounded: a last digit of float32."""

MARGIN = 8.0
"""Errors of sums in another order are as large as what one rounding of the inputs does, a few times more by chance."""

NEAR = 8
"""Number of perturb inputs that are tried until one shows the effect of rounding. If a single number decides (for
example one row that is nearly constant), one in twelve shows less than an eighth of it."""

TOLERANCE = 1e-2
"""The largest error that rounding may explain, relative to the largest value of its kind."""

COSINE = 0.99
"""The least cosine of a gradient whose products are rounded with the right one."""
FAR = math.sqrt(1 - COSINE**2)
"""The largest error of such a gradient, as a share of its length: what is nearer has no smaller cosine."""
NEGLIGIBLE = 1e-2
"""Size of a tensor beside the largest of its kind (roots of mean squares) below which it is judged by that one."""

REPEATED = "ConstantOfShape"
"""Operator that makes a large constant of one number, its only attribute."""

Run = Callable[[Mapping[str, Tensor]], dict[str, Any]]


def reference_step(method: Method, vit: PatchViT, phase: Train) -> Step:
    """The training step as a torch user writes it: backward() and optimizer.step()."""
    return train_step(method, vit, phase, TorchCalculus)


def reference_update(rule: Optimizer) -> Step:
    """torch.optim."""
    return update_step(rule, TorchCalculus)


@cache
def check_key() -> str:
    """The key of the check, which changes with the rule and its inputs."""
    content = hashlib.blake2b(digest_size=8)
    for source in (__file__, steps.__file__):
        content.update(Path(source).read_bytes())
    return content.hexdigest()


@np.errstate(invalid="ignore", over="ignore")
def verify(graph: bytes, reference: Step, inputs: Mapping[str, Tensor], what: str) -> float:
    """Compare the graph in onnxruntime with `reference` in float64; the largest relative error, as defined below.

    Outputs that end a name they also begin with (`new/...`) count as changes, all others as they are. An error is the
    largest of an output's elements. Allowed are, all in the unit of the output,

        MARGIN * (spread + ROUNDING * scale)    at most TOLERANCE * scale

    - `spread`: how far the graph's output moves when every input moves by a rounding, up or down at random. Where sums
      cancel or rows are nearly constant it is large, and so are the errors of any float32. It is the graph's own: the
      same gradient written in another form, as in torch, cancels elsewhere and may be several times closer or further.
      Most graphs are right without it, and then it is not asked for.
    - `scale`: the largest value of all outputs of its kind (gradients, new tensors, each slot; the loss, the logits by
      themselves), so that a tensor that cancels is judged by its peers.
    - and two last digits of a new value: it is stored, and an optimizer rounds it twice.

    A graph that rounds to integers or float16 is compared twice: by this rule as it would be without that rounding, all
    scales, zero points and terms as they are in it (`without_rounding`), and then as it is: each output's error, as a
    vector, may be FAR of its length, or of the `scale` of its kind where that is NEGLIGIBLE in it.

    A right graph is refused only where rounding leaves less than two digits of a kind's largest value. Not detected are
    errors below the allowance, with usual weights a millionth of the largest value of the kind: a tensor that is ten
    thousand times smaller than the largest may be wrong by a hundredth. Nor is what the example inputs do not reach,
    such as AdamW's eps in a step with the optimizer inside, where they keep its squares far above zero (in the graph of
    an update alone it is seen).

    Raises ExportMismatch, naming the output, where an error is larger than allowed, where outputs have other names or
    shapes, and where one is not finite in a phase's first step.
    """
    wanted = {name: value.detach().numpy() for name, value in reference(_in_float64(inputs)).items()}
    run = _runner(graph)
    results = run(inputs)
    if wanted.keys() != results.keys():
        raise ExportMismatch("FV1117", f"{what}: outputs {sorted(results.keys() ^ wanted.keys())} are on one side only")
    for name, want in wanted.items():
        if results[name].shape != want.shape:
            raise ExportMismatch(
                "FV1117", f"{what}: output {name!r} has shape {results[name].shape}, torch gives {want.shape}"
            )
    plain = without_rounding(graph)
    if plain is None:
        worst = _check_digits(run, results, wanted, inputs, what)
    else:
        exact = _runner(plain)
        _check_digits(exact, exact(inputs), wanted, inputs, what)
        worst = _check_directions(results, wanted, inputs, what)
    if "hyper/step" in inputs:
        for name, value in run(first_step_inputs(inputs)).items():
            if not np.isfinite(value).all():
                raise ExportMismatch("FV1117", f"{what}: output {name!r} is not finite in a first step")
    return worst


def _check_digits(
    run: Run, results: Mapping[str, Any], wanted: Mapping[str, Any], inputs: Mapping[str, Tensor], what: str
) -> float:
    """The rule of `verify` for floats; the largest relative error."""
    digits = {name: 2 * _last_digits(want, _start(name, inputs)) for name, want in wanted.items()}
    errors, scales = {}, dict.fromkeys(map(_kind, wanted), 0.0)
    for name, want in wanted.items():
        errors[name] = _largest(results[name] - want, digits[name])
        scales[_kind(name)] = max(scales[_kind(name)], float(np.abs(want - _start(name, inputs)).max(initial=0)))
    spreads = dict.fromkeys(wanted, 0.0)

    def relative(name: str) -> float:
        return errors[name] / max(scales[_kind(name)], 1e-30)

    def used(name: str) -> float:
        """The error, as a share of what is allowed."""
        scale = scales[_kind(name)]
        allowed = min(MARGIN * (spreads[name] + ROUNDING * scale), TOLERANCE * scale)
        return errors[name] / max(allowed, 1e-30) if np.isfinite([errors[name], allowed]).all() else np.inf

    for seed in range(NEAR):
        if all(used(name) <= 1 for name in errors):
            break
        near = _near(inputs, seed)
        for name, value in run(near).items():
            updated = (value - _start(name, near)) - (results[name] - _start(name, inputs))
            spreads[name] = np.maximum(spreads[name], _largest(updated, digits[name]))  # NaN stays
    worst = max(errors, key=used)
    if used(worst) > 1:
        raise ExportMismatch(
            "FV1117",
            f"{what}: output {worst!r} differs from torch by {relative(worst):.2e} of the largest value of its kind, "
            f"{used(worst):.2g} times what rounding explains: the graph computes something else",
        )
    return max(map(relative, errors))


def _check_directions(
    results: Mapping[str, Any], wanted: Mapping[str, Any], inputs: Mapping[str, Tensor], what: str
) -> float:
    """The rule of `verify` for rounded products; the largest error, as a share of what it is compared with."""
    right = {name: want - _start(name, inputs) for name, want in wanted.items()}
    sizes = dict.fromkeys(map(_kind, wanted), 0.0)  # root of the mean square, the largest of the kind
    for name, change in right.items():
        sizes[_kind(name)] = max(sizes[_kind(name)], _length(change) / np.sqrt(max(1, change.size)))
    shares = {}
    for name, change in right.items():
        error = _length(results[name] - wanted[name])
        least = NEGLIGIBLE * sizes[_kind(name)] * np.sqrt(max(1, change.size))
        shares[name] = error / max(_length(change), least, 1e-30) if np.isfinite(error) else np.inf
    worst = max(shares, key=lambda name: shares[name])
    if shares[worst] > FAR:
        raise ExportMismatch(
            "FV1117",
            f"{what}: output {worst!r} differs from torch by {shares[worst]:.2e} of its length, more than rounded "
            f"products may change it ({FAR:.2f}: a cosine of {COSINE}); compute = fp32 rounds nothing",
        )
    return shares[worst]


def without_rounding(graph: bytes) -> bytes | None:
    """The graph with float32 in place of integers and float16; None if it has no products of them.

    x / scale + zero stays as it is, limited to what 8 bits hold; (a - zero) (b scale) takes it from there.
    Packed weights are inputs, and keep their type: float16 is read as float32.
    """
    model = onnx.load_from_string(graph)
    half = {value.name for value in model.graph.input if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
    kinds = {constant.name: constant.data_type for constant in model.graph.initializer}
    kinds |= {node.output[0]: node.attribute[0].t.data_type for node in model.graph.node if node.op_type == REPEATED}
    nodes: list[onnx.NodeProto] = []
    found = False
    for name in half:
        nodes.append(helper.make_node("Cast", [name], [f"{name}/float"], to=onnx.TensorProto.FLOAT))
    for node in model.graph.node:
        node.input[:] = [f"{name}/float" if name in half else name for name in node.input]
        [made] = node.output if len(node.output) == 1 else [""]

        def add(kind: str, operands: list[str], result: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(kind, operands, [result], **attributes))
            return result

        def as_float(name: str, result: str) -> str:
            return add("Cast", [name], result, to=onnx.TensorProto.FLOAT)

        if node.op_type == "QuantizeLinear":
            value, scale, zero = node.input
            steps = add("Div", [value, scale], f"{made}/steps")
            above = add("Add", [steps, as_float(zero, f"{made}/zero")], f"{made}/above")
            signed = "signed" if kinds[zero] == onnx.TensorProto.INT8 else "unsigned"
            add("Clip", [above, f"{signed}/least", f"{signed}/largest"], made)
        elif node.op_type == "MatMulIntegerToFloat":
            found = True
            left, right, left_scale, right_scale, zero, *_ = node.input
            steps = add("Sub", [left, as_float(zero, f"{made}/zero")], f"{made}/steps")
            factor = add("Mul", [as_float(right, f"{made}/right"), right_scale], f"{made}/factor")
            add("Mul", [add("MatMul", [steps, factor], f"{made}/product"), left_scale], made)
        elif node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.FLOAT16:
            found = True
            as_float(node.input[0], made)
        else:
            nodes.append(node)
    if not found:
        return None
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    bounds = {"signed/least": -128.0, "signed/largest": 127.0, "unsigned/least": 0.0, "unsigned/largest": 255.0}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(bound, np.float32), name) for name, bound in bounds.items()
    )
    content: bytes = model.SerializeToString()
    return content


@torch.no_grad()
def reference_predict(step: Step, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prediction has no gradient, so eager torch is its own reference."""
    return step(inputs)


def _runner(graph: bytes) -> Run:
    """The graph in onnxruntime: named tensors -> named arrays."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    read = [value.name for value in session.get_inputs()]
    names = [value.name for value in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
        return dict(zip(names, session.run(names, {name: inputs[name].numpy() for name in read}), strict=True))

    return run


def _in_float64(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def _near(inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every float32 of a tensor a rounding larger or smaller; whole numbers, which are counts and marks, stay."""
    draw = torch.Generator().manual_seed(seed)

    def perturb(value: Tensor) -> Tensor:
        signs = 2 * torch.randint(0, 2, value.shape, generator=draw) - 1
        return torch.where(value == value.round(), value, value * (1 + ROUNDING * signs))

    return {
        name: perturb(value) if value.dtype is torch.float32 and value.dim() else value
        for name, value in inputs.items()
    }


def _start(name: str, inputs: Mapping[str, Tensor]) -> Any:
    """Return the value that an output is a change of, in float64; 0 for other outputs."""
    return inputs[name.removeprefix("new/")].double().numpy() if name.startswith("new/") else 0.0


def _last_digits(want: Any, start: Any) -> Any:
    """Return the spacing of float32 at a new value or its origin; other outputs are not stored."""
    return np.spacing(np.maximum(np.abs(want), np.abs(start)).astype(np.float32)) if np.ndim(start) else 0.0


def _length(vector: Any) -> float:
    return float(np.sqrt(np.square(vector, dtype=np.float64).sum()))


def _largest(difference: Any, but: Any) -> float:
    return float(np.maximum(np.abs(difference) - but, 0).max(initial=0))


def _kind(name: str) -> str:
    """`new/slot/exp_avg/head.bias` -> `new/slot/exp_avg`; what is not new is of its own kind."""
    parts = name.split("/")
    return "/".join(parts[: 3 if parts[1] == "slot" else 2]) if parts[0] == "new" else name
