"""timm's attention, extensible by additional keys and values.

Tensors keep timm's names. Letters in names: B batch, N tokens, M keys, D width, I inner width of all heads,
H heads, W width of one head.
"""

from typing import cast

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.models.attend import attend
from fedvit.models.model_patch import plain_blocks
from fedvit.models.vit import PatchViT


class KeysValues(nn.Module):
    """A child of `OpenAttention` that makes keys and values (B, M, I) of what enters the attention.

    `joined` says where they go: in front of those of the tokens, as keys of their own, or, with M = N, added to them.
    """

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class OpenAttention(nn.Module):
    """Has the parts of timm's attention, and adds the keys and values of its `KeysValues` children."""

    qkv: nn.Linear
    q_norm: nn.Module
    k_norm: nn.Module
    attn_drop: nn.Dropout
    norm: nn.Module
    proj: nn.Linear
    proj_drop: nn.Dropout

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.num_heads: int = attention.num_heads
        self.inner_width: int = attention.num_heads * attention.head_dim
        self.scale: float = attention.scale
        for name, child in attention.named_children():
            self.add_module(name, child)

    def forward(self, x_BND: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        """timm's blocks pass a mask, which plain ViTs never have."""
        return self.of_first(x_BND, x_BND.shape[1])

    def of_first(self, x_BND: Tensor, queries: int) -> Tensor:
        """(B, asking, D) the output for the first tokens alone."""
        return attend(self, x_BND, queries, self._more)

    def _more(self, x_BND: Tensor, k_BMI: Tensor, v_BMI: Tensor) -> tuple[Tensor, Tensor]:
        children = [child for child in self.children() if isinstance(child, KeysValues)]
        for child in sorted(children, key=lambda child: child.joined):  # sums first: they need M = N
            keys, values = child(x_BND)
            if child.joined:
                k_BMI, v_BMI = torch.cat([keys, k_BMI], dim=1), torch.cat([values, v_BMI], dim=1)
            else:
                k_BMI, v_BMI = k_BMI + keys, v_BMI + values
        return k_BMI, v_BMI


def attentions(vit: PatchViT) -> list[Attention | OpenAttention]:
    """The attention of every block. Raises ConfigError if they are not the plain ones."""
    found = [cast(Attention | OpenAttention, block.attn) for block in plain_blocks(vit)]
    for attention in found:
        if type(attention) not in (Attention, OpenAttention):
            raise ConfigError(
                "FV1112", f"model {vit.name!r} cannot be changed: its attention is {type(attention).__name__}"
            )
    return found


def open_attentions(vit: PatchViT) -> list[OpenAttention]:
    """The attention of every block, replaced by an extensible one."""
    for block, attention in zip(plain_blocks(vit), attentions(vit), strict=True):
        if isinstance(attention, Attention):
            block.attn = OpenAttention(attention)
    return cast(list[OpenAttention], attentions(vit))
