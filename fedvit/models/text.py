"""Models that predict every next character of a text, and a small Transformer of this kind, whose blocks are like those
of the Vision Transformers.

Letters in names: B batch, T characters of context, D width, C classes (characters).
"""

from typing import Any, cast

import torch
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedvit.model_options import TextTransformerOptions
from fedvit.models.attend import attend
from fedvit.models.attention import OpenAttention
from fedvit.models.recompute import SampleSeeds
from fedvit.models.rotary import as_constant
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


class PostNormBlock(nn.Module):
    """An attention and an MLP with a ReLU, each followed by a norm of its sum with what entered."""

    def __init__(self, attention: Attention, hidden: int) -> None:
        super().__init__()
        width = attention.proj.out_features
        self.attn: nn.Module = attention
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, hidden, act_layer=nn.ReLU)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm1(x_BTD + self.attn(x_BTD))
        return cast(Tensor, self.norm2(x_BTD + self.mlp(x_BTD)))


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


class _ReleasedCharacters(nn.Module):
    """The tensors of FedTP's released model of text. The positions are constants, and the norm follows them."""

    pos_embed: Tensor

    def __init__(self, classes: int, options: TextTransformerOptions) -> None:
        super().__init__()
        width, heads = options.width, options.heads
        self.embed_dim = width
        self.num_classes = classes
        self.num_prefix_tokens = 0
        self.token_embed = nn.Embedding(classes, width)
        self.register_buffer("pos_embed", make_sinusoids(options.context, width), persistent=False)
        self.norm_pre = nn.LayerNorm(width, eps=1e-6)
        self.blocks = nn.Sequential()
        for _ in range(options.depth):
            attention = Attention(width, heads, attn_head_dim=options.head_width, qkv_bias=False, proj_bias=False)
            block = PostNormBlock(attention, round(options.mlp_ratio * width))
            block.attn = CausalAttention(attention) if options.causal else attention
            self.blocks.append(block)
        self.head = nn.Linear(width, classes, bias=False)
        for value in self.parameters():
            if value.dim() > 1:
                nn.init.xavier_uniform_(value)


def make_sinusoids(context: int, width: int) -> Tensor:
    """(1, T, D) sines in even columns, cosines in odd ones. Source: Vaswani et al., arXiv:1706.03762, section 3.5."""
    column = torch.arange(width)
    angles = torch.arange(context).double()[:, None] / 10_000 ** (2 * (column // 2).double() / width)
    return torch.where(column % 2 == 0, angles.sin(), angles.cos()).float().unsqueeze(0)


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


class ReleasedTextTransformer(TextTransformer):
    """FedTP's model of Shakespeare's plays, as its released code has it."""

    has = frozenset[ModelPart]({"attention", "mlp", "norms", "blocks"})

    def embed(self, tokens_BT: Tensor, kept_BN: Tensor | None = None, seeds_B: Tensor | None = None) -> Tensor:
        """(B, T, D) characters with their positions, behind a norm."""
        x_BTD = TextModel.embed(self, tokens_BT)
        return cast(Tensor, self.vit.norm_pre(x_BTD + as_constant(cast(Tensor, self.vit.pos_embed), x_BTD)))

    def features(self, x_BTD: Tensor, normed: bool = True) -> Tensor:
        """(B, T, D): the last block ends with a norm."""
        return x_BTD

    def head(self, features_BD: Tensor, name: str = "head") -> Tensor:
        """(B, T, C) logits, divided by the square root of the width."""
        return super().head(features_BD, name) / float(self.width**0.5)


def make_text_transformer(name: str, classes: int, options: TextTransformerOptions) -> TextTransformer:
    """Make the model with blocks of a Vision Transformer, or that of FedTP's released code (form "fedtp").

    The latter has norms behind attention and MLP, sinusoids as positions, no biases in attention and head, and divides
    logits by the square root of the width. Its dropout and its loss, which weighs characters, are not here.
    """
    if options.form == "fedtp":
        return ReleasedTextTransformer(name, options.context, _ReleasedCharacters(classes, options))
    return TextTransformer(name, options.context, _Characters(classes, options))
