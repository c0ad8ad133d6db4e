"""FedAvg with a linear term in each device's loss, which the server makes for this device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor, zeros_like

from fedvit.methods.aggregators import Floats
from fedvit.methods.base import GroupRule, RoundContext, ServerRule, ServerState, StepInputs, Upload
from fedvit.methods.calculus import Named, Objective
from fedvit.methods.fedavg import FedAvg
from fedvit.methods.rules.weighted_mean import WeightedMean
from fedvit.models.vit import PatchViT
from fedvit.program import Role, Train
from fedvit.tensors import Array, Tensors

TERM = "term."
OWN, SUM = "own_term", "sum_of_terms"


@dataclass(frozen=True, kw_only=True)
class WithLinearTerm(FedAvg, ABC):
    """A device minimises its loss + <t, x>. The server computes t from the device's updates."""

    def extra_tensors(self, vit: PatchViT) -> dict[str, Tensor]:
        return {f"{TERM}{name}": zeros_like(value) for name, value in vit.tensors().items()}

    def rules(self, vit: PatchViT) -> tuple[GroupRule, ...]:
        return (GroupRule("term", Role.ASSIGNED, (f"{TERM}*",)), GroupRule("model", Role.SHARED, ("*",)))

    def objective(self, vit: PatchViT, phase: Train, tensors: Named, inputs: StepInputs) -> Objective:
        plain = super().objective(vit, phase, tensors, inputs)
        terms = [(tensors[f"{TERM}{name}"] * tensors[name]).sum() for name, _ in vit.vit.named_parameters()]
        return plain._replace(loss=plain.loss + sum(terms), shown=plain.loss)


class DeviceDelta(NamedTuple):
    """A device's update of a tensor, and the numbers behind it."""

    update: Floats
    upload: Upload
    lr_scale: float


@dataclass(frozen=True, kw_only=True)
class LinearTerms(ServerRule, ABC):
    """Keeps a value v_i of each tensor for every device that has answered, zero before, and their sum."""

    averages = False
    """The mean of v_i, which reaches all devices, is any number that a single one wants."""

    @abstractmethod
    def follow(self, own: Floats, common: Floats, answer: DeviceDelta) -> Floats:
        """Return the next v_i; `common` is the mean of all devices' that have answered before this round."""

    @abstractmethod
    def make_term(self, own: Floats, common: Floats) -> Floats:
        """Return t of a device."""

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        made: Tensors = {}
        for name, mean in average_terms(state).items():
            made[f"{TERM}{name}"] = self.make_term(recall(state, f"{OWN}/{device}/{name}", mean), mean).astype(
                np.float32
            )
        return made

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        """Raises EmptyCohort as the mean does."""
        updated, figures = WeightedMean().close(state, uploads, context)
        means, memory = average_terms(state), dict(state.memory)
        for upload in uploads:
            if not upload.samples:
                continue
            tensors = upload.load()
            for name, mean in means.items():
                own, total = f"{OWN}/{upload.device}/{name}", f"{SUM}/{name}"
                before = recall(state, own, mean)
                answer = DeviceDelta(tensors[name].astype(np.float64), upload, context.lr_scale)
                after = self.follow(before, mean, answer)
                memory[own] = after.astype(np.float32)
                memory[total] = np.asarray(memory.get(total, 0.0), np.float64) + after - before
        return replace(updated, memory=memory), figures


def recall(state: ServerState, key: str, like: Array) -> Floats:
    """A kept value in float64; zeros of the shape of `like` if there is none."""
    return np.asarray(state.memory[key], np.float64) if key in state.memory else np.zeros(like.shape)


def average_terms(state: ServerState) -> dict[str, Floats]:
    """The mean of v_i over the devices that have answered; zeros before the first answer."""
    devices = sum(1 for prefix in state.memory_names if prefix.startswith(f"{OWN}/"))
    return {name: recall(state, f"{SUM}/{name}", value) / max(1, devices) for name, value in state.tensors.items()}
