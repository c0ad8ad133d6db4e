"""Several server rules for one method: each takes its own tensors of an upload."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.methods.base import RoundContext, ServerRule, ServerState, Upload
from fedvit.roles import Novel
from fedvit.tensors import Tensors


@dataclass(frozen=True)
class Together(ServerRule):
    """Applies the rules one after another; their states have different names."""

    rules: tuple[ServerRule, ...]

    @property
    def why_never_late(self) -> str | None:
        return next((why for rule in self.rules if (why := rule.why_never_late)), None)

    @property
    def discounts(self) -> bool:
        return all(rule.discounts for rule in self.rules)

    @property
    def why_no_regions(self) -> str | None:
        return next((why for rule in self.rules if (why := rule.why_no_regions)), None)

    @property
    def averages(self) -> bool:
        return all(rule.averages for rule in self.rules)

    @property
    def is_divided(self) -> bool:
        return any(rule.is_divided for rule in self.rules)

    @property
    def needs_images(self) -> bool:
        return any(rule.needs_images for rule in self.rules)

    def for_novel(self, learns: Novel) -> ServerRule | None:
        left = tuple(own for rule in self.rules if (own := rule.for_novel(learns)))
        return Together(left) if left else None

    def begin(self, seed: int) -> Tensors:
        return {name: value for rule in self.rules for name, value in rule.begin(seed).items()}

    def generate(self, state: ServerState, device: str, seed: int) -> Tensors:
        return {name: value for rule in self.rules for name, value in rule.generate(state, device, seed).items()}

    def generate_for(
        self, state: ServerState, devices: Sequence[str], seed: int, place: torch.device
    ) -> dict[str, Tensor]:
        return {
            name: value for rule in self.rules for name, value in rule.generate_for(state, devices, seed, place).items()
        }

    def close(
        self, state: ServerState, uploads: Sequence[Upload], context: RoundContext
    ) -> tuple[ServerState, dict[str, float]]:
        figures: dict[str, float] = {}
        for rule in self.rules:
            if context.rank and not rule.is_divided:
                continue
            state, own_figures = rule.close(state, uploads, context)
            figures |= own_figures
        return state, figures
