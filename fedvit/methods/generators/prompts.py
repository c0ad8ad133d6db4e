"""Generators of prompts: what a device's descriptor makes of a base that all devices share.

Letters in names: K prompts, D their width, T descriptor tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedvit.methods.calculus import Named
from fedvit.methods.generators.base import Generator

BASE, DESCRIPTOR = "base", "descriptor"
MATRICES = ("query", "key", "value", "output")
LARGEST_WEIGHT = 0.9
"""Share of the attention for a base prompt that the query equals; the softmax keeps its gradient."""


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
    W_* begin as Xavier does, uniform; descriptors uniform in +-`bound`.
    With `normalise` the softmax is over cosines, multiplied by `scale_for(K)`. Products of small d and P_base give
    nearly equal weights, and products without a bound grow until one base prompt has all the weight. In both cases
    descriptors get no gradient, and all devices the same prompts.
    Source: Yang et al., "Efficient Model Personalization in Federated Learning via Client-Specific Prompt
    Generation", arXiv:2308.15367, equation 3.
    """

    bound: float
    descriptor_tokens: int = 1  # 1 or K
    zero_output: bool = False  # W_O begins at zero: every device gets the base at first
    normalise: bool = True  # cosines of queries and keys in place of their products
    matrix_rate: float = 1.0  # factor of the server's learning rate for W_Q, W_K, W_V and W_O

    @property
    def relative_rates(self) -> Mapping[str, float]:
        return dict.fromkeys(MATRICES, self.matrix_rate)

    def shared(self, draw: torch.Generator) -> dict[str, Tensor]:
        width = self.first.shape[1]
        xavier = math.sqrt(6 / (width + width))
        weights = {name: _uniform((width, width), xavier, draw) for name in MATRICES}
        if self.zero_output:
            weights["output"] = torch.zeros(width, width)
        return {**super().shared(draw), **weights}

    def personal(self, draw: torch.Generator) -> dict[str, Tensor]:
        return {DESCRIPTOR: _uniform((self.descriptor_tokens, self.first.shape[1]), self.bound, draw)}

    def generate(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        base_KD, weights_TK = shared[BASE], self._weights(shared, personal)
        return {self.target: base_KD + weights_TK @ (base_KD @ shared["value"]) @ shared["output"]}

    def describe(self, shared: Named, personal: Named) -> dict[str, Tensor]:
        """Return the entropy of the attention's weights, mean over descriptor tokens, as a share of log K."""
        weights_TK = self._weights(shared, personal)
        keys = weights_TK.shape[1]
        if keys == 1:
            return {}
        return {"attention_entropy": torch.special.entr(weights_TK).sum(dim=1).mean() / math.log(keys)}

    def _weights(self, shared: Named, personal: Named) -> Tensor:
        query_TD, key_KD = personal[DESCRIPTOR] @ shared["query"], shared[BASE] @ shared["key"]
        keys, width = key_KD.shape
        if not self.normalise:
            return torch.softmax(query_TD @ key_KD.T / math.sqrt(width), dim=1)
        cosine_TK = normalize(query_TD, dim=1) @ normalize(key_KD, dim=1).T
        return torch.softmax(scale_for(keys) * cosine_TK, dim=1)


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


def scale_for(keys: int) -> float:
    """Scale of cosines with which a key gets `LARGEST_WEIGHT` if the query equals it and the others are orthogonal."""
    return math.log(LARGEST_WEIGHT / (1 - LARGEST_WEIGHT) * max(keys - 1, 1))


def _uniform(shape: tuple[int, ...], bound: float, draw: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=draw)
