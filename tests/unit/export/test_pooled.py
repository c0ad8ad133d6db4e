"""Graphs of models whose head reads no class token: exported, and verified against torch as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.config import set_fused_attn
from timm.models.vision_transformer import VisionTransformer

from export.graphs import export_graphs
from fedvit.methods.eftvit import EFTViT
from fedvit.methods.fedavg import FedAvg
from fedvit.models.vit import PatchViT
from fedvit.program import Batch

MODELS: dict[str, dict[str, Any]] = {
    "mean": {"global_pool": "avg", "class_token": False},
    "mean beside class token and registers": {"global_pool": "avg", "reg_tokens": 2, "init_values": 1.0},
    "attention": {"global_pool": "map", "class_token": False},
}
BATCH = {"image_size": 16, "patch_size": 8, "batch_size": 4, "mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("masked", [False, True], ids=["whole images", "masked images, split model"])
def test_graphs_of_models_that_pool(name: str, masked: bool, graph_cache: Path) -> None:
    set_fused_attn(False)  # as `build_vit` does
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vit = PatchViT(
            "made here",
            VisionTransformer(
                img_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2, num_classes=3, **MODELS[name]
            ),
        )
    method = EFTViT(batch_size=4, local_blocks=1, mask=0.5) if masked else FedAvg(batch_size=4)
    batch = Batch(**BATCH, mask_ratio=0.5) if masked else Batch(**BATCH)
    graphs = export_graphs(method, vit, batch, cache=graph_cache)
    assert {"train", "predict"} <= set(graphs)
    assert all(exported.max_difference < 1e-5 for exported in graphs.values())
