"""A method's device half as pure functions of named tensors: training steps, gathering, prediction.

Names are those of `fedvit.program`. These functions are traced into the graphs that devices run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.methods.base import PREDICT, Gathered, Images, Method, StepInputs, list_trained
from fedvit.methods.calculus import Calculus, Named, Objective, TracedCalculus
from fedvit.methods.novel import phases_of
from fedvit.methods.optimizers import Optimizer
from fedvit.methods.packed import as_sent, unpack_tensors
from fedvit.models.vit import PatchViT
from fedvit.program import SEEDS, Batch, Gather, Train

Step = Callable[[Named], dict[str, Tensor]]

Calculi = Callable[[Optimizer, Named], Calculus]


@dataclass(frozen=True)
class Update:
    """The purpose of a graph that applies gradients."""

    rule: Optimizer


Serves = Train | Update | Gather | None
"""The purpose of a graph; None is prediction."""

PIECE = 4099
"""Elements of the example of an update. A prime, so that the graph's only length of this size is that of the piece."""


def train_step(method: Method, vit: PatchViT, phase: Train, calculus: Calculi = TracedCalculus) -> Step:
    """Trace the step of a phase: a gradient added to those before, or a whole optimizer step."""
    return (_gradient_step if phase.update else whole_step)(method, vit, phase, calculus)


def whole_step(method: Method, vit: PatchViT, phase: Train, calculus: Calculi = TracedCalculus) -> Step:
    """One optimizer step: forward, backward through what is frozen, update."""
    rule = method.optimizer_rule()
    names = list_trained(method, vit, phase)

    def step(inputs: Named) -> dict[str, Tensor]:
        used, fixed = calculus(rule, inputs), _tensors(inputs)
        updated = {name: fixed.pop(name) for name in names}
        with vit.recomputing(method.recompute):
            result = method.local_step(used, vit, phase, updated, fixed, _step_inputs(inputs))
        outputs = {"metric/loss": result.loss, **_record(phase, result.collected)}
        for name in names:
            outputs[f"new/tensor/{name}"] = result.updated[name]
            for slot in (f"{slot}/{name}" for slot in phase.slots):
                # a tensor that a step writes without the optimizer has none of its state
                outputs[f"new/slot/{slot}"] = used.slots.get(slot, torch.zeros_like(result.updated[name]))
        return outputs

    return step


def _gradient_step(method: Method, vit: PatchViT, phase: Train, calculus: Calculi) -> Step:
    """The gradient of some of a batch's samples, added to that of the others.

    The objective is a mean over samples plus terms of the tensors alone. As if these samples were the batch, times
    their share of it, and summed over the batch, it is the objective of the whole, and so is its gradient.
    """
    names = list_trained(method, vit, phase)

    def step(inputs: Named) -> dict[str, Tensor]:
        used, fixed = calculus(method.optimizer_rule(), inputs), _tensors(inputs)
        updated = {name: fixed.pop(name) for name in names}
        given = _step_inputs(inputs)

        def objective(at: Named) -> Objective:
            loss, collected, shown = method.objective(vit, phase, {**fixed, **at}, given)
            share = inputs["batch/share"]
            return Objective(loss * share, collected, None if shown is None else shown * share)

        with vit.recomputing(method.recompute):
            grads, value = used.gradients(objective, updated)
        outputs = {"metric/loss": value.loss, **_record(phase, value.collected)}
        return outputs | {f"new/grad/{name}": inputs[f"grad/{name}"] + grads[name] for name in names}

    return step


def _record(phase: Train, collected: Named) -> dict[str, Tensor]:
    """The value that a phase records, of those that the method could."""
    if phase.collect is None:
        return {}
    return {f"collect/{phase.collect.output}": collected[phase.collect.output]}


