"""The loss of each sample, by the run's task. Graphs of these pass the information-flow check of devices."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedvit.label_forms import OtherTask
from fedvit.models.vit import PatchViT

TINY = 1e-12
"""Added to a square before its root, whose derivative at 0 is infinite."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per sample: (B, C) logits and (B,) labels -> (B,). Of several positions, (B, T, C) and (B, T), their mean."""
    if labels.ndim != logits.ndim - 1:
        raise TypeError(f"labels of shape {tuple(labels.shape)} are not one class for each of {tuple(logits.shape)}")
    # a one-hot product instead of nll_loss: its backward needs no scatter, and a label of -1 adds no loss
    chosen = (labels.unsqueeze(-1) == torch.arange(logits.shape[-1], device=labels.device)).to(logits.dtype)
    losses = -(torch.log_softmax(logits, dim=-1) * chosen).sum(dim=-1)
    return losses if losses.ndim == 1 else losses.mean(dim=1)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over classes: (B, C) logits and (B, C) labels of 0 and 1 -> (B,)."""
    # the cross-entropy of two classes for each class, as devices know its graph; its gradient at 0 is right
    pairs = torch.stack([torch.zeros_like(logits), logits], dim=-1)
    chosen = (labels.unsqueeze(-1) == torch.arange(2, device=labels.device).to(labels.dtype)).to(logits.dtype)
    return -(torch.log_softmax(pairs, dim=-1) * chosen).sum(dim=-1).mean(dim=1)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean over outputs: (B, C) and (B, C) -> (B,)."""
    return (outputs - labels.to(outputs.dtype)).square().mean(dim=1)


LOSSES: dict[OtherTask, Callable[[Tensor, Tensor], Tensor]] = {
    "multi_label": binary_cross_entropy,
    "regression": squared_error,
    "segmentation": cross_entropy,
}


def sample_losses(vit: PatchViT, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each sample, (B,), by the task of the model's run."""
    return (LOSSES[vit.label_form.task] if vit.label_form else cross_entropy)(logits, labels)


def normalise(rows: Tensor) -> Tensor:
    """Return rows of length 1: (B, D) -> (B, D). A row of zeros stays one."""
    return rows / (rows.square().sum(dim=1, keepdim=True) + TINY).sqrt()
