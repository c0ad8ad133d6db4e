"""pFedMe: every device has a model of its own on a spring that is fixed at the shared one."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from fedvit.errors import ConfigError
from fedvit.methods.base import Gathered, GroupRule, Images, ServerRule, StepInputs, StepResult, clip_grads
from fedvit.methods.calculus import Calculus, Named
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.methods.twins import TWIN, name_twins, select_twins
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train


@dataclass(frozen=True, kw_only=True)
class PFedMe(FedAvg):
    """The shared w is pulled toward the theta that minimises f(theta) + lam/2 |theta - w|^2 on each batch.

    On a batch theta takes `inner_steps` steps, then w one: w <- w - lr lam (w - theta). theta stays on the device
    and answers there.
    Source: T Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, arXiv:2006.08848,
    algorithm 1. Values and the start of theta as in FedTP's code, which decays no weights.
    Differs from the paper: weights of the mean as in FedAvg. Both steps are the method's own, so there is no momentum
    and no other optimizer than sgd; `weight_decay` and `clip_norm` act on theta.
    """

    source: ClassVar[str] = "T Dinh et al., NeurIPS 2020, arXiv:2006.08848"
    one_gradient: ClassVar[bool] = False

    inner_steps: Annotated[int, Meta(ge=1)] = 5  # of theta on a batch (paper: K)
    lam: Annotated[float, Meta(ge=0)] = 15.0  # strength of the spring (paper: lambda)
    personal_lr: Annotated[float, Meta(gt=0)] | None = None  # of theta; None: lr
    mixing: Annotated[float, Meta(gt=0)] = 1.0  # share of the way that the server goes to the mean (paper: beta)
    start: Literal["shared", "own"] = "shared"  # theta in a round: where w is, or where the device's last round left it

    def __post_init__(self) -> None:
        if self.optimizer != "sgd" or self.momentum:
            given = f"optimizer = {self.optimizer!r}" if self.optimizer != "sgd" else f"momentum = {self.momentum}"
            raise ConfigError("FV1104", f"option {given} is not for method 'pfedme', whose steps are its own")

    # --- tensors --------------------------------------------------------------------------------------

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return name_twins(vit.tensors())

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("twin", Role.LOCAL, (f"{TWIN}*",)), GroupRule("model", Role.SHARED, ("*",)))

    # --- the device's half ----------------------------------------------------------------------------

    def local_step(
        self, calculus: Calculus, vit: PatchViT, phase: Train, updated: Named, fixed: Named, inputs: StepInputs
    ) -> StepResult:
        assert inputs.lr is not None
        theta, tensors = select_twins(updated), {**fixed, **updated}
        shared = {name: tensors[name] for name in theta}
        if self.start == "shared":
            begins = calculus.inputs["hyper/step"] == 1
            theta = {name: torch.where(begins, shared[name], value) for name, value in theta.items()}
        grads, (loss, collected, _) = calculus.gradients(lambda at: self.objective(vit, phase, at, inputs), theta)
        pulled = {name: grad + self.lam * (theta[name] - shared[name]) for name, grad in grads.items()}
        if self.clip_norm is not None:
            pulled = clip_grads(pulled, self.clip_norm)
        theta = calculus.update(theta, pulled)
        # the schedule is in inputs.lr, theta's rate
        pull = inputs.lr * (self.lr / phase.lr * self.lam)
        if inputs.last is not None:
            pull = inputs.last * pull
        shared = {name: w - pull * (w - theta[name]) for name, w in shared.items() if name in updated}
        return StepResult(loss, {**shared, **name_twins(theta)}, collected)

    def predict(self, vit: PatchViT, tensors: Named, images: Images, gathered: Gathered | None) -> Tensor:
        return self.forward(vit, select_twins(tensors), images).logits

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("twin", "model"), repeats=self.inner_steps, lr=self.personal_lr or self.lr),)

    # --- the server's half ----------------------------------------------------------------------------

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return WeightedMean(mixing=self.mixing)
