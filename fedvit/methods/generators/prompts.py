"""Generators of prompts: what a device's descriptor makes of a base that all devices share.

Letters in names: K prompts, D their width, T descriptor tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.methods.calculus import Named
from fedvit.methods.generators.base import Generator

BASE, DESCRIPTOR = "base", "descriptor"


@dataclass(frozen=True, kw_only=True)
class PromptBasis(Generator):
    """Every device gets the base itself; the others build on it."""

    target: str  # name of the generated tensor
    first: Tensor  # (K, D) what the base begins with

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {BASE: self.first.clone()}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        return {self.target: shared[BASE]}


@dataclass(frozen=True, kw_only=True)
class PromptAttention(PromptBasis):
    """The base, and what the descriptor finds in it by attention.

    P = P_base + softmax((d W_Q) (P_base W_K)^T / sqrt(D)) (P_base W_V) W_O, one head of full width. With one
    descriptor token the sum's second part is one row, added to every prompt; with K it is another for each.
    W_* begin as Xavier does, uniform; descriptors uniform in +-`bound`. With `normalise` queries and keys are made of
    layer-normalised d and P_base, without which weights are nearly equal while d and P_base are small.
    Source: Yang et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
    Generation", arXiv:2308.15367, equation 3.
    """

    bound: float
    descriptor_tokens: int = 1  # 1 or K
    zero_output: bool = False  # W_O begins at zero: every device gets the base at first
    normalise: bool = True  # queries and keys are made of normalised rows

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        width = self.first.shape[1]
        xavier = math.sqrt(6 / (width + width))
        weights = {name: _uniform((width, width), xavier, draw) for name in ("query", "key", "value", "output")}
        if self.zero_output:
            weights["output"] = torch.zeros(width, width)
        return {**super().shared(draw), **weights}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {DESCRIPTOR: _uniform((self.descriptor_tokens, self.first.shape[1]), self.bound, draw)}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        base_KD, descriptor_TD = shared[BASE], personal[DESCRIPTOR]
        query_TD, key_KD = self._seen(descriptor_TD) @ shared["query"], self._seen(base_KD) @ shared["key"]
        weights_TK = torch.softmax(query_TD @ key_KD.T / math.sqrt(key_KD.shape[1]), dim=1)
        return {self.target: base_KD + weights_TK @ (base_KD @ shared["value"]) @ shared["output"]}

    def _seen(self, rows: Tensor) -> Tensor:
        """Rows as queries and keys are made of them: normalised as by a layer norm without parameters."""
        return torch.nn.functional.layer_norm(rows, rows.shape[-1:]) if self.normalise else rows


@dataclass(frozen=True, kw_only=True)
class PromptStatistics(PromptBasis):
    """Each prompt of the base with the descriptor's mean and standard deviation (AdaIN); nothing else is learnt.

    Source: arXiv:2308.15367, Table 4; Huang and Belongie, arXiv:1703.06868.
    """

    bound: float
    eps: float = 1e-5

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {DESCRIPTOR: _uniform((self.first.shape[1],), self.bound, draw)}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        base_KD, descriptor_D = shared[BASE], personal[DESCRIPTOR]
        mean_K1 = base_KD.mean(dim=1, keepdim=True)
        spread_K1 = base_KD.std(dim=1, correction=0, keepdim=True)
        plain_KD = (base_KD - mean_K1) / (spread_K1 + self.eps)
        return {self.target: descriptor_D.std(correction=0) * plain_KD + descriptor_D.mean()}


def _uniform(shape: tuple[int, ...], bound: float, draw: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=draw)
