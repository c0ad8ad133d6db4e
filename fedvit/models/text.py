"""Models that predict every next character of a text, and a small Transformer of this kind, whose blocks are like those
of the Vision Transformers.

Letters in names: B batch, T characters of context, D width, C classes (characters).
"""

from typing import Any, cast

import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedvit.model_options import TextTransformerOptions
from fedvit.models.attend import attend
from fedvit.models.attention import OpenAttention
from fedvit.models.recompute import SampleSeeds
from fedvit.models.vit import ModelPart, PatchViT, take_rows

BEFORE = -1e9
"""Added to an attention score that must have no weight: behind the softmax it is exactly 0."""


class CausalAttention(OpenAttention):
    """timm's attention in which a position reads itself and those before it."""

    def forward(self, x_BTD: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        """The arguments of timm's blocks say nothing here: the mask is always the causal one."""
        place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        mask_TT = (place_T[None, :] > place_T[:, None]).to(x_BTD.dtype) * BEFORE
        return attend(self, x_BTD, x_BTD.shape[1], mask_QM=mask_TT)


class _Characters(nn.Module):
    """The tensors of a model of text, named as a Vision Transformer's where they do the same."""

    def __init__(self, classes: int, options: TextTransformerOptions) -> None:
        super().__init__()
        width, heads, qkv_bias = options.width, options.heads, options.qkv_bias
        self.embed_dim = width
        self.num_classes = classes
        self.num_prefix_tokens = 0
        self.token_embed = nn.Embedding(classes, width)
        self.pos_embed = nn.Parameter(torch.randn(1, options.context, width) * 0.02)
        self.blocks = nn.Sequential()
        for _ in range(options.depth):
            block = Block(width, heads, mlp_ratio=options.mlp_ratio, qkv_bias=qkv_bias)
            attention = Attention(width, heads, attn_head_dim=options.head_width, qkv_bias=qkv_bias)
            cast(Any, block).attn = CausalAttention(attention) if options.causal else attention
            self.blocks.append(block)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.token_embed.weight, std=0.02)


class TextModel(PatchViT):
    """The part of a `PatchViT` that methods use, over characters. Every stage and the logits keep all positions."""

    reads_text = True
    has = frozenset[ModelPart]()

    def __init__(self, name: str, context: int, layers: nn.Module) -> None:
        nn.Module.__init__(self)
        self.name = name
        self.context = context  # characters of a sample
        # methods read tensors, blocks and head, and those that a Transformer has
        self.vit = cast(VisionTransformer, layers.eval())
        self.seeds = SampleSeeds()
        self.recompute = False

    def embed(self, tokens_BT: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        """(B, T, D) characters; the others are None, as nothing is masked and nothing dropped."""
        table_CD = cast(nn.Embedding, cast(nn.Module, self.vit).token_embed).weight
        return take_rows(table_CD, tokens_BT)

    def run_to_class(self, x_BTD: Tensor, first: int, last: int | None = None) -> Tensor:
        """(B, T, D): a prediction is made at every position."""
        return self.run_blocks(x_BTD, first, self.depth if last is None else last)

    def features(self, x_BTD: Tensor, normed: bool = True) -> Tensor:
        """(B, T, D)"""
        return x_BTD


class TextTransformer(TextModel):
    has = frozenset[ModelPart]({"attention", "mlp", "norms", "positions", "blocks"})

    def embed(self, tokens_BT: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        """(B, T, D) characters with their positions."""
        return super().embed(tokens_BT) + cast(Tensor, self.vit.pos_embed)

    def features(self, x_BTD: Tensor, normed: bool = True) -> Tensor:
        """(B, T, D)"""
        return cast(Tensor, self.vit.norm(x_BTD)) if normed else x_BTD


def make_text_transformer(name: str, classes: int, options: TextTransformerOptions) -> TextTransformer:
    return TextTransformer(name, options.context, _Characters(classes, options))
