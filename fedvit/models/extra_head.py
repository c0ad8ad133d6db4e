"""A linear layer beside the model's own head, which reads the same features."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedvit.errors import ConfigError
from fedvit.model_options import check_choice
from fedvit.models.model_patch import ModelPatch, seed_random
from fedvit.models.vit import PatchViT


@dataclass(frozen=True, kw_only=True)
class ExtraHead(ModelPatch):
    """One more linear layer from the class token to the classes, as FedRoD's personal head; `PatchViT.head` runs it.

    Source: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification",
    arXiv:2107.00778. It begins as torch's Linear does ("torch"), at zero, or with the values of the model's own head.
    With `widths` it gives that many times the model's width instead of classes. Tensors: `<name>.{weight,bias}`.
    """

    name: str = "personal_head"
    init: Literal["torch", "zero", "head"] = "torch"
    widths: int = 0
    bias: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError("FV1104", f"ExtraHead option name = {self.name!r} must be a word")
        check_choice("ExtraHead", "init", self.init, ("torch", "zero", "head"))

    def apply(self, vit: PatchViT, seed: int) -> None:
        with seed_random(seed, self.name):
            head = nn.Linear(vit.width, self.widths * vit.width or vit.classes, bias=self.bias)
        if self.init == "zero":
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        elif self.init == "head":
            head.load_state_dict(vit.vit.head.state_dict())
        vit.add(self.name, head)
