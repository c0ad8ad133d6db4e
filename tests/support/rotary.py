"""Small Transformers with rotary positions, of the same kinds as DINOv3 and EVA-02."""

from functools import partial
from typing import Any

import torch
from timm.layers.config import set_fused_attn
from timm.models.eva import Eva
from torch.nn import LayerNorm

SIZES: dict[str, Any] = {
    "img_size": 24, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3,
    "norm_layer": partial(LayerNorm, eps=1e-5),
}  # fmt: skip
ROTARY: dict[str, dict[str, Any]] = {
    "dinov3": {
        "qkv_bias": False, "init_values": 1e-1, "rope_type": "dinov3", "rope_temperature": 100.0,
        "rope_rotate_half": True, "use_rot_pos_emb": True, "use_abs_pos_emb": False, "num_reg_tokens": 4,
        "use_fc_norm": False, "no_embed_class": True, "global_pool": "token",
    },
    "eva02": {
        "mlp_ratio": 8 / 3, "swiglu_mlp": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4),
        "qkv_fused": False, "scale_mlp": True,
    },
    "bias of queries": {"use_rot_pos_emb": True, "swiglu_mlp": True, "global_pool": "token"},
    "attention pooling": {"use_rot_pos_emb": True, "global_pool": "map", "class_token": False},
}  # fmt: skip
"""Options of timm's `Eva`."""


def make_rotary(kind: str) -> Eva:
    """Make timm's own model with random values, also of biases."""
    set_fused_attn(False)  # as `build_vit` does
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Eva(**SIZES, **ROTARY[kind])
        with torch.no_grad():
            for value in model.parameters():
                value += 0.1 * torch.randn_like(value)
    return model.eval()
