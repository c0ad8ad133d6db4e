"""The cost of a Vision Transformer by formula, with options for terms that papers omit.

Letters: n tokens, D width, A width of all heads together, H width of the MLP, r rank.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from fedvit.models.vit import PatchViT
from fedvit.program import count_kept_patches


@dataclass(frozen=True, kw_only=True)
class VitShape:
    """The sizes that a plain ViT's cost follows from; those of timm's vit_base_patch16_224 are the default."""

    width: int = 768
    attention_width: int = 768
    mlp_width: int = 3072
    depth: int = 12
    patches: int = 196
    patch_values: int = 768
    prefix_tokens: int = 1
    classes: int = 1000

    @classmethod
    def of(cls, vit: PatchViT) -> Self:
        tensors = vit.tensors()
        return cls(
            width=vit.width,
            attention_width=tensors["blocks.0.attn.proj.weight"].shape[1],
            mlp_width=tensors["blocks.0.mlp.fc1.weight"].shape[0],
            depth=vit.depth,
            patches=vit.patches,
            patch_values=3 * vit.patch_size**2,
            prefix_tokens=vit.prefix_tokens,
            classes=vit.classes,
        )


class Convention(NamedTuple):
    """A way to count multiply-adds, by default all of them; papers omit or add terms."""

    projections: bool = True  # queries, keys, values and output of attention
    attention_products: bool = True  # Q K^T and A V
    norm_cost: int = 0  # per element of every LayerNorm
    full_image_embedding: bool = False  # dropped patches are embedded, too


EVERYTHING = Convention()
EFTVIT_CONVENTION = Convention(projections=False, norm_cost=5, full_image_embedding=True)
"""EFTViT's Tables 3 and 4, except for Fed-LoRA, whose count has the projections and lacks the attention products."""


def forward_macs(
    shape: VitShape,
    count: Convention = EVERYTHING,
    *,
    mask_ratio: float = 0.0,
    extra_tokens: int = 0,
    lora_rank: int = 0,
) -> int:
    """Multiply-adds of one image's forward pass; `extra_tokens` are prompts, `lora_rank` that of additions to queries
    and values.

    >>> round(forward_macs(VitShape(classes=100), EFTVIT_CONVENTION, mask_ratio=0.75) / 1e9, 3)
    2.998
    """
    kept = count_kept_patches(shape.patches, mask_ratio)
    n, d, a = shape.prefix_tokens + kept + extra_tokens, shape.width, shape.attention_width
    block = 2 * n * d * shape.mlp_width + 2 * count.norm_cost * n * d
    if count.projections:
        block += 4 * n * d * a
    if count.attention_products:
        block += 2 * n**2 * a
    block += 2 * n * lora_rank * (d + a)
    embedded = shape.patches if count.full_image_embedding else kept
    return embedded * shape.patch_values * d + shape.depth * block + count.norm_cost * n * d + d * shape.classes


def parameters(shape: VitShape, *, blocks: int | None = None, final_norm: bool = True) -> int:
    """Numbers in the embedding, the first `blocks` blocks (None: all), the final norm and the head; all with biases.

    EFTViT's Table 5 counts what devices train, without the final norm, in units of 2^20.

    >>> round(parameters(VitShape(classes=10), blocks=2, final_norm=False) / 2**20, 3)
    14.235
    """
    d, a, h = shape.width, shape.attention_width, shape.mlp_width
    embedding = (shape.patch_values + 1) * d + (shape.patches + 2 * shape.prefix_tokens) * d
    block = (3 * (d + 1) * a + (a + 1) * d) + ((d + 1) * h + (h + 1) * d) + 4 * d
    depth = shape.depth if blocks is None else blocks
    return embedding + depth * block + (2 * d if final_norm else 0) + (d + 1) * shape.classes