def update_step(rule: Optimizer, calculus: Calculi = TracedCalculus) -> Step:
    """One optimizer step of any piece of the trained tensors."""

    def step(inputs: Named) -> dict[str, Tensor]:
        # as if there were one tensor, called "value"
        used = calculus(rule, {f"{name}/value" if name.startswith("slot/") else name: v for name, v in inputs.items()})
        updated = used.update({"value": inputs["value"]}, {"value": inputs["grad"]})
        return {
            "new/value": updated["value"],
            **{f"new/slot/{slot}": used.slots[f"{slot}/value"] for slot in rule.slots},
        }

    return step


def gather_step(method: Method, vit: PatchViT, gather: Gather) -> Step:
    """Compute the values that an evaluation gathers from full images."""

    def run(inputs: Named) -> dict[str, Tensor]:
        forward = method.forward(vit, _tensors(inputs), _samples(inputs))
        return {f"collect/{gather.output}": forward.collected[gather.output]}

    return run


def predict_step(method: Method, vit: PatchViT) -> Step:
    """Logits of full images."""

    def run(inputs: Named) -> dict[str, Tensor]:
        values = _under(inputs, "gathered/")
        gathered = Gathered(values, values.pop("labels"), values.pop("weight")) if values else None
        return {"logits": method.predict(vit, _tensors(inputs), _samples(inputs), gathered)}

    return run


def steps_of(method: Method, vit: PatchViT) -> dict[str, Serves]:
    """Every graph of a method, and its purpose. Phases that name one graph share it."""
    evaluate = method.evaluate(vit)
    graphs: dict[str, Serves] = {}
    for phase in (*phases_of(method, vit), *evaluate.adapt):
        graphs.setdefault(phase.graph, phase)
        if phase.update:
            graphs[phase.update] = Update(method.optimizer_rule())
    if evaluate.gather:
        graphs[evaluate.gather.graph] = evaluate.gather
    return {**graphs, PREDICT: None}


def _under(inputs: Named, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}


def _tensors(inputs: Named) -> dict[str, Tensor]:
    return unpack_tensors(_under(inputs, "tensor/"))


def _samples(inputs: Named) -> Images:
    read = inputs["batch/tokens"] if "batch/tokens" in inputs else inputs["batch/patches"]
    return Images(read, inputs.get("batch/kept"), inputs.get("batch/seeds"))


def _step_inputs(inputs: Named) -> StepInputs:
    return StepInputs(
        images=_samples(inputs),
        labels=inputs["batch/labels"],
        weight=inputs["batch/weight"],
        anchors=_under(inputs, "anchor/"),
        facts=_under(inputs, "fact/"),
        draws=_under(inputs, "draw/"),
        lr=inputs.get("hyper/lr"),
        last=inputs.get("hyper/last"),
    )


# --- inputs to trace and to verify with ---------------------------------------------------------------


def first_step_inputs(inputs: Named) -> dict[str, Tensor]:
    """The same inputs as a phase's first step sees them: no optimizer state yet."""
    first = {name: torch.zeros_like(value) if name.startswith("slot/") else value for name, value in inputs.items()}
    return first | {"hyper/step": torch.tensor(1.0)}


