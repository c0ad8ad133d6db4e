"""APFL: every device mixes the shared model with one of its own."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.methods.base import Gathered, GroupRule, Images, StepInputs, StepResult, clip_grads
from fedvit.methods.calculus import Calculus, Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.twins import TWIN, name_twins, select_twins
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train

ALPHA = "alpha"
MIX = "mix"
CODES_DECAY = 0.02  # of alpha, in the released code


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """A shared model w, and beside it a personal v and the share alpha of it in the answer; both stay on the device.

    Source: Deng et al., "Adaptive Personalized Federated Learning", arXiv:2003.13461, eq. 4 and algorithm 1:
    m = alpha v + (1 - alpha) w learns by v and by alpha, w learns by itself as in FedAvg, and m answers, made of the
    newest w. Form `code` is that of PFLlib and FedPerfix: v learns by its own loss, becomes m when the round's
    training ends, and answers alone. The round's loss is then that of the new v on one batch.
    Differs from the paper: weights of the mean as in FedAvg. v and alpha follow the chosen optimizer, too; so
    a weight decay pulls also at alpha.
    """

    source: ClassVar[str] = "Deng et al., arXiv:2003.13461"
    one_gradient: ClassVar[bool] = False

    alpha: Annotated[float, Meta(ge=0, le=1)] = 0.25  # first share of the personal model; 1 is training alone
    adaptive: bool = True  # alpha is trained; else it stays
    form: Literal["paper", "code"] = "paper"

    # --- tensors --------------------------------------------------------------------------------------

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return name_twins(vit.tensors()) | ({ALPHA: torch.tensor([self.alpha])} if self.adaptive else {})

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (
            GroupRule("twin", Role.LOCAL, (f"{TWIN}*",)),
            GroupRule("alpha", Role.LOCAL, (ALPHA,)),
            GroupRule("model", Role.SHARED, ("*",)),
        )

    def _share(self, tensors: Named) -> Tensor | float:
        return tensors[ALPHA] if self.adaptive else self.alpha

    def _mix(self, tensors: Named) -> dict[str, Tensor]:
        share = self._share(tensors)
        return {name: share * own + (1 - share) * tensors[name] for name, own in select_twins(tensors).items()}

    # --- the device's half ----------------------------------------------------------------------------

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        tensors = {**fixed, **updated}
        if phase.graph == MIX:
            mixed = self._mix(tensors)
            loss, collected, _ = self.objective(vit, phase, mixed, inputs)
            return StepResult(loss, name_twins(mixed), collected)
        twin = select_twins(tensors)
        shared = {name: tensors[name] for name in twin}
        learner = self._mix(tensors) if self.form == "paper" else twin
        learning = {name: value for name, value in shared.items() if name in updated}  # on a novel device: nothing
        grads: dict[str, Tensor] = {}
        if learning or self.form == "code":
            grads, _ = self._gradients(calculus, vit, phase, shared, inputs)
        own, (loss, collected, _) = self._gradients(calculus, vit, phase, learner, inputs)
        share = self._share(tensors)
        by_twin = {name: share * grad for name, grad in own.items()} if self.form == "paper" else own
        new = calculus.update({**learning, **name_twins(twin)}, {**grads, **name_twins(by_twin)})
        if self.adaptive:
            if self.form == "paper":
                slope = _product(tensors, own)
            else:  # at the new values, by the old gradients
                both = {name: share * own[name] + (1 - share) * grads[name] for name in own}
                slope = _product({**shared, **new}, both) + CODES_DECAY * share
            new |= calculus.update({ALPHA: tensors[ALPHA]}, {ALPHA: slope.reshape(1)})
            new[ALPHA] = new[ALPHA].clamp(0, 1)
        return StepResult(loss, new, collected)

    def _gradients(
        self, calculus: Calculus, vit: PatchViT, phase: Train, at: Named, inputs: StepInputs
    ) -> tuple[dict[str, Tensor], Objective]:
        grads, value = calculus.gradients(lambda at: self.objective(vit, phase, at, inputs), at)
        return (grads if self.clip_norm is None else clip_grads(grads, self.clip_norm)), value

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        answering = self._mix(tensors) if self.form == "paper" else select_twins(tensors)
        return self.forward(vit, answering, images).logits

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        together = super().phases(vit)
        return (
            together
            if self.form == "paper"
            else (*together, self.phase(("twin",), graph=MIX, slots=(), epochs=1, steps=1))
        )


def _product(tensors: Named, grads: Named) -> Tensor:
    """<v - w, grads>."""
    terms = [((tensors[f"{TWIN}{name}"] - tensors[name]) * grad).sum() for name, grad in grads.items()]
    return torch.stack(terms).sum()
