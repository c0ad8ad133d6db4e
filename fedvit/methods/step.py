"""A method's device half as pure functions of named tensors: training steps, gathering, prediction.

Names are those of `fedvit.program`. These functions are traced into the graphs that devices run.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedvit.methods.base import PREDICT, Gathered, Images, Method, StepInputs, trained_names
from fedvit.methods.calculus import Calculus, Named, TracedCalculus
from fedvit.methods.optimizers import Optimizer
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Gather, Train

Step = Callable[[Named], dict[str, Tensor]]

_IMAGES = ("batch/patches", "batch/kept")


def train_step(
    method: Method, vit: PatchViT, phase: Train, calculus: Callable[[Optimizer, Named], Calculus] = TracedCalculus
) -> Step:
    """One optimizer step of `phase`: forward, backward through what is frozen, update."""
    rule = method.optimizer_rule()
    names = trained_names(method, vit, phase)

    def step(inputs: Named) -> dict[str, Tensor]:
        used, fixed = calculus(rule, inputs), _under(inputs, "tensor/")
        moved = {name: fixed.pop(name) for name in names}
        result = method.local_step(used, vit, phase, moved, fixed, _step_inputs(inputs))
        outputs = {"metric/loss": result.loss}
        outputs |= {f"collect/{name}": value for name, value in result.collected.items()}
        for name in names:
            outputs[f"new/tensor/{name}"] = result.moved[name]
            outputs |= {f"new/slot/{slot}/{name}": used.slots[f"{slot}/{name}"] for slot in rule.slots}
        return outputs

    return step


def gather_step(method: Method, vit: PatchViT, gather: Gather) -> Step:
    """What an evaluation gathers from full images."""

    def run(inputs: Named) -> dict[str, Tensor]:
        forward = method.forward(vit, _under(inputs, "tensor/"), Images(inputs["batch/patches"], None))
        return {f"collect/{gather.output}": forward.collected[gather.output]}

    return run


def predict_step(method: Method, vit: PatchViT) -> Step:
    """Logits of full images."""

    def run(inputs: Named) -> dict[str, Tensor]:
        values = _under(inputs, "gathered/")
        gathered = Gathered(values, values.pop("labels"), values.pop("weight")) if values else None
        images = Images(inputs["batch/patches"], None)
        return {"logits": method.predict(vit, _under(inputs, "tensor/"), images, gathered)}

    return run


def steps_of(method: Method, vit: PatchViT) -> dict[str, Train | Gather | None]:
    """Every graph of a method, and what it serves; None is prediction. Phases that name one graph share it."""
    evaluate = method.evaluate(vit)
    graphs: dict[str, Train | Gather | None] = {}
    for phase in (*method.phases(vit), *evaluate.adapt):
        graphs.setdefault(phase.graph, phase)
    if evaluate.gather:
        graphs[evaluate.gather.graph] = evaluate.gather
    return {**graphs, PREDICT: None}


def _under(inputs: Named, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in inputs.items() if name.startswith(prefix)}


def _step_inputs(inputs: Named) -> StepInputs:
    return StepInputs(
        images=Images(inputs["batch/patches"], inputs.get("batch/kept")),
        labels=inputs["batch/labels"],
        weight=inputs["batch/weight"],
        anchors=_under(inputs, "anchor/"),
        facts=_under(inputs, "fact/"),
        draws=_under(inputs, "draw/"),
        lr=inputs["hyper/lr"],
        last=inputs.get("hyper/last"),
    )


# --- inputs to trace and to verify with ---------------------------------------------------------------


def first_step_inputs(inputs: Named) -> dict[str, Tensor]:
    """The same inputs as a phase's first step sees them: no optimizer state yet."""
    first = {name: torch.zeros_like(value) if name.startswith("slot/") else value for name, value in inputs.items()}
    return first | {"hyper/step": torch.tensor(1.0)}


def example_inputs(
    method: Method, vit: PatchViT, batch: Batch, of: Train | Gather | None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of the right names, shapes and plausible values for one graph of `steps_of`.

    Optimizer slots are not zero and the last samples are padding, so that a comparison of two
    implementations on these inputs sees every term. AdamW's squares are large enough that a gradient
    which is zero but for rounding (the bias of the keys) does not become a full-sized random step.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    inputs = {f"tensor/{name}": value + 0.02 * normal(*value.shape) for name, value in method.tensors(vit).items()}
    size, classes = batch.batch_size, vit.vit.num_classes
    if not isinstance(of, Train):
        inputs["batch/patches"] = normal(size, batch.patches, batch.patch_values)
        gather = method.evaluate(vit).gather
        if of is None and gather:
            inputs[f"gathered/{gather.output}"] = normal(gather.capacity, *gather.shape)
            inputs["gathered/labels"] = torch.randint(0, classes, (gather.capacity,), generator=draw)
            inputs["gathered/weight"] = (torch.arange(gather.capacity) < max(1, gather.capacity // 2)).float()
        return inputs
    moved = trained_names(method, vit, of)
    for slot in method.optimizer_rule().slots:
        for name in moved:
            noise = normal(*inputs[f"tensor/{name}"].shape)
            inputs[f"slot/{slot}/{name}"] = 1e-4 + 1e-4 * noise.square() if slot.endswith("_sq") else 1e-2 * noise
    for name in method.names_in(vit, *of.anchors):
        inputs[f"anchor/{name}"] = inputs[f"tensor/{name}"] + 0.01 * normal(*inputs[f"tensor/{name}"].shape)
    inputs["batch/patches"] = normal(size, batch.kept_patches, batch.patch_values)
    if batch.kept_patches < batch.patches:
        rows = [torch.randperm(batch.patches, generator=draw)[: batch.kept_patches].sort().values for _ in range(size)]
        inputs["batch/kept"] = torch.stack(rows)
    inputs["batch/labels"] = torch.randint(0, classes, (size,), generator=draw)
    inputs["batch/weight"] = (torch.arange(size) < max(1, size - size // 4)).float()
    inputs["fact/class_counts"] = torch.bincount(inputs["batch/labels"], minlength=classes).float()
    for drawn in of.draws:
        numbers = torch.randint(drawn.low, drawn.high, (drawn.count,), generator=draw)
        inputs[f"draw/{drawn.name}"] = numbers.sort().values if drawn.ascending else numbers
    inputs["hyper/lr"] = torch.tensor(1e-2)
    inputs["hyper/step"] = torch.tensor(3.0)
    if of.repeats > 1:
        inputs["hyper/last"] = torch.tensor(1.0)
    return inputs
