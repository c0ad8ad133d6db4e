"""Differentiation and update in a training step.

A method implements its step once, with `Calculus`. Traced into a graph it is `TracedCalculus`: functional
gradients and optimizers as arithmetic. Verification of the graph runs the same step with autograd and
torch.optim instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedvit.methods.optimizers import Optimizer

Named = Mapping[str, Tensor]
SHOWN = "loss that is shown"
"""Its name among the values that are collected, while gradients are traced."""


class Objective(NamedTuple):
    """The value that a step minimises, and values that it may record per sample."""

    loss: Tensor  # ()
    collected: dict[str, Tensor]
    shown: Tensor | None = None  # (): what the device reports as its loss; None: the loss


class Calculus(ABC):
    """Gradients, and one optimizer whose state is among the step's inputs. `slots` fills up as tensors are updated."""

    def __init__(self, optimizer: Optimizer, inputs: Named) -> None:
        self.optimizer = optimizer
        self.inputs = inputs
        self.slots: dict[str, Tensor] = {}  # "SLOT/NAME" -> new state

    @abstractmethod
    def gradients(self, objective: Callable[[Named], Objective], at: Named) -> tuple[dict[str, Tensor], Objective]:
        """The gradient of the loss by every tensor of `at`, and the objective there; its loss is the reported one."""

    @abstractmethod
    def update(self, values: Named, grads: Named) -> dict[str, Tensor]:
        """The values after one optimizer step. A step may update each tensor once."""


class TracedCalculus(Calculus):
    """Pure tensor arithmetic."""

    def gradients(self, objective: Callable[[Named], Objective], at: Named) -> tuple[dict[str, Tensor], Objective]:
        def loss(at: Named) -> tuple[Tensor, dict[str, Tensor]]:
            value = objective(at)
            return value.loss, value.collected if value.shown is None else {**value.collected, SHOWN: value.shown}

        grads, (value, collected) = grad_and_value(loss, has_aux=True)(dict(at))
        return grads, Objective(collected.pop(SHOWN, value), collected)

    def update(self, values: Named, grads: Named) -> dict[str, Tensor]:
        updated = {}
        for name, value in values.items():
            slots = {slot: self.inputs[f"slot/{slot}/{name}"] for slot in self.optimizer.slots}
            updated[name], slots = self.optimizer.update(
                value, grads[name], slots, self.inputs["hyper/lr"], self.inputs["hyper/step"]
            )
            self.slots |= {f"{slot}/{name}": kept for slot, kept in slots.items()}
        return updated


class TorchCalculus(Calculus):
    """backward() and torch.optim, as a torch user writes a step: the reference for graphs."""

    def gradients(self, objective: Callable[[Named], Objective], at: Named) -> tuple[dict[str, Tensor], Objective]:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in at.items()}
        value = objective(leaves)
        value.loss.backward()
        grads = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in leaves.items()}
        shown = value.loss if value.shown is None else value.shown
        return grads, Objective(shown.detach(), {name: each.detach() for name, each in value.collected.items()})

    def update(self, values: Named, grads: Named) -> dict[str, Tensor]:
        leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
        optimizer = self.optimizer.in_torch(list(leaves.values()), float(self.inputs["hyper/lr"]))
        for name, leaf in leaves.items():
            leaf.grad = grads[name].detach()
            for slot in self.optimizer.slots:
                optimizer.state[leaf][slot] = self.inputs[f"slot/{slot}/{name}"].clone()
            if "exp_avg" in self.optimizer.slots:
                optimizer.state[leaf]["step"] = self.inputs["hyper/step"] - 1
        optimizer.step()
        for name, leaf in leaves.items():
            self.slots |= {f"{slot}/{name}": optimizer.state[leaf][slot] for slot in self.optimizer.slots}
        return {name: leaf.detach() for name, leaf in leaves.items()}
