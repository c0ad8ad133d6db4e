"""FedDyn: each device corrects its loss, so that all devices together stand still where the sum of losses does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from fedvit.methods.aggregators import Floats
from fedvit.methods.base import RoundContext, ServerRule, ServerState, StepInputs, Upload
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.linear_term import DeviceDelta, LinearTerms, WithLinearTerm, average_terms
from fedvit.methods.rules.weighted_mean import move_tensors
from fedvit.models.vit import PatchViT
from fedvit.program import Train


@dataclass(frozen=True, kw_only=True)
class FedDyn(WithLinearTerm):
    """A device minimises its loss - <g_i, x> + alpha / 2 |x - x_start|^2; then g_i becomes g_i - alpha (x - x_start).

    The server moves to the mean of the devices' x, minus the mean of all g_i / alpha.
    Source: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, arXiv:2111.04263,
    algorithm 1, whose h is the mean of all g_i. Differs from the paper: that mean is over devices that have answered,
    and devices weigh as in FedAvg.
    """

    source: ClassVar[str] = "Acar et al., ICLR 2021, arXiv:2111.04263"

    alpha: Annotated[float, Meta(gt=0)] = 0.01

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        linear = super().objective(vit, phase, tensors, inputs)
        pulls = [(tensors[name] - start).square().sum() for name, start in inputs.anchors.items()]
        return linear._replace(loss=linear.loss + 0.5 * self.alpha * sum(pulls))

    def phases(self, vit: PatchViT) -> tuple[Train, ...]:
        return (self.phase(("model",), anchors=("model",)),)

    def server_rule(self, vit: PatchViT) -> ServerRule:
        return DynamicMean(alpha=self.alpha)


@dataclass(frozen=True, kw_only=True)
class DynamicMean(LinearTerms):
    """v_i is g_i."""

    alpha: float

    def follow(self, own: Floats, common: Floats, answer: DeviceDelta) -> Floats:
        return own - self.alpha * answer.update

    def make_term(self, own: Floats, common: Floats) -> Floats:
        return -own

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = super().close(state, uploads, context)
        steps = {name: -mean / self.alpha for name, mean in average_terms(updated).items()}
        return move_tensors(updated, steps)[0], figures
