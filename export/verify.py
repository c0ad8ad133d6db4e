"""Does the exported graph compute what torch computes? Asked before a graph reaches a device.

The reference is independent of the trace: eager autograd and the optimizers of torch.optim.
"""

from collections.abc import Mapping

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from fedvit.errors import ExportMismatch
from fedvit.methods.base import Method
from fedvit.methods.calculus import TorchCalculus
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.step import Step, first_step_inputs, train_step, update_step
from fedvit.models.vit import PatchViT
from fedvit.program import Train

TOLERANCE = 1e-3
"""Largest difference of any output, relative to the largest change of its tensor (updates), or to its
largest value (loss, features, logits). Float32 gives 1e-6 to 2e-4, growing with the model."""


INTEGER_TOLERANCE = 2e-2
"""The same where a device multiplies by int8 weights: what it multiplies is rounded to about 1 / 16000 of its largest
value. The reference has the same weights, unpacked. Gradients that nearly cancel show most of it."""


def reference_step(method: Method, vit: PatchViT, phase: Train) -> Step:
    """The training step as a torch user writes it: backward() and optimizer.step()."""
    return train_step(method, vit, phase, TorchCalculus)


def reference_update(rule: Optimizer) -> Step:
    """torch.optim."""
    return update_step(rule, TorchCalculus)


def verify(graph: bytes, reference: Step, inputs: Mapping[str, Tensor], what: str) -> float:
    """Largest relative difference between the graph in onnxruntime and `reference`.

    Raises ExportMismatch, naming the output, when it exceeds TOLERANCE, or with int8 weights INTEGER_TOLERANCE.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    fed = {name.name: inputs[name.name].numpy() for name in session.get_inputs()}
    results = dict(zip(names, session.run(names, fed), strict=True))
    wanted = {name: value.detach().numpy() for name, value in reference(inputs).items()}
    if wanted.keys() != results.keys():
        raise ExportMismatch(f"{what}: outputs {sorted(results.keys() ^ wanted.keys())} are on one side only")
    differences: dict[str, float] = {}
    for name, want in wanted.items():
        got = results[name]
        if got.shape != want.shape:
            raise ExportMismatch(f"{what}: output {name!r} has shape {got.shape}, torch gives {want.shape}")
        start = inputs.get(name.removeprefix("new/")) if name.startswith("new/") else None
        scale = np.abs(want - start.numpy() if start is not None else want).max()
        # a new value is rounded like any float32, however small its change
        apart = np.maximum(np.abs(got - want) - (np.spacing(np.abs(want)) if start is not None else 0), 0)
        differences[name] = float(apart.max() / max(float(scale), 1e-30))
    first = {name: value.numpy() for name, value in first_step_inputs(inputs).items() if name in fed}
    for name, value in zip(names, session.run(names, {**fed, **first}), strict=True):
        if not np.isfinite(value).all():
            raise ExportMismatch(f"{what}: output {name!r} is not finite in a first step")
    worst_name = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
    worst = differences[worst_name]
    integers = any(value.dtype == torch.int8 for value in inputs.values())
    allowed = INTEGER_TOLERANCE if integers else TOLERANCE
    if not worst <= allowed:  # also catches NaN
        raise ExportMismatch(
            f"{what}: output {worst_name!r} differs from torch by {worst:.2e} relative, allowed is {allowed:.0e}"
        )
    return worst


@torch.no_grad()
def reference_predict(step: Step, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prediction has no gradient, so eager torch is its own reference."""
    return step(inputs)
