"""timm's Transformers with rotary positions (DINOv3, EVA-02): every block turns queries and keys by their places.

The tables of sines and cosines are constants of a graph. Tensors keep timm's names and shapes. Letters in names:
B batch, N tokens, D width, H heads, W width of one head.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.
"""

from typing import Any, cast

import torch
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.errors import ConfigError
from fedvit.models.vit import ModelPart, PatchViT


class RotaryAttention(nn.Module):
    """Has the parts of timm's attention, and the tables for all patches of an image, in their order."""

    sines_NW: Tensor
    cosines_NW: Tensor

    def __init__(self, attention: EvaAttention, sines_NW: Tensor, cosines_NW: Tensor) -> None:
        super().__init__()
        self.num_heads, self.scale = attention.num_heads, attention.scale
        self.prefix_tokens, self.turns_halves = attention.num_prefix_tokens, attention.rotate_half
        for name, child in attention.named_children():
            self.add_module(name, child)
        for name, value in attention.named_parameters(recurse=False):
            self.register_parameter(name, value)
        self.register_buffer("sines_NW", sines_NW, persistent=False)
        self.register_buffer("cosines_NW", cosines_NW, persistent=False)

    def forward(self, x_BND: Tensor, rope: None = None, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        """timm's blocks pass tables and a mask, which are None here."""
        parts: Any = self

        def split(x_BNI: Tensor) -> Tensor:
            return x_BNI.reshape(*x_BNI.shape[:2], self.num_heads, -1).transpose(1, 2)

        q_BHNW, k_BHNW, v_BHNW = map(split, self._project(x_BND))
        q_BHNW = self._turn(parts.q_norm(q_BHNW)) * self.scale
        k_BHNW = self._turn(parts.k_norm(k_BHNW))
        weights_BHNN = parts.attn_drop((q_BHNW @ k_BHNW.transpose(-2, -1)).softmax(dim=-1))
        out_BND = (weights_BHNN @ v_BHNW).transpose(1, 2).flatten(2)
        return cast(Tensor, parts.proj_drop(parts.proj(parts.norm(out_BND))))

    def _project(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts: Any = self
        if not hasattr(self, "qkv"):
            return parts.q_proj(x_BND), parts.k_proj(x_BND), parts.v_proj(x_BND)
        q_BNI, k_BNI, v_BNI = parts.qkv(x_BND).chunk(3, dim=-1)
        if hasattr(self, "q_bias"):
            q_BNI, v_BNI = q_BNI + parts.q_bias, v_BNI + parts.v_bias
        return q_BNI, k_BNI, v_BNI

    def _turn(self, x_BHNW: Tensor) -> Tensor:
        """Turn pairs of values of the patches by their places; class token and registers have none."""
        first, x_BHNW = x_BHNW.split([self.prefix_tokens, x_BHNW.shape[2] - self.prefix_tokens], dim=2)
        if self.turns_halves:
            one, other = x_BHNW.chunk(2, dim=-1)
            turned = torch.cat([-other, one], dim=-1)
        else:
            one, other = x_BHNW.reshape(*x_BHNW.shape[:3], -1, 2).split(1, dim=-1)
            turned = torch.cat([-other, one], dim=-1).reshape(x_BHNW.shape)
        cosines_NW, sines_NW = (as_constant(table, x_BHNW) for table in (self.cosines_NW, self.sines_NW))
        return torch.cat([first, x_BHNW * cosines_NW + turned * sines_NW], dim=2)


def as_constant(table_NW: Tensor, x_BHNW: Tensor) -> Tensor:
    """Return a table in a form that a trace takes for a constant; it refuses a tensor that is none of its inputs."""
    return cast(Tensor, torch.ops.aten.lift_fresh_copy.default(table_NW)).to(x_BHNW.device)


class _SiLU(nn.Module):
    """torch's SiLU as a product, whose gradient has operators that graphs have."""

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND * torch.sigmoid(x_BND)


class RotaryViT(PatchViT):
    """A `PatchViT` whose blocks need all patches in their order, so that images cannot be masked."""

    kind = "a Transformer with rotary positions"
    has = frozenset[ModelPart]({"norms", "blocks"})

    def __init__(self, name: str, model: Eva) -> None:
        rope: Any = model.rope
        if model.rope_mixed or rope is None:
            raise ConfigError(
                "FV1112", f"model {name!r} is not supported: its rotary positions are learned, or it has none"
            )
        sines_NW, cosines_NW = rope.get_embed(model.patch_embed.grid_size).detach().chunk(2, dim=-1)
        for block in cast(Any, model.blocks):
            attention = block.attn
            if type(attention) is not EvaAttention or attention.gate is not None:
                raise ConfigError(
                    "FV1112", f"model {name!r} is not supported: its attention is {type(attention).__name__}"
                )
            block.attn = RotaryAttention(attention, sines_NW, cosines_NW)
            if isinstance(getattr(block.mlp, "act", None), nn.SiLU):
                block.mlp.act = _SiLU()
        cast(Any, model).pool_include_prefix = False
        super().__init__(name, cast(VisionTransformer, model))
