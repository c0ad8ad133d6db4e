"""The cost of a Vision Transformer by formula, with options for terms that papers omit.

Letters: n tokens, D width, A width of all heads together, H width of the MLP, r rank.
"""

from dataclasses import dataclass
from typing import Self

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


def forward_macs(
    shape: VitShape,
    *,
    mask_ratio: float = 0.0,
    extra_tokens: int = 0,
    lora_rank: int = 0,
    projections: bool = True,
    attention_products: bool = True,
    norm_cost: int = 0,
    full_image_embedding: bool = False,
) -> int:
    """Multiply-adds of one image's forward pass.

    `extra_tokens` are prompts, `lora_rank` that of additions to queries and values. Terms that a counter may omit:
    `projections` (queries, keys, values and output of attention), `attention_products` (Q K^T and A V). It may
    add `norm_cost` per element of every LayerNorm, `full_image_embedding` where dropped patches are embedded, too.

    EFTViT's Table 3 and 4 leave out the projections, have a norm cost of 5 and embed full images, but for Fed-LoRA,
    whose count has the projections and lacks the attention products.

    >>> eftvit = {"projections": False, "norm_cost": 5, "full_image_embedding": True}
    >>> round(forward_macs(VitShape(classes=100), mask_ratio=0.75, **eftvit) / 1e9, 3)
    2.998
    """
    kept = count_kept_patches(shape.patches, mask_ratio)
    n, d, a = shape.prefix_tokens + kept + extra_tokens, shape.width, shape.attention_width
    block = 2 * n * d * shape.mlp_width + 2 * norm_cost * n * d
    if projections:
        block += 4 * n * d * a
    if attention_products:
        block += 2 * n**2 * a
    block += 2 * n * lora_rank * (d + a)
    embedded = shape.patches if full_image_embedding else kept
    return embedded * shape.patch_values * d + shape.depth * block + norm_cost * n * d + d * shape.classes


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
