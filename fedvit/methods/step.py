"""A method's device half as pure functions of named tensors: the training step and the prediction.

Names are those of `fedvit.program`. These functions are traced into the graphs that devices run.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedvit.methods.base import Images, Method, trained_names
from fedvit.models.vit import PatchViT
from fedvit.program import Batch, Train

Named = Mapping[str, Tensor]
Step = Callable[[Named], dict[str, Tensor]]


def loss_of(
    method: Method, vit: PatchViT, trained: Named, fixed: Named, inputs: Named
) -> tuple[Tensor, dict[str, Tensor]]:
    """(mean loss over the batch's real samples, what the method collects)."""
    weight = inputs["batch/weight"]
    forward = method.forward(vit, {**trained, **fixed}, Images(inputs["batch/patches"], inputs.get("batch/kept")))
    labels = inputs["batch/labels"]
    # a one-hot product instead of nll_loss: its backward needs no scatter
    chosen = (labels[:, None] == torch.arange(forward.logits.shape[1], device=labels.device)).to(weight.dtype)
    per_sample = -(torch.log_softmax(forward.logits, dim=1) * chosen).sum(dim=1)
    task_loss = (per_sample * weight).sum() / weight.sum()
    anchors = {name.removeprefix("anchor/"): value for name, value in inputs.items() if name.startswith("anchor/")}
    return method.loss(task_loss, trained, anchors), forward.collected


def train_step(method: Method, vit: PatchViT, phase: Train) -> Step:
    """One optimizer step of `phase`: forward, backward through what is frozen, update."""
    moved = trained_names(method, vit, phase)
    optimizer = method.optimizer_rule()

    def step(inputs: Named) -> dict[str, Tensor]:
        values = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
        trained = {name: values.pop(name) for name in moved}

        def loss(trained: Named) -> tuple[Tensor, dict[str, Tensor]]:
            return loss_of(method, vit, trained, values, inputs)

        grads, (mean_loss, collected) = grad_and_value(loss, has_aux=True)(trained)
        outputs = {"metric/loss": mean_loss}
        outputs |= {f"collect/{name}": value for name, value in collected.items()}
        for name in moved:
            slots = {slot: inputs[f"slot/{slot}/{name}"] for slot in optimizer.slots}
            value, slots = optimizer.update(trained[name], grads[name], slots, inputs["hyper/lr"], inputs["hyper/step"])
            outputs[f"new/tensor/{name}"] = value
            outputs |= {f"new/slot/{slot}/{name}": kept for slot, kept in slots.items()}
        return outputs

    return step


def predict(method: Method, vit: PatchViT) -> Step:
    """Logits of full images."""

    def run(inputs: Named) -> dict[str, Tensor]:
        values = {name.removeprefix("tensor/"): value for name, value in inputs.items() if name.startswith("tensor/")}
        return {"logits": method.forward(vit, values, Images(inputs["batch/patches"], None)).logits}

    return run


def first_step_inputs(inputs: Named) -> dict[str, Tensor]:
    """The same inputs as a phase's first step sees them: no optimizer state yet."""
    first = {name: torch.zeros_like(value) if name.startswith("slot/") else value for name, value in inputs.items()}
    return first | {"hyper/step": torch.tensor(1.0)}


def example_inputs(
    method: Method, vit: PatchViT, batch: Batch, phase: Train | None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of the right names, shapes and plausible values; `phase` None means prediction.

    Optimizer slots are not zero and the last samples are padding, so that a comparison of two
    implementations on these inputs sees every term. AdamW's squares are large enough that a gradient
    which is zero but for rounding (the bias of the keys) does not become a full-sized random step.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    inputs = {f"tensor/{name}": value + 0.02 * normal(*value.shape) for name, value in vit.tensors().items()}
    size = batch.batch_size
    if phase is None:
        return inputs | {"batch/patches": normal(size, batch.patches, batch.patch_values)}
    moved = trained_names(method, vit, phase)
    for slot in method.optimizer_rule().slots:
        for name in moved:
            noise = normal(*inputs[f"tensor/{name}"].shape)
            inputs[f"slot/{slot}/{name}"] = 1e-4 + 1e-4 * noise.square() if slot.endswith("_sq") else 1e-2 * noise
    for group in phase.anchors:
        for name in method.names_in(vit, group):
            inputs[f"anchor/{name}"] = inputs[f"tensor/{name}"] + 0.01 * normal(*inputs[f"tensor/{name}"].shape)
    inputs["batch/patches"] = normal(size, batch.kept_patches, batch.patch_values)
    if batch.kept_patches < batch.patches:
        rows = [torch.randperm(batch.patches, generator=draw)[: batch.kept_patches].sort().values for _ in range(size)]
        inputs["batch/kept"] = torch.stack(rows)
    inputs["batch/labels"] = torch.randint(0, vit.vit.num_classes, (size,), generator=draw)
    inputs["batch/weight"] = (torch.arange(size) < max(1, size - size // 4)).float()
    inputs["hyper/lr"] = torch.tensor(1e-2)
    inputs["hyper/step"] = torch.tensor(3.0)
    return inputs
