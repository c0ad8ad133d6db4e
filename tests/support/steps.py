"""Graphs on onnxruntime, and what a batch that is worked off in parts must come to: one step on the whole of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import Tensor

from fedvit.methods.base import Method, list_trained
from fedvit.methods.step import Serves, Update
from fedvit.models.vit import PatchViT
from fedvit.program import Gather, Train

Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

NAMES = re.compile(
    r"tensor/.+|slot/[^/]+/.+|grad/.+|anchor/.+|batch/(patches|kept|seeds|labels|weight|share)"  # read
    r"|hyper/(lr|step|last)|fact/class_counts|draw/.+|gathered/.+"
    r"|new/tensor/.+|new/slot/[^/]+/.+|new/grad/.+|metric/loss|collect/.+|logits"  # written
    r"|value|grad|slot/[^/]+|new/value|new/slot/[^/]+"  # of an update
)
"""What a graph's inputs and outputs may be called: the table at the top of fedvit/program.py."""


class Session:
    """A graph on onnxruntime, fed with torch tensors; what it does not read is left out."""

    def __init__(self, graph: bytes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # more of them spin while they wait for graphs as small as these
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._inputs = [value.name for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        fed = {name: inputs[name].numpy() for name in self._inputs}
        values = self._session.run(self._outputs, fed)
        return {name: torch.from_numpy(np.asarray(v)) for name, v in zip(self._outputs, values, strict=True)}


def run(graph: bytes, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a graph gives, as arrays."""
    return {name: value.numpy() for name, value in Session(graph)(inputs).items()}


def assert_names_of_the_contract(
    method: Method, vit: PatchViT, serves: Serves, inputs: set[str], outputs: set[str]
) -> None:
    """Inputs are what a device feeds; outputs are what the graph is for: the new values or the gradients of what the
    phase moves, and what is collected."""
    assert all(NAMES.fullmatch(name) for name in inputs | outputs)
    if serves is None:
        assert outputs == {"logits"}
        return
    if isinstance(serves, Gather):
        assert outputs == {f"collect/{serves.output}"}
        return
    if isinstance(serves, Update):
        slots = {f"slot/{slot}" for slot in serves.rule.slots}
        assert inputs == {"value", "grad", "hyper/lr", "hyper/step"} | slots
        assert outputs == {"new/value"} | {f"new/{slot}" for slot in slots}
        return
    updated = list_trained(method, vit, serves)
    if serves.update:
        expected = {"metric/loss"} | {f"new/grad/{name}" for name in updated}
        assert not [name for name in inputs if name.startswith(("slot/", "hyper/lr", "hyper/step"))]
    else:
        expected = {"metric/loss"} | {f"new/tensor/{name}" for name in updated}
        expected |= {f"new/slot/{slot}/{name}" for slot in serves.slots for name in updated}
    assert expected <= outputs
    assert all(name.startswith("collect/") for name in outputs - expected)
    assert (serves.collect is None) or f"collect/{serves.collect.output}" in outputs


def whole(phase: Train) -> Train:
    """The phase as if its graph made whole steps: `example_inputs` then gives what `whole_step` reads."""
    return msgspec.structs.replace(phase, update=None)


def in_parts(phase: Train, names: Sequence[str], gradient: Run, update: Run, size: int) -> Run:
    """A whole step that moves tensors `names`, made of what adds gradients up and what moves a tensor by them.

    It reads and gives what `whole_step` does. `gradient` sees `size` rows of the batch at a time, the last of them
    filled up with zeros, and no part without a sample; each tensor is updated by itself.
    """

    def step(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        batch = {name: value for name, value in inputs.items() if name.startswith("batch/")}
        rows = len(batch["batch/weight"])
        grads = {f"grad/{name}": torch.zeros_like(inputs[f"tensor/{name}"]) for name in names}
        outputs = {"metric/loss": torch.zeros_like(batch["batch/weight"].sum())}
        for first in range(0, rows, size):
            part = {name: padded(value[first : first + size], size) for name, value in batch.items()}
            share = part["batch/weight"].sum() / batch["batch/weight"].sum()
            if not share:
                continue
            given = gradient({**inputs, **part, **grads, "batch/share": share})
            grads = {name: given[f"new/{name}"].detach() for name in grads}
            outputs["metric/loss"] = outputs["metric/loss"] + given["metric/loss"].detach()
            for name, value in given.items():
                if name.startswith("collect/"):
                    everything = outputs.setdefault(name, value.new_full((rows, *value.shape[1:]), torch.nan))
                    everything[first : first + size] = value.detach()[: rows - first]
        if phase.clip_norm is not None:
            clip(grads, phase.clip_norm)
        for name in names:
            slots = {f"slot/{slot}": inputs[f"slot/{slot}/{name}"].flatten() for slot in phase.slots}
            hyper = {key: inputs[key] for key in ("hyper/lr", "hyper/step")}
            value, grad = inputs[f"tensor/{name}"], grads[f"grad/{name}"]
            given = update({"value": value.flatten(), "grad": grad.flatten(), **slots, **hyper})
            outputs[f"new/tensor/{name}"] = given["new/value"].detach().reshape(value.shape)
            for slot in phase.slots:
                outputs[f"new/slot/{slot}/{name}"] = given[f"new/slot/{slot}"].detach().reshape(value.shape)
        return outputs

    return step


def padded(rows: Tensor, size: int) -> Tensor:
    """Zeros behind a short part."""
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


def clip(grads: Mapping[str, Tensor], norm: float) -> None:
    """In place, by torch's own function."""
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for parameter, grad in zip(parameters, grads.values(), strict=True):
        parameter.grad = grad
    torch.nn.utils.clip_grad_norm_(parameters, norm)
