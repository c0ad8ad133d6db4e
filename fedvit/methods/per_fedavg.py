"""Per-FedAvg: devices share a model that is good after one step on their own images."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import PREDICT, StepInputs, StepResult, clip_grads
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.models.vit import PatchViT
from fedvit.program import Evaluate, Train

ADAPT = "adapt"


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """Meta-learning: theta' = theta - a grad f1(theta), then theta moves by the gradient of f2 at theta'.

    A step takes 2 `batch_size` images, or as many as are left: f1 and f2 are the mean losses of those in odd and in
    even places, which are drawn at random. So a device learns from two images on; a last batch of a single image is
    passed over. A device is tested after one step of size a on at most `batch_size` of its own training images, and
    gets its tensors back.
    Source: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
    Meta-Learning Approach", NeurIPS 2020, arXiv:2002.07948, eq. 8 and algorithm 1, in the approximations of its
    section 5: first order, or Hessian-free by a difference of gradients.
    Differs from the paper: the Hessian is that of f1, as the derivative of theta' has it, not of a third batch.
    """

    source: ClassVar[str] = "Fallah et al., NeurIPS 2020, arXiv:2002.07948"
    one_gradient: ClassVar[bool] = False

    inner_lr: Annotated[float, Meta(gt=0)] | None = None  # of the adaptation (paper: alpha), no schedule; None: lr
    order: Literal["first", "hessian_free"] = "first"
    difference: Annotated[float, Meta(gt=0)] = 1e-3  # times a gradient: the way that hessian_free looks (paper: delta)

    @property
    def samples_per_step(self) -> int:
        return 2 * self.batch_size

    @property
    def adaptation_lr(self) -> float:
        return self.inner_lr or self.lr

    # --- the device's half ----------------------------------------------------------------------------

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        def gradients(rows: StepInputs, at: Named) -> tuple[dict[str, Tensor], Objective]:
            return calculus.gradients(lambda at: self.objective(vit, phase, {**fixed, **at}, rows), at)

        assert inputs.lr is not None
        if phase.graph == ADAPT:
            grads, (loss, collected, _) = gradients(inputs.rows(slice(self.batch_size)), updated)
            return StepResult(loss, _add_scaled(updated, grads, -inputs.lr), collected)
        # padding is at the end: every other image divides a batch that is not full, too
        first, second = _every_other(inputs, 0), _every_other(inputs, 1)
        inner, before = gradients(first, updated)
        grads, after = gradients(second, _add_scaled(updated, inner, -self.adaptation_lr))
        if self.order == "hessian_free":
            ahead, _ = gradients(first, _add_scaled(updated, grads, self.difference))
            behind, _ = gradients(first, _add_scaled(updated, grads, -self.difference))
            bend = {name: (ahead[name] - behind[name]) / (2 * self.difference) for name in grads}
            grads = _add_scaled(grads, bend, -self.adaptation_lr)
        if self.clip_norm is not None:
            grads = clip_grads(grads, self.clip_norm)
        new = calculus.update(updated, grads)
        # momentum and weight decay would move it also without an image
        learns = second.weight.sum() > 0
        new = {name: torch.where(learns, new[name], value) for name, value in updated.items()}
        calculus.slots = {
            key: torch.where(learns, kept, calculus.inputs[f"slot/{key}"]) for key, kept in calculus.slots.items()
        }
        share = first.weight.sum() / inputs.weight.sum().clamp(min=1)
        return StepResult(share * before.loss + (1 - share) * after.loss, new, after.collected)

    def evaluate(self, vit: PatchViT) -> Evaluate:
        step = self.phase(("model",), graph=ADAPT, slots=(), epochs=1, steps=1, lr=self.adaptation_lr)
        return Evaluate(graph=PREDICT, adapt=(step,))


def _add_scaled(values: Named, by: Named, scale: Tensor | float) -> dict[str, Tensor]:
    return {name: value + scale * by[name] for name, value in values.items()}


def _every_other(inputs: StepInputs, first: int) -> StepInputs:
    """The images in places first, first + 2, ...; copied, as a layer on rows with gaps has no ONNX form."""
    rows = inputs.rows(slice(first, None, 2))
    return rows._replace(images=rows.images._replace(patches=rows.images.patches.contiguous()))
