"""A small network whose outputs are the weights of another."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedvit.methods.base import Method
from fedvit.methods.calculus import Named
from fedvit.methods.generators.base import Generator
from fedvit.models.vit import PatchViT
from fedvit.program import Role

EMBEDDING = "embedding"

NORM_SCALES = ("*norm*.weight",)
"""The factors of layer norms. A fresh layer gives values near 0, with which every feature would vanish."""


@dataclass(frozen=True, kw_only=True)
class Hypernetwork(Generator):
    """A trunk from a device's embedding to a hidden vector, and one linear layer from there for each target.

    Trunk: Linear(embedding_dim, hidden), then three times ReLU and Linear(hidden, hidden); no ReLU behind the last.
    Linear layers begin as torch's do, uniform in +-1/sqrt(inputs); embeddings are standard normal.
    Source: Shamsian et al., "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628; as FedTP,
    arXiv:2211.01572, uses it.
    """

    targets: Mapping[str, tuple[int, ...]]  # name of a generated tensor -> its shape
    embedding_dim: int
    hidden: int
    from_one: tuple[str, ...] = NORM_SCALES  # targets around 1 at first: the bias of their layer begins there

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Every linear layer: name -> numbers of inputs and outputs."""
        trunk = {"trunk.0": (self.embedding_dim, self.hidden)}
        trunk |= {f"trunk.{number}": (self.hidden, self.hidden) for number in range(1, 4)}
        heads = {f"head.{name}": (self.hidden, torch.Size(shape).numel()) for name, shape in self.targets.items()}
        return trunk | heads

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for layer, (inputs, outputs) in self.layers.items():
            bound = inputs**-0.5
            values[f"{layer}.weight"] = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=draw)
            bias = torch.empty(outputs).uniform_(-bound, bound, generator=draw)
            target = layer.removeprefix("head.")
            around_one = target in self.targets and any(fnmatchcase(target, pattern) for pattern in self.from_one)
            values[f"{layer}.bias"] = torch.ones(outputs) if around_one else bias
        return values

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {EMBEDDING: torch.randn(self.embedding_dim, generator=draw)}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        def linear(layer: str, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, shared[f"{layer}.weight"], shared[f"{layer}.bias"])

        hidden = linear("trunk.0", personal[EMBEDDING])
        for number in range(1, 4):
            hidden = linear(f"trunk.{number}", hidden.relu())
        return {name: linear(f"head.{name}", hidden).reshape(shape) for name, shape in self.targets.items()}


def list_generated_shapes(method: Method, vit: PatchViT) -> dict[str, tuple[int, ...]]:
    """The targets of a method whose generated tensors a hypernetwork makes."""
    tensors = method.tensors(vit)
    return {name: tuple(tensors[name].shape) for name in method.names_with(vit, Role.GENERATED)}