def example_inputs(method: Method, vit: PatchViT, batch: Batch, of: Serves, *, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of the right names, shapes and plausible values for one graph of `steps_of`.

    Optimizer slots are not zero and the last samples are padding, so that a comparison of two
    implementations on these inputs sees every term. AdamW's squares are large enough that a gradient
    which is zero but for rounding (the bias of the keys) does not become a full-sized random step.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def slot(name: str, *shape: int) -> Tensor:
        return 1e-4 + 1e-4 * normal(*shape).square() if name.endswith("_sq") else 1e-2 * normal(*shape)

    if isinstance(of, Update):
        # gradients of every size, and what is remembered of them: AdamW's eps shows where they are as small
        sizes = 10 ** (-10 * torch.rand(PIECE, generator=draw))
        inputs = {"value": normal(PIECE), "grad": sizes * normal(PIECE)}
        for name in of.rule.slots:
            inputs[f"slot/{name}"] = slot(name, PIECE) * (sizes.square() if name.endswith("_sq") else sizes)
        return inputs | {"hyper/lr": torch.tensor(1e-2), "hyper/step": torch.tensor(3.0)}
    values = {name: value + 0.02 * normal(*value.shape) for name, value in method.tensors(vit).items()}
    travelling = as_sent(method, vit, {name: value.numpy() for name, value in values.items()})
    inputs = {f"tensor/{name}": torch.from_numpy(value) for name, value in travelling.items()}
    size, classes = batch.run_size if isinstance(of, Train) else batch.answer_size, vit.vit.num_classes
    if batch.text and not isinstance(of, Train):
        return inputs | {"batch/tokens": torch.randint(0, classes, (size, batch.text.context), generator=draw)}
    if not isinstance(of, Train):
        inputs["batch/patches"] = normal(size, batch.patches, batch.patch_values)
        gather = method.evaluate(vit).gather
        if of is None and gather:
            inputs[f"gathered/{gather.output}"] = normal(gather.capacity, *gather.shape)
            inputs["gathered/labels"] = torch.randint(0, classes, (gather.capacity,), generator=draw)
            inputs["gathered/weight"] = (torch.arange(gather.capacity) < max(1, gather.capacity // 2)).float()
        return inputs
    shapes = {name: tuple(inputs[f"tensor/{name}"].shape) for name in list_trained(method, vit, of)}
    if of.update:
        inputs |= {f"grad/{name}": 1e-3 * normal(*shape) for name, shape in shapes.items()}
        inputs["batch/share"] = torch.tensor(0.75)
    else:
        size = batch.batch_size
        inputs |= {f"slot/{kept}/{name}": slot(kept, *shape) for kept in of.slots for name, shape in shapes.items()}
        inputs["hyper/step"] = torch.tensor(3.0)
        inputs["hyper/lr"] = torch.tensor(1e-2)
    for name in method.names_in(vit, *of.anchors):
        inputs[f"anchor/{name}"] = inputs[f"tensor/{name}"] + 0.01 * normal(*inputs[f"tensor/{name}"].shape)
    shape = (size, batch.text.context) if batch.text else (size,)
    if batch.text:
        inputs["batch/tokens"] = torch.randint(0, classes, shape, generator=draw)
    else:
        inputs["batch/patches"] = normal(size, batch.kept_patches, batch.patch_values)
    if batch.kept_patches < batch.patches:
        rows = [torch.randperm(batch.patches, generator=draw)[: batch.kept_patches].sort().values for _ in range(size)]
        inputs["batch/kept"] = torch.stack(rows)
    if batch.sample_seeds:
        inputs["batch/seeds"] = torch.randint(0, SEEDS, (size,), generator=draw)
    form = batch.labels
    if form is None or form.labels_patches:
        shape = (size, batch.patches) if form else shape
        inputs["batch/labels"] = torch.randint(0, classes, shape, generator=draw)
    else:
        inputs["batch/labels"] = normal(size, classes)
        if form.task == "multi_label":
            inputs["batch/labels"] = (inputs["batch/labels"] > 0).float()
    inputs["batch/weight"] = (torch.arange(size) < max(1, size - size // 4)).float()
    if form and not form.labels_patches:
        inputs["fact/class_counts"] = (inputs["batch/labels"] > 0).float().sum(dim=0)
    else:
        inputs["fact/class_counts"] = torch.bincount(inputs["batch/labels"].flatten(), minlength=classes).float()
    for drawn in of.draws:
        numbers = torch.randint(drawn.low, drawn.high, (drawn.count,), generator=draw)
        inputs[f"draw/{drawn.name}"] = numbers.sort().values if drawn.ascending else numbers
    if of.repeats > 1:
        inputs["hyper/last"] = torch.tensor(1.0)
    return inputs
