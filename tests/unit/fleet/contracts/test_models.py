"""Laws of models hold for fedvit's own, of images and of text, and refuse models that break them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fleet.contracts.models
from fedvit.model_options import CNN, LSTM, RESNET, SMALL, TEXT, PackagedModel
from fedvit.models.pixels import PixelModel
from fleet.contracts import find_break
from fleet.contracts.laws import Law
from fleet.contracts.models import LAWS, classify_samples, follow_its_seed, have_dimensions
from fleet.contracts.training import SMALL_MODEL

OPTIONS: dict[str, dict[str, Any]] = {
    SMALL: SMALL_MODEL,
    CNN: {"image_size": 16, "width": 4},
    RESNET: {"image_size": 12, "width": 8, "stages": 2},
    TEXT: {"context": 12, "width": 16, "depth": 1, "heads": 2},
    LSTM: {"context": 12, "width": 8, "depth": 1},
}
FAST = [law for law in LAWS if "torch" not in (law.__doc__ or "")]


@pytest.mark.parametrize("law", [*FAST, *(pytest.param(law, marks=pytest.mark.slow) for law in LAWS[len(FAST) :])])
@pytest.mark.parametrize("name", [SMALL, RESNET, CNN, TEXT, LSTM])
def test_fedvits_own_models_obey_the_laws(law: Law, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.contracts.models, "SMALL_MODEL", OPTIONS[name])
    assert find_break(law, name) is None


class Layers(nn.Module):
    def __init__(self, classes: int, seed: int | None = None) -> None:
        super().__init__()
        self.embed_dim, self.num_classes, self.num_prefix_tokens = 3, classes, 0
        self.blocks = nn.Sequential(nn.Identity())
        self.head = nn.Linear(3, classes)
        if seed is not None:
            nn.init.constant_(self.head.weight, seed)
            nn.init.constant_(self.head.bias, seed)


class Mixing(PixelModel):
    def enter(self, images_B3SS: Tensor) -> Tensor:
        return images_B3SS - images_B3SS.mean(dim=0)

    def activation_bytes(self, tokens: int) -> int:
        return 0

    def product_rows(self, tokens: int) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Broken(PackagedModel):
    def build(self, name: str, classes: int) -> Any:
        return Mixing(name, 8, Layers(classes, seed=1))


@pytest.mark.parametrize(
    ("law", "reason"),
    [
        (follow_its_seed, "seed 1 gives the same"),
        (classify_samples, "logits depend on the other samples of a batch"),
        (have_dimensions, "activation_bytes is 0"),
    ],
)
def test_a_broken_model_is_found(law: Law, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str, seed: int = 0, classes: int = 10) -> Any:
        torch.manual_seed(seed)
        return Broken().build(name, classes)

    monkeypatch.setattr(fleet.contracts.models, "_build", build)
    found = find_break(law, "broken")
    assert found is not None
    assert reason in found
