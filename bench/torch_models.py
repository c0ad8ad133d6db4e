"""The cases' models as users of torch and timm write them: fused attention, plain modules.

Trained tensors have `requires_grad`. fedvit's own models are not used, so that the comparison is with other code; tests
check that both compute the same.
"""

from collections.abc import Callable
from typing import Any, cast

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from bench.cases import Case


def build_plain(case: Case) -> nn.Module:
    """The whole model trains."""
    return _build_vit(case)


def build_eftvit(case: Case) -> nn.Module:
    """Embedding, the first blocks and the head train; timm's own patch dropout is the mask."""
    vit = _build_vit(case, patch_drop_rate=case.options["mask"])
    vit.blocks[case.options["local_blocks"] :].requires_grad_(False)
    vit.norm.requires_grad_(False)
    return vit


def build_fedperfix(case: Case) -> nn.Module:
    """All of the model trains, and in every block an adapter of keys and values."""
    vit = _build_vit(case)
    for block in vit.blocks:
        block.attn = AdaptedAttention(block.attn, case.options["bottleneck"], case.options["scale"])
    return vit


def build_pfedpg(case: Case) -> nn.Module:
    """Prompts and head train."""
    return PromptedViT(_build_vit(case), case.options["tokens"])


def build_resnet(case: Case) -> nn.Module:
    """A ResNet with group norms, of which all trains."""
    return timm.create_model(case.model, num_classes=case.classes, norm_layer="groupnorm")


def build_lstm(case: Case) -> nn.Module:
    """torch's LSTM, of which all trains."""
    sizes = case.model_options
    return Characters(case.classes, sizes["embedding"], sizes["width"], sizes["depth"])


MODELS: dict[str, Callable[[Case], nn.Module]] = {
    "plain": build_plain,
    "eftvit": build_eftvit,
    "fedperfix": build_fedperfix,
    "pfedpg": build_pfedpg,
    "resnet": build_resnet,
    "lstm": build_lstm,
}


def _build_vit(case: Case, **arguments: Any) -> VisionTransformer:
    if case.model != "vit_small_images":
        return cast(VisionTransformer, timm.create_model(case.model, num_classes=case.classes, **arguments))
    sizes = dict(case.model_options)
    return VisionTransformer(
        img_size=sizes.pop("image_size"),
        patch_size=sizes.pop("patch_size"),
        embed_dim=sizes.pop("width"),
        num_heads=sizes.pop("heads"),
        num_classes=case.classes,
        **sizes,
        **arguments,
    )


class AdaptedAttention(nn.Module):
    """timm's attention with an adapter that adds to each token's keys and values."""

    def __init__(self, attention: Any, bottleneck: int, scale: float) -> None:
        super().__init__()
        self.heads, self.scale = attention.num_heads, scale
        self.qkv: nn.Linear = attention.qkv
        self.proj: nn.Linear = attention.proj
        width = self.qkv.in_features
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, 2 * width)

    def forward(self, x: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        added_k, added_v = (self.scale * self.up(torch.tanh(self.down(x)))).chunk(2, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k + added_k, v + added_v))
        out = functional.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.proj(out.transpose(1, 2).flatten(2)))


class Characters(nn.Module):
    """An LSTM that predicts the next character at each position: (B, T) -> (B, classes, T)."""

    def __init__(self, classes: int, embedding: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, width, depth, batch_first=True)
        for layer in range(depth):  # torch adds two biases, of which one is enough
            getattr(self.lstm, f"bias_hh_l{layer}").data.zero_()
            getattr(self.lstm, f"bias_hh_l{layer}").requires_grad_(False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return cast(Tensor, self.head(states)).transpose(1, 2)


class PromptedViT(nn.Module):
    """A frozen ViT with learnable tokens behind its class token."""

    def __init__(self, vit: VisionTransformer, tokens: int) -> None:
        super().__init__()
        self.vit = vit.requires_grad_(False)
        self.vit.head.requires_grad_(True)
        self.prompts = nn.Parameter(torch.randn(tokens, vit.embed_dim) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        vit = self.vit
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
        x = torch.cat([x[:, :1], self.prompts.expand(len(x), -1, -1), x[:, 1:]], dim=1)
        return vit.forward_head(vit.norm(vit.blocks(x)))


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own defaults beside the rate and the weight decay."""
    trained = [value for value in model.parameters() if value.requires_grad]
    kinds: dict[str, type[torch.optim.SGD | torch.optim.AdamW]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    kind = kinds[case.options["optimizer"]]
    return kind(trained, lr=case.options["lr"], weight_decay=case.options.get("weight_decay", 0.0))
